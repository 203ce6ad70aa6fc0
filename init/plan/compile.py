"""A role's plan: its services, checked together, and its drain. Compiled once, stored as JSON."""

from __future__ import annotations

from init.errors import ConfigError, raise_all
from init.fields import expand
from init.lean import read_json, record, replace
from init.plan.service import (
    DrainCommand,
    Kind,
    Probe,
    RestartWhen,
    Service,
    ValueSource,
    WhenCondition,
    check_order,
    start_edges,
    waves,
)
from init.plan.spec import parse_drain, parse_service

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

VERSION = 1


# Convert a service back to its mapping, without defaults, for the plan's JSON and for display.


def service_to_mapping(service: Service) -> dict[str, object]:
    """Return the mapping that `parse_service` turns into this service, without defaults."""
    mapping: dict[str, object] = {"about": service.about, "kind": service.kind.value, "command": list(service.command)}
    mapping["prepare"] = [list(command) for command in service.prepare]
    mapping["when"] = [_condition(item) for item in service.when]
    mapping["needs"], mapping["after"] = list(service.needs), list(service.after)
    mapping["bound-to"] = list(service.bound_to)
    mapping |= {"user": service.user, "group": service.group, "cwd": service.cwd, "umask": f"{service.umask:04o}"}
    mapping["environment"] = {
        item.name: item.value if item.source is ValueSource.VALUE else {item.source.value: item.value}
        for item in service.environment
    }
    mapping["environment-files"] = list(service.environment_files)
    mapping["limits"] = {item.name: f"{_limit(item.soft)}:{_limit(item.hard)}" for item in service.limits}
    mapping["log"] = service.log.value
    for key, number in (("every", service.every), ("timeout", service.timeout), ("watchdog", service.watchdog)):
        mapping[key] = number
    restart = service.restart
    default = RestartWhen.ALWAYS if service.kind is Kind.LONGRUN else RestartWhen.FAILURE
    parts: dict[str, object] = {"delay": restart.delay, "max-delay": restart.max_delay, "jitter": restart.jitter}
    parts |= {"limit": restart.limit, "window": restart.window, "exhausted": restart.exhausted.value}
    parts |= _full({"fatal-codes": list(restart.fatal_codes)})
    mapping["restart"] = _trim(parts) | ({} if restart.when is default else {"when": restart.when.value})
    stop = service.stop
    stopping = _trim({"signal": stop.signal, "grace": stop.grace})
    mapping["stop"] = stopping | _full({"command": list(stop.command), "after": list(stop.after)})
    mapping["reload"] = _full({"signal": service.reload.signal, "command": list(service.reload.command)})
    ready = service.ready
    value: object = {Probe.NOTIFY: None, Probe.NONE: None, Probe.EXEC: list(ready.command)}.get(
        ready.probe, ready.target
    )
    if ready.probe is not Probe.NONE or ready.within:
        extra = _trim(
            {"interval": ready.interval, "within": ready.within, "late": ready.late.value}, timeout=ready.timeout
        )
        mapping["ready"] = {ready.probe.value: value} | extra
    mapping = _trim(_full(mapping))
    if service.groups is not None:
        mapping["groups"] = list(service.groups)
    if service.capabilities is not None:
        mapping["capabilities"] = list(service.capabilities)
    if service.oom_score is not None:
        mapping["oom-score"] = service.oom_score
    if service.no_new_privileges:
        mapping["no-new-privileges"] = True
    if service.required is (service.kind is Kind.PERIODIC):
        mapping["required"] = service.required
    return mapping


_DEFAULTS: dict[str, object] = {
    "kind": "longrun", "cwd": "/", "umask": "0022", "log": "tagged", "every": 0.0, "timeout": 0.0, "watchdog": 0.0,
    "delay": 1.0, "max-delay": 30.0, "jitter": 0.2, "limit": 0, "window": 60.0, "exhausted": "degrade",
    "signal": "TERM", "grace": 10.0, "interval": 0.25, "within": 0.0, "late": "fail",
}  # fmt: skip


def _trim(parts: dict[str, object], timeout: float = 0.0) -> dict[str, object]:
    changed = {key: value for key, value in parts.items() if key not in _DEFAULTS or value != _DEFAULTS[key]}
    return changed | ({"timeout": timeout} if timeout not in (0.0, 5.0) else {})


def _full(parts: dict[str, object]) -> dict[str, object]:
    return {key: value for key, value in parts.items() if value not in ("", [], {})}


def _limit(number: int) -> str:
    return "unlimited" if number < 0 else str(number)


def _condition(item: WhenCondition) -> dict[str, object]:
    if item.path:
        return {"path": item.path, "exists": item.wanted}
    if item.one_of:
        return {"value": item.value, "in": list(item.one_of)}
    if item.none_of:
        return {"value": item.value, "not-in": list(item.none_of)}
    return {"value": item.value, "set": item.wanted}


@record(frozen=True, slots=True)
class Plan:
    role: str
    services: tuple[Service, ...]  # in start order
    drain: DrainCommand | None = None

    def service(self, name: str) -> Service | None:
        return next((service for service in self.services if service.name == name), None)


@record(frozen=True, slots=True)
class Change:
    """Difference between a new plan and the running one."""

    added: tuple[str, ...]
    removed: tuple[str, ...]
    changed: tuple[str, ...]


