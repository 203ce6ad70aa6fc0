"""A service's specification as frozen records and closed choices, and the order in which services start and stop.

`init.plan.spec` parses specifications. The functions of the order are pure and know only names and edges.
"""

from __future__ import annotations

from init.errors import ConfigError, nearest, raise_all
from init.lean import Choice, record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    Edges = Mapping[str, frozenset[str]]

SIGNALS = ("TERM", "INT", "QUIT", "HUP", "USR1", "USR2", "KILL", "WINCH", "CONT")
LIMITS = ("as", "core", "cpu", "data", "fsize", "memlock", "nofile", "nproc", "rss", "stack", "msgqueue", "rtprio")
# linux/capability.h; the position is the number.
# fmt: off
CAPABILITIES = (
    "CHOWN", "DAC_OVERRIDE", "DAC_READ_SEARCH", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID", "SETPCAP",
    "LINUX_IMMUTABLE", "NET_BIND_SERVICE", "NET_BROADCAST", "NET_ADMIN", "NET_RAW", "IPC_LOCK", "IPC_OWNER",
    "SYS_MODULE", "SYS_RAWIO", "SYS_CHROOT", "SYS_PTRACE", "SYS_PACCT", "SYS_ADMIN", "SYS_BOOT", "SYS_NICE",
    "SYS_RESOURCE", "SYS_TIME", "SYS_TTY_CONFIG", "MKNOD", "LEASE", "AUDIT_WRITE", "AUDIT_CONTROL", "SETFCAP",
    "MAC_OVERRIDE", "MAC_ADMIN", "SYSLOG", "WAKE_ALARM", "BLOCK_SUSPEND", "AUDIT_READ", "PERFMON", "BPF",
    "CHECKPOINT_RESTORE",
)
# fmt: on


class Kind(Choice):
    LONGRUN = "longrun"  # runs until stopped
    ONESHOT = "oneshot"  # ready once it has exited 0; retried until then
    PERIODIC = "periodic"  # run at an interval
    GATE = "gate"  # no process: ready once its probe passes


class Probe(Choice):
    NOTIFY = "notify"  # READY=1 on $NOTIFY_SOCKET
    SOCKET = "socket"  # a unix socket that accepts
    FILE = "file"  # a path that exists
    TCP = "tcp"  # host:port that accepts
    HTTP = "http"  # host:port/path that answers GET with 2xx, or closes the connection without an answer
    EXEC = "exec"  # a command that exits 0
    NONE = "none"  # ready once started


class Late(Choice):
    """Next step when a service is not ready within its time."""

    FAIL = "fail"  # its start has failed: it is stopped, and started again
    WAIT = "wait"  # it goes on, and services after it start


class RestartWhen(Choice):
    ALWAYS = "always"
    FAILURE = "failure"
    NEVER = "never"


class Exhausted(Choice):
    DEGRADE = "degrade"  # the pod stays, not ready, and reports the reason
    END_POD = "end-pod"


class LogMode(Choice):
    TAGGED = "tagged"
    RAW = "raw"  # lines unchanged, for a service that writes JSON
    OFF = "off"


class ValueSource(Choice):
    VALUE = "value"
    FILE = "file"
    SECRET = "secret"  # a file whose content is never shown


@record(frozen=True, slots=True)
class Ready:
    probe: Probe
    target: str = ""  # a path, host:port or host:port/path
    command: tuple[str, ...] = ()
    interval: float = 0.25
    timeout: float = 5.0  # for one try of an exec, tcp or http probe
    within: float = 0.0  # deadline for readiness; 0 waits for ever
    late: Late = Late.FAIL


@record(frozen=True, slots=True)
class Restart:
    when: RestartWhen
    delay: float = 1.0  # after the second failure in a row; the first restart is immediate
    max_delay: float = 30.0
    jitter: float = 0.2
    limit: int = 0  # failures within the window; 0 never gives up
    window: float = 60.0
    exhausted: Exhausted = Exhausted.DEGRADE
    fatal_codes: tuple[int, ...] = ()  # exit codes that are not retried


@record(frozen=True, slots=True)
class Stop:
    signal: str = "TERM"
    grace: float = 10.0
    command: tuple[str, ...] = ()  # runs instead of the signal
    after: tuple[str, ...] = ()  # stop only after these


@record(frozen=True, slots=True)
class Reload:
    signal: str = ""
    command: tuple[str, ...] = ()


