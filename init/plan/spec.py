"""Parse a service from a person's mapping: checked as a whole, unknown keys refused with the nearest name."""

from __future__ import annotations

from init.errors import nearest
from init.fields import Reader, describe_value, is_name, number
from init.plan.service import (
    CAPABILITIES,
    LIMITS,
    SIGNALS,
    DrainCommand,
    Exhausted,
    Kind,
    Late,
    LogMode,
    Probe,
    Ready,
    Reload,
    ResourceLimit,
    Restart,
    RestartWhen,
    Service,
    Stop,
    ValueSource,
    Variable,
    WhenCondition,
    command_mistake,
    is_builtin,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

# fmt: off
KEYS = (
    "name", "about", "kind", "command", "prepare", "when", "needs", "after", "bound-to", "required", "ready", "restart",
    "stop", "reload", "every", "timeout", "watchdog", "user", "group", "groups", "umask", "cwd", "environment",
    "environment-files", "limits", "capabilities", "no-new-privileges", "oom-score", "log",
)
# fmt: on


def parse_service(name: str, mapping: Mapping[str, object], file: str) -> Service:
    """Parse a service from a loaded mapping. ConfigError has the file, the key and the nearest valid value."""
    at = Reader(mapping, f"service {name}", file)
    at.only(*KEYS)
    if not is_name(name):
        at.fail("name", f"{name!r} is not a service's name", "lower case letters, digits, - _ .")
    if at.text("name", name) != name:
        at.fail("name", f"says {at.text('name')!r}, but the file is named {name}")
    kind = at.choice("kind", Kind, Kind.LONGRUN)
    command = at.command("command")
    if kind is Kind.GATE and command:
        at.fail("command", "a gate has no process", "use kind: oneshot for a command that must succeed")
    if kind is not Kind.GATE and not command:
        at.fail("command", "missing")
    prepare = at.commands("prepare")
    for key, words in (("command", command), *(("prepare", words) for words in prepare)):
        _program(at, key, words)
    if is_builtin(command):
        _built_in(at, kind)
    if (kind is Kind.PERIODIC) != at.has("every"):
        at.fail("every", "a periodic service needs it, and only a periodic one has it")
    ready = _ready(at, kind)
    if at.has("watchdog") and ready.probe is not Probe.NOTIFY:
        at.fail("watchdog", "only a service with ready: notify can answer a watchdog")
    needs, after, bound_to = at.names("needs"), at.names("after"), at.names("bound-to")
    if name in needs + after + bound_to:
        at.fail("needs", "a service cannot wait for itself")
    return Service(
        name=name,
        file=file,
        about=at.text("about"),
        kind=kind,
        command=command,
        prepare=prepare,
        when=_when(at),
        needs=needs,
        after=after,
        bound_to=bound_to,
        required=at.flag("required", kind is not Kind.PERIODIC),
        ready=ready,
        restart=_restart(at, kind),
        stop=_stop(at),
        reload=_reload(at),
        every=at.seconds("every", 0.0),
        timeout=at.seconds("timeout", 0.0),
        watchdog=at.seconds("watchdog", 0.0),
        user=at.text("user"),
        group=at.text("group"),
        groups=at.texts("groups") if at.has("groups") else None,
        umask=_umask(at),
        cwd=at.text("cwd", "/"),
        environment=_environment(at),
        environment_files=at.texts("environment-files"),
        limits=_limits(at),
        capabilities=_capabilities(at),
        no_new_privileges=at.flag("no-new-privileges", False),
        oom_score=_oom_score(at),
        log=at.choice("log", LogMode, LogMode.TAGGED),
    )


def _program(at: Reader, key: str, command: tuple[str, ...]) -> None:
    if is_builtin(command):
        problem, hint = command_mistake(command)
        if problem:
            at.fail(key, problem, hint)
    elif command and not command[0].startswith(("/", "${")):
        at.fail(key, f"{command[0]!r} is not an absolute path", "there is no shell and no PATH search")


def _built_in(at: Reader, kind: Kind) -> None:
    """Refuse settings that a built-in cannot have: it is a short-lived fork of PID 1, with PID 1's rights."""
    if kind is not Kind.ONESHOT:
        at.fail("command", f"a built-in is a short step and cannot be a {kind.value}", "kind: oneshot, or prepare")
    for key in ("user", "group", "groups", "capabilities", "no-new-privileges"):
        if at.has(key):
            at.fail(key, "a built-in runs with PID 1's rights", "use a program to run as another user")


def parse_drain(mapping: Mapping[str, object], file: str) -> DrainCommand:
    at = Reader(mapping, "drain", file)
    at.only("command", "budget", "resume")
    if not at.has("command"):
        at.fail("command", "missing")
    return DrainCommand(at.command("command"), at.seconds("budget", 60.0), at.command("resume"))


def _ready(at: Reader, kind: Kind) -> Ready:
    value = at.data.get("ready")
    own_end = kind in (Kind.ONESHOT, Kind.PERIODIC)
    if value is None:
        if kind is Kind.GATE:
            at.fail("ready", "missing: a gate consists of its probe")
        return Ready(Probe.NONE)
    if own_end:
        at.fail("ready", f"a {kind.value} has no probe: a oneshot is ready once it exited 0")
    if isinstance(value, str):
        value = {value: None}
    if not isinstance(value, dict):
        at.fail("ready", "wanted notify, none, or a mapping such as {tcp: host:port}")
    probes = [item.value for item in Probe]
    chosen = [key for key in value if key in probes]
    if len(chosen) != 1:
        unknown = [str(key) for key in value if key not in (*probes, "interval", "timeout", "within", "late")]
        hint = nearest(unknown[0], probes) if unknown else f"known: {', '.join(probes)}"
        at.fail("ready", "wanted exactly one probe", hint)
    probe = Probe(chosen[0])
    sub = Reader(value, at.what, at.file, "ready")
    sub.only(probe.value, "interval", "timeout", "within", "late")
    if kind is Kind.GATE and probe in (Probe.NOTIFY, Probe.NONE):
        at.fail("ready", f"a gate has no process that could be {probe.value}", "socket, file, tcp, http or exec")
    plain = probe in (Probe.NOTIFY, Probe.NONE)
    if not plain and not sub.has(probe.value):
        sub.fail(probe.value, "missing")
    command = sub.command("exec") if probe is Probe.EXEC else ()
    target = "" if plain or probe is Probe.EXEC else sub.text(probe.value)
    sub.placeholders(probe.value, target)
    if probe in (Probe.SOCKET, Probe.FILE) and not target.startswith(("/", "${")):
        sub.fail(probe.value, f"{target!r} is not an absolute path")
    if probe in (Probe.TCP, Probe.HTTP) and ":" not in target and not target.startswith("${"):
        sub.fail(probe.value, f"{target!r} has no port", "host:port")
    if probe is Probe.HTTP and ("/" not in target.rpartition("}")[2] or "://" in target):
        sub.fail("http", f"{target!r} is not host:port/path", "the probe does not use TLS")
    interval = sub.seconds("interval", 0.25)
    if interval <= 0:
        sub.fail("interval", "wanted more than 0")
    within, late = sub.seconds("within", 0.0), sub.choice("late", Late, Late.FAIL)
    if sub.has("late") and not within:
        sub.fail("late", "it says what follows after `within`, which is missing")
    return Ready(probe, target, command, interval, sub.seconds("timeout", 5.0), within, late)


def _restart(at: Reader, kind: Kind) -> Restart:
    sub = at.sub("restart")
    sub.only("when", "delay", "max-delay", "jitter", "limit", "window", "exhausted", "fatal-codes")
    codes = sub.texts("fatal-codes")
    for code in codes:
        if not 1 <= (number(code) or 0) <= 255:
            sub.fail("fatal-codes", f"{code} is not an exit code", "1 to 255")
    when = sub.choice("when", RestartWhen, RestartWhen.ALWAYS if kind is Kind.LONGRUN else RestartWhen.FAILURE)
    if kind is Kind.ONESHOT and when is RestartWhen.ALWAYS:
        sub.fail("when", "a oneshot that has succeeded is done", "failure or never; kind: periodic runs again")
    return Restart(
        when=when,
        delay=sub.seconds("delay", 1.0),
        max_delay=sub.seconds("max-delay", 30.0),
        jitter=sub.real("jitter", 0.2, most=1.0),
        limit=sub.number("limit", 0),
        window=sub.seconds("window", 60.0),
        exhausted=sub.choice("exhausted", Exhausted, Exhausted.DEGRADE),
        fatal_codes=tuple(int(code) for code in codes),
    )


def _signal(at: Reader, key: str, default: str) -> str:
    name = at.text(key, default).removeprefix("SIG")
    if name and name not in SIGNALS:
        at.fail(key, f"unknown signal {name!r}", nearest(name, list(SIGNALS)))
    return name


def _stop(at: Reader) -> Stop:
    sub = at.sub("stop")
    sub.only("signal", "grace", "command", "after")
    return Stop(_signal(sub, "signal", "TERM"), sub.seconds("grace", 10.0), sub.command("command"), sub.names("after"))


def _reload(at: Reader) -> Reload:
    sub = at.sub("reload")
    sub.only("signal", "command")
    if sub.has("signal") and sub.has("command"):
        sub.fail("command", "either a signal or a command")
    return Reload(_signal(sub, "signal", ""), sub.command("command"))


def _when(at: Reader) -> tuple[WhenCondition, ...]:
    value = at.data.get("when")
    if value is None:
        return ()
    if not isinstance(value, list):
        at.fail("when", "wanted a list of conditions")
    return tuple(_condition(at, item, f"when[{place}]") for place, item in enumerate(value))


def _condition(at: Reader, item: object, where: str) -> WhenCondition:
    if not isinstance(item, dict):
        at.fail(where, "wanted a mapping such as {value: ${NAME:-x}, in: [x, y]} or {path: /x, exists: true}")
    sub = Reader(item, at.what, at.file, where)
    if sub.has("path"):
        sub.only("path", "exists")
        sub.placeholders("path", sub.text("path"))
        return WhenCondition(path=sub.text("path"), wanted=sub.flag("exists", True))
    sub.only("value", "in", "not-in", "set")
    if not sub.has("value"):
        sub.fail("value", "missing", "or give a path")
    sub.placeholders("value", sub.text("value"))
    if sum(sub.has(key) for key in ("in", "not-in", "set")) != 1:
        sub.fail("value", "wanted exactly one of in, not-in, set")
    return WhenCondition(sub.text("value"), sub.texts("in"), sub.texts("not-in"), wanted=sub.flag("set", True))


def _umask(at: Reader) -> int:
    value = at.data.get("umask", "0022")
    text = value if isinstance(value, str) else ""
    if not text or not all(digit in "01234567" for digit in text) or int(text, 8) > 0o777:
        at.fail("umask", f"wanted octal digits in quotes, not {describe_value(value)}", 'such as "0022"')
    return int(text, 8)


def _environment(at: Reader) -> tuple[Variable, ...]:
    sub = at.sub("environment")
    variables = []
    for name, value in sub.data.items():
        if not isinstance(name, str) or not name or "=" in name or "\0" in name:
            sub.fail(str(name), "not a variable's name", "quote it" if not isinstance(name, str) else "")
        if isinstance(value, dict):
            inner = Reader(value, at.what, at.file, f"environment.{name}")
            inner.only("file", "secret")
            if len(value) != 1:
                sub.fail(name, "wanted a value, {file: /path} or {secret: /path}")
            key = next(iter(value))
            variables.append(Variable(name, ValueSource(key), inner.text(key)))
            continue
        # Every user can read the error (a condition, HTTP), and a value may be a password.
        if isinstance(value, bool | list):
            sub.fail(name, f"wanted text, not a {type(value).__name__}", "quote it" if isinstance(value, bool) else "")
        text = sub.text(name)
        sub.placeholders(name, text, shown=False)
        variables.append(Variable(name, ValueSource.VALUE, text))
    return tuple(variables)


def _limits(at: Reader) -> tuple[ResourceLimit, ...]:
    sub = at.sub("limits")
    sub.only(*LIMITS)
    limits = []
    for name in sub.data:
        parts = sub.text(name).split(":")
        if len(parts) > 2 or not all(part == "unlimited" or number(part) is not None for part in parts):
            sub.fail(name, f"wanted a number, unlimited, or soft:hard, not {sub.text(name)!r}")
        numbers = [-1 if part == "unlimited" else int(part) for part in parts]
        limits.append(ResourceLimit(name, numbers[0], numbers[-1]))
    return tuple(limits)


def _capabilities(at: Reader) -> tuple[str, ...] | None:
    if not at.has("capabilities"):
        return None
    names = tuple(name.removeprefix("CAP_") for name in at.texts("capabilities"))
    for name in names:
        if name not in CAPABILITIES:
            at.fail("capabilities", f"unknown capability {name!r}", nearest(name, list(CAPABILITIES)))
    return names


def _oom_score(at: Reader) -> int | None:
    if not at.has("oom-score"):
        return None
    value = at.number("oom-score", 0, least=-1000)
    if value > 1000:
        at.fail("oom-score", f"wanted -1000 to 1000, not {value}")
    return value
