"""The dependency graph: checks, start and stop order. Pure; knows only names and edges."""

from __future__ import annotations

from init.errors import ConfigError, nearest, raise_all

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from init.plan.service import Service

    Edges = Mapping[str, frozenset[str]]

RESERVED = ("init", "syslog", "drain", "resume")  # names in the log, and the role's errands


def start_edges(services: Iterable[Service]) -> dict[str, frozenset[str]]:
    """Return what each service waits for before it starts: its needs, and what else it names that is in this pod."""
    listed = list(services)
    present = {service.name for service in listed}
    return {
        service.name: frozenset((*service.needs, *service.after, *service.bound_to)) & present for service in listed
    }


def stop_edges(services: Iterable[Service]) -> dict[str, frozenset[str]]:
    """Return what must stop before each service: its dependants, and its `stop.after`."""
    listed = list(services)
    present = {service.name for service in listed}
    edges = {service.name: set(service.stop.after) & present for service in listed}
    for name, waits in start_edges(listed).items():
        for other in waits:
            edges[other].add(name)
    return {name: frozenset(before) for name, before in edges.items()}


def waves(edges: Edges) -> list[tuple[str, ...]]:
    """Group the names so that each group waits only for earlier ones; a group runs in parallel."""
    remaining = {name: set(waits) & set(edges) for name, waits in edges.items()}
    groups = []
    while remaining:
        wave = tuple(sorted(name for name, waits in remaining.items() if not waits))
        if not wave:
            raise ConfigError("order the services", f"a cycle: {' -> '.join(cycle(edges))}")
        groups.append(wave)
        for name in wave:
            del remaining[name]
        for waits in remaining.values():
            waits.difference_update(wave)
    return groups


def cycle(edges: Edges) -> list[str]:
    """Return one cycle, its first name repeated at the end, or nothing."""
    from graphlib import CycleError, TopologicalSorter  # imported late: only a mistake needs it

    try:
        TopologicalSorter({name: sorted(edges[name]) for name in sorted(edges)}).prepare()
    except CycleError as error:
        names = error.args[1][:0:-1]  # in that list each name comes before its dependants
        first = names.index(min(names))
        return [*names[first:], *names[: first + 1]]
    return []


def check(services: Sequence[Service]) -> None:
    """Raise all errors between the services at once."""
    errors: list[ConfigError] = []
    by_name: dict[str, Service] = {}
    for service in services:
        if service.name in by_name:
            other = by_name[service.name].file
            errors.append(_error(service, "name", f"{service.name!r} is also defined in {other}"))
        if service.name in RESERVED:
            problem = f"{service.name!r} is a reserved name of PID 1"
            errors.append(_error(service, "name", problem, f"choose another name; reserved: {', '.join(RESERVED)}"))
        by_name[service.name] = service
    for service in services:
        for other in service.needs:
            if other not in by_name:
                errors.append(_error(service, "needs", f"no service {other!r}", nearest(other, list(by_name))))
    if not errors:
        for what, edges in (("start", start_edges(services)), ("stop", stop_edges(services))):
            try:
                waves(edges)
            except ConfigError:
                names = cycle(edges)
                errors.append(_error(by_name[names[0]], "needs", f"a cycle in the {what} order: {' -> '.join(names)}"))
                break
    raise_all("check the services", errors)


def _error(service: Service, field: str, why: str, hint: str = "") -> ConfigError:
    return ConfigError(f"place service {service.name}", why, file=service.file, field=field, hint=hint)