@record(frozen=True, slots=True)
class Variable:
    name: str
    source: ValueSource
    value: str


@record(frozen=True, slots=True)
class ResourceLimit:
    name: str
    soft: int  # -1 is unlimited
    hard: int


@record(frozen=True, slots=True)
class WhenCondition:
    """A condition of `when`: the service exists in this pod only if all hold."""

    value: str = ""
    one_of: tuple[str, ...] = ()
    none_of: tuple[str, ...] = ()
    path: str = ""
    wanted: bool = True  # for a path: exists; for a value without lists: is not empty


@record(frozen=True, slots=True)
class Service:
    name: str
    file: str
    about: str
    kind: Kind
    command: tuple[str, ...]
    prepare: tuple[tuple[str, ...], ...]
    when: tuple[WhenCondition, ...]
    needs: tuple[str, ...]
    after: tuple[str, ...]
    bound_to: tuple[str, ...]  # like needs; killed, and waiting again, once one of them is no longer ready
    required: bool  # the pod's readiness waits for it
    ready: Ready
    restart: Restart
    stop: Stop
    reload: Reload
    every: float
    timeout: float
    watchdog: float
    user: str
    group: str
    groups: tuple[str, ...] | None  # None: the user's own groups
    umask: int
    cwd: str
    environment: tuple[Variable, ...]
    environment_files: tuple[str, ...]
    limits: tuple[ResourceLimit, ...]
    capabilities: tuple[str, ...] | None  # None: all capabilities of the pod
    no_new_privileges: bool
    oom_score: int | None
    log: LogMode


@record(frozen=True, slots=True)
class DrainCommand:
    """The role's work before a stop: drain the node, wait for sessions, save state."""

    command: tuple[str, ...]
    budget: float
    resume: tuple[str, ...] = ()


# Built-in commands that a service may name.

MARK = "builtin:"
# The module and function of each, which returns the exit code; imported in the child, never by PID 1.
BUILTINS = {
    "cluster-proof": ("init.slurm.registration", "prove"),
    "fresh-node": ("init.slurm.registration", "announce"),
    "prepare": ("init.prepare.__main__", "main"),
    "refused": ("init.dropins.refused", "main"),
}
# Steps of `prepare`, with the module and function of `init.prepare` for each.
STEPS = {
    "accounting-records": ("saved_state", "check_records"),
    "accounting-state": ("saved_state", "check_database"),
    "cgroups": ("cgroups", "run"),
    "cluster-number": ("database", "repair_number"),
    "directories": ("boot", "make_directories"),
    "fast-scripts": ("node", "fast_scripts"),
    "gather-cgroups": ("cgroups", "gather"),
    "hostkeys": ("ssh", "hostkeys"),
    "identity": ("boot", "publish_identity"),
    "jwt-key": ("secrets", "jwt"),
    "mariadb": ("database", "mariadb"),
    "munge-key": ("secrets", "munge"),
    "node": ("node", "run"),
    "pam-adopt": ("ssh", "adopt"),
    "profile": ("boot", "write_profile"),
    "saved-state": ("saved_state", "repair"),
    "slurm-key": ("secrets", "slurm_key"),
    "slurm-config": ("slurm_config", "run"),
    "slurm-state": ("saved_state", "check_release"),
    "slurmdbd-config": ("database", "slurmdbd"),
    "sssd": ("secrets", "sssd"),
    "state-guard": ("saved_state", "guard"),
    "stale": ("boot", "remove_stale"),
    "user-limits": ("cgroups", "limit_users"),
    "users": ("boot", "number_users"),
}


def is_builtin(command: Sequence[str]) -> bool:
    return bool(command) and command[0].startswith(MARK)


def command_mistake(command: Sequence[str]) -> tuple[str, str]:
    """Return the error in a built-in command and a hint; empty if it is valid."""
    name, arguments = command[0].removeprefix(MARK), command[1:]
    if name not in BUILTINS:
        return f"no built-in {name!r}", nearest(name, [*BUILTINS])
    if name == "refused":
        return "", ""
    if name != "prepare":
        return (f"{command[0]} takes no arguments", "") if arguments else ("", "")
    unknown = next((step for step in arguments if step not in STEPS), None)
    if unknown is not None or not arguments:
        return f"no step {unknown or ''!r} of preparation", nearest(unknown or "", [*STEPS])
    return "", ""


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


def check_order(services: Sequence[Service]) -> None:
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