def compile_plan(role: str, services: Iterable[Service], drain: DrainCommand | None = None) -> Plan:
    """Check the services together and put them in start order."""
    listed = list(services)
    check_order(listed)
    by_name = {service.name: service for service in listed}
    order = [by_name[name] for wave in waves(start_edges(listed)) for name in wave]
    return Plan(role, tuple(order), drain)


def overlay(plan: Plan, services: Iterable[Service]) -> Plan:
    """Merge an operator's services into the plan: one of the same name replaces the image's as a whole."""
    merged = {service.name: service for service in plan.services} | {service.name: service for service in services}
    return compile_plan(plan.role, merged.values(), plan.drain)


def without(plan: Plan, names: Iterable[str]) -> Plan:
    """Remove services from the plan; the check reports services that need them."""
    removed = set(names)
    return compile_plan(plan.role, [service for service in plan.services if service.name not in removed], plan.drain)


def select(plan: Plan, env: Mapping[str, str], exists: Callable[[str], bool]) -> Plan:
    """Select the services of this pod. A need on a service whose `when` does not hold is dropped."""
    chosen = [service for service in plan.services if all(holds(item, env, exists) for item in service.when)]
    present = {service.name for service in chosen}
    services = tuple(
        replace(
            service,
            needs=tuple(name for name in service.needs if name in present),
            after=tuple(name for name in service.after if name in present),
            bound_to=tuple(name for name in service.bound_to if name in present),
        )
        for service in chosen
    )
    return Plan(plan.role, services, plan.drain)


def holds(condition: WhenCondition, env: Mapping[str, str], exists: Callable[[str], bool]) -> bool:
    if condition.path:
        return exists(expand(condition.path, env)) is condition.wanted
    try:
        value = expand(condition.value, env)
    except KeyError:
        value = ""
    if condition.one_of:
        return value in condition.one_of
    if condition.none_of:
        return value not in condition.none_of
    return bool(value) is condition.wanted


def unset_variables(plan: Plan, env: Mapping[str, str]) -> list[ConfigError]:
    """Report variables without a default that the pod does not set; files read at the start may still set some."""
    errors = []
    for service in plan.services:
        if service.environment_files:
            continue
        own = dict(env) | {variable.name: variable.value or "x" for variable in service.environment}
        texts = [("command", text) for text in service.command]
        texts += [("prepare", text) for command in service.prepare for text in command]
        texts += [("ready", text) for text in (service.ready.target, *service.ready.command)]
        texts += [("environment", item.value) for item in service.environment if item.source is ValueSource.VALUE]
        for field, text in texts:
            try:
                expand(text, own if field != "environment" else env)
            except KeyError as missing:
                problem = f"${{{missing.args[0]}}} is not set in the pod's environment"
                hint = f"set it, or write ${{{missing.args[0]}:-default}}"
                errors.append(ConfigError(f"start {service.name}", problem, file=service.file, field=field, hint=hint))
    return errors


def compare(old: Plan, new: Plan) -> Change:
    before = {service.name: replace(service, file="") for service in old.services}
    after = {service.name: replace(service, file="") for service in new.services}
    return Change(
        added=tuple(name for name in after if name not in before),
        removed=tuple(name for name in before if name not in after),
        changed=tuple(name for name in after if name in before and after[name] != before[name]),
    )


def plan_from_json(text: str | bytes, file: str) -> Plan:
    """Parse and check a compiled plan: a person or an older build may have written it."""
    try:
        data = read_json(text if isinstance(text, str) else text.decode())
    except ValueError as error:
        raise ConfigError("read the plan", f"not JSON: {error}", file=file) from None
    if not isinstance(data, dict) or not isinstance(data.get("services"), dict):
        raise ConfigError("read the plan", "wanted an object with role and services", file=file)
    if data.get("version") != VERSION:
        problem = f"version {data.get('version')!r}, but this init reads {VERSION}"
        raise ConfigError("read the plan", problem, file=file, field="version", hint="build the image again")
    services: list[Service] = []
    errors: list[ConfigError] = []
    for name, mapping in data["services"].items():
        if not isinstance(mapping, dict):
            raise ConfigError(f"read service {name}", "wanted an object", file=file)
        own = dict(mapping)
        origin = own.pop("file", file)
        try:
            services.append(parse_service(name, own, str(origin)))
        except ConfigError as error:
            errors.append(error)
    raise_all("read the plan", errors)
    drain = parse_drain(data["drain"], file) if data.get("drain") else None
    return compile_plan(str(data.get("role", "")), services, drain)


def plan_to_json(plan: Plan) -> str:
    """Format the plan as stable text: the same plan gives the same bytes, and so the same image."""
    import json

    data: dict[str, object] = {
        "version": VERSION,
        "role": plan.role,
        "services": {service.name: service_to_mapping(service) | {"file": service.file} for service in plan.services},
    }
    if plan.drain is not None:
        drain: dict[str, object] = {"command": list(plan.drain.command), "budget": plan.drain.budget}
        if plan.drain.resume:
            drain["resume"] = list(plan.drain.resume)
        data["drain"] = drain
    return json.dumps(data, indent=1, ensure_ascii=False) + "\n"
