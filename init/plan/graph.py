"""Who waits for whom: checks, start and stop order. Pure; it sees only names and edges."""

from __future__ import annotations

from init.errors import ConfigError, nearest, raise_all

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from init.plan.service import Service

    Edges = Mapping[str, frozenset[str]]

RESERVED = ("init", "syslog", "drain", "resume")  # in the log, and the role's own errands


def start_edges(services: Iterable[Service]) -> dict[str, frozenset[str]]:
    """What each service waits for before it starts: its needs, and those of `after` that are in this pod."""
    found = list(services)
    present = {service.name for service in found}
    return {service.name: frozenset(service.needs) & present | frozenset(service.after) & present for service in found}


def stop_edges(services: Iterable[Service]) -> dict[str, frozenset[str]]:
    """Which services must have stopped before each may be: those that waited for it, and its `stop.after`."""
    found = list(services)
    present = {service.name for service in found}
    edges = {service.name: set(service.stop.after) & present for service in found}
    for name, waits in start_edges(found).items():
        for other in waits:
            edges[other].add(name)
    return {name: frozenset(before) for name, before in edges.items()}


def waves(edges: Edges) -> list[tuple[str, ...]]:
    """Names grouped so that each group waits only for earlier ones; those within a group go side by side."""
    left = {name: set(waits) & set(edges) for name, waits in edges.items()}
    found = []
    while left:
        wave = tuple(sorted(name for name, waits in left.items() if not waits))
        if not wave:
            raise ConfigError("order the services", f"a cycle: {' -> '.join(cycle(edges))}")
        found.append(wave)
        for name in wave:
            del left[name]
        for waits in left.values():
            waits.difference_update(wave)
    return found


def cycle(edges: Edges) -> list[str]:
    """One cycle, its first name repeated at the end, or nothing."""
    from graphlib import CycleError, TopologicalSorter  # only a mistake pays for it

    try:
        TopologicalSorter({name: sorted(edges[name]) for name in sorted(edges)}).prepare()
    except CycleError as error:
        found = error.args[1][:0:-1]  # there each one comes before those that wait for it
        first = found.index(min(found))
        return [*found[first:], *found[: first + 1]]
    return []


def check(services: Sequence[Service]) -> None:
    """Raise everything that is wrong between the services, at once."""
    errors: list[ConfigError] = []
    by_name: dict[str, Service] = {}
    for service in services:
        if service.name in by_name:
            other = by_name[service.name].file
            errors.append(_error(service, "name", f"{service.name!r} is also defined in {other}"))
        if service.name in RESERVED:
            why = f"{service.name!r} is PID 1's own name for something else"
            errors.append(_error(service, "name", why, f"not {', '.join(RESERVED)}"))
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
                found = cycle(edges)
                errors.append(_error(by_name[found[0]], "needs", f"a cycle in the {what} order: {' -> '.join(found)}"))
                break
    raise_all("check the services", errors)


def _error(service: Service, field: str, why: str, hint: str = "") -> ConfigError:
    return ConfigError(f"place service {service.name}", why, file=service.file, field=field, hint=hint)
