"""Convert a service back to its mapping, without defaults, for the plan's JSON and for display."""

from __future__ import annotations

from init.plan.service import Kind, Probe, RestartWhen, Service, ValueSource, WhenCondition


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
        extra = _trim({"interval": ready.interval, "within": ready.within}, timeout=ready.timeout)
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
    "signal": "TERM", "grace": 10.0, "interval": 0.25, "within": 0.0,
}  # fmt: skip


def _trim(parts: dict[str, object], timeout: float = 0.0) -> dict[str, object]:
    kept = {key: value for key, value in parts.items() if key not in _DEFAULTS or value != _DEFAULTS[key]}
    return kept | ({"timeout": timeout} if timeout not in (0.0, 5.0) else {})


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
