"""The only place that starts processes: fork, take the service's identity, exec."""

from __future__ import annotations

import gc
import os
import sys

from init.errors import CannotStart
from init.fields import expand, number
from init.lean import fields, record, signal
from init.plan.service import BUILTINS, CAPABILITIES, MARK, Service, ValueSource, is_builtin

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
OURS = (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
EVERY_SIGNAL = signal.valid_signals()
OUR_UMASK = 0o022
# Errors of the machine, not of the command: EAGAIN, ENOMEM, EMFILE, ENFILE, EINTR. Numbers, because `errno` builds
# dictionaries of all names.
SCARCE = (11, 12, 24, 23, 4)


@record(frozen=True, slots=True)
class Streams:
    stdin: int
    stdout: int
    stderr: int


def spawn(service: Service, command: tuple[str, ...], env: Mapping[str, str], streams: Streams, *, root: bool) -> int:
    """Start a command as the service (or as root, to prepare it).

    The child reports errors before the exec on stderr.
    """
    if is_builtin(command):

        def step() -> int:
            own = environment(service, env)
            _attributes(service, own, root=True)
            return run_builtin(command, own)

        return fork_own(step, streams, command[0].removeprefix(MARK))
    if _plain(service, root=root):
        own = environment(service, env)
        arguments = [_fill(service, part, own) for part in command]
        return _spawn_plain(service, arguments, own, streams)

    def become() -> None:
        own = environment(service, env)
        arguments = [_fill(service, part, own) for part in command]
        _attributes(service, own, root=root)
        os.execve(arguments[0], arguments, own)  # returns only with an error

    return fork(become, streams, f"start {service.name}", arguments=command)


def _plain(service: Service, *, root: bool) -> bool:
    """Tell if the command runs exactly like PID 1: then posix_spawn avoids the copy (half the time)."""
    if service.environment_files or service.umask != OUR_UMASK or service.cwd != "/":
        return False
    if service.limits or service.no_new_privileges or service.oom_score is not None:
        return False
    if any(item.source is not ValueSource.VALUE for item in service.environment):
        return False
    return root or not (service.user or service.group or service.groups is not None or service.capabilities is not None)


def _spawn_plain(service: Service, arguments: list[str], env: dict[str, str], streams: Streams) -> int:
    moves = [(os.POSIX_SPAWN_DUP2, fd, place) for place, fd in enumerate(fields(streams).values())]
    try:
        return os.posix_spawn(
            arguments[0], arguments, env, file_actions=moves, setsid=True, setsigmask=(),
            setsigdef=(*OURS, signal.SIGPIPE, signal.SIGXFSZ),
        )  # fmt: skip
    except OSError as error:
        if error.errno in SCARCE:
            raise
        raise CannotStart(f"cannot start {service.name}: {arguments[0]}: {error.strerror}") from None


def fork_own(work: Callable[[], int | None], streams: Streams, name: str) -> int:
    """Start a child that does short work of PID 1, without an exec."""

    def become() -> int | None:
        leave_pid_1(name)
        return work()

    return fork(become, streams, f"run {name}")


def fork(become: Callable[[], int | None], streams: Streams, what: str, *, arguments: tuple[str, ...] = ()) -> int:
    """Start a child that runs `become`, exits with its code and never returns.

    Signals are blocked across the fork: an immediate signal must find default handlers in the child, or a TERM before
    the exec would be lost.
    """
    blocked = signal.pthread_sigmask(signal.SIG_SETMASK, EVERY_SIGNAL)
    pid = -1
    try:
        pid = os.fork()
    finally:
        if pid != 0:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    if pid:
        return pid
    code = 127
    try:
        signal.set_wakeup_fd(-1)
        for number in (*OURS, signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        os.setsid()
        os.dup2(streams.stdin, 0)
        os.dup2(streams.stdout, 1)
        os.dup2(streams.stderr, 2)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        code = become() or 0
    except BaseException as error:
        where = f" {arguments[0]}" if isinstance(error, OSError) and arguments and not error.filename else ""
        reason = error.strerror or str(error) if isinstance(error, OSError) else str(error)
        named = f"{error.filename}: " if isinstance(error, OSError) and error.filename else ""
        os.write(2, f"minivm: cannot {what}{where}: {named}{reason}\n".encode(errors="replace"))
    finally:
        os._exit(code)


def environment(service: Service, env: Mapping[str, str], *, masked: bool = False) -> dict[str, str]:
    """Combine the pod's environment, the environment files, and the service's own variables."""
    values = with_files(service, {"PATH": DEFAULT_PATH} | dict(env))
    for item in service.environment:
        if item.source is ValueSource.VALUE:
            values[item.name] = _fill(service, item.value, values)
        elif masked and item.source is ValueSource.SECRET:
            values[item.name] = "********"
        else:
            with open(expand(item.value, values), encoding="utf-8", errors="surrogateescape") as stream:  # noqa: PTH123 - pathlib costs 8 ms of boot
                values[item.name] = stream.read().strip()
    return values


def with_files(service: Service, env: Mapping[str, str]) -> dict[str, str]:
    values = dict(env)
    for path in service.environment_files:
        values |= read_environment_file(expand(path, values))
    return values


def read_environment_file(path: str) -> dict[str, str]:
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as stream:  # noqa: PTH123 - as above
            lines = stream.read().splitlines()
    except FileNotFoundError:
        return {}
    pairs = (line.split("=", 1) for line in lines if "=" in line and not line.lstrip().startswith("#"))
    return {name.strip(): value.strip() for name, value in pairs}


def _fill(service: Service, text: str, env: Mapping[str, str]) -> str:
    try:
        return expand(text, env)
    except KeyError as missing:
        raise CannotStart(f"${{{missing.args[0]}}} is not set", f"used in {text!r}") from None


def warn(text: str) -> None:
    os.write(2, f"minivm: {text}\n".encode())


def _attributes(service: Service, env: dict[str, str], *, root: bool) -> None:
    if service.oom_score is not None:
        try:
            fd = os.open("/proc/self/oom_score_adj", os.O_WRONLY)
            os.write(fd, str(service.oom_score).encode())
            os.close(fd)
        except OSError as error:
            warn(f"oom-score {service.oom_score} not set: {error.strerror}")
    if service.limits:
        _limits(service)
    os.umask(service.umask)
    if not root:
        _identity(service, env)
    os.chdir(service.cwd)
    if service.no_new_privileges:
        prctl(PR_SET_NO_NEW_PRIVS, 1)


def _limits(service: Service) -> None:
    import resource

    for limit in service.limits:
        number: int = getattr(resource, f"RLIMIT_{limit.name.upper()}")
        soft = resource.RLIM_INFINITY if limit.soft < 0 else limit.soft
        hard = resource.RLIM_INFINITY if limit.hard < 0 else limit.hard
        try:
            resource.setrlimit(number, (soft, hard))
        except (ValueError, OSError):
            most = resource.getrlimit(number)[1]
            resource.setrlimit(number, (most if soft < 0 or 0 <= most < soft else soft, most))
            advice = (
                "; RDMA needs it: LimitMEMLOCK=infinity for the container runtime" if limit.name == "memlock" else ""
            )
            warn(f"limit {limit.name} stays at {most}: the pod may not raise it{advice}")


def _identity(service: Service, env: dict[str, str]) -> None:
    if not (service.user or service.group or service.groups is not None or service.capabilities is not None):
        return
    import pwd

    uid, gid, name, home = os.getuid(), os.getgid(), "", ""
    if service.user:
        try:
            known = number(service.user)
            entry = pwd.getpwnam(service.user) if known is None else pwd.getpwuid(known)
            uid, gid, name, home = entry.pw_uid, entry.pw_gid, entry.pw_name, entry.pw_dir
        except KeyError:
            if known is None:
                raise CannotStart(f"no user {service.user!r}") from None
            uid = gid = known
    if service.group:
        gid = _gid(service.group)
    capabilities = None
    if service.capabilities is not None:
        capabilities = Capabilities(service.capabilities)
        capabilities.bound()
    if service.groups is not None:
        os.setgroups([_gid(group) for group in service.groups])
    elif name and os.geteuid() == 0:
        os.setgroups(os.getgrouplist(name, gid))
    if (gid, gid) != (os.getgid(), os.getegid()):
        os.setresgid(gid, gid, gid)
    if (uid, uid) != (os.getuid(), os.geteuid()):
        os.setresuid(uid, uid, uid)
    if capabilities is not None and (missing := capabilities.keep(ambient=uid != 0)):
        warn(missing)
    own = {item.name for item in service.environment}
    for key, value in (("HOME", home), ("USER", name), ("LOGNAME", name)):
        if value and key not in own:
            env[key] = value


def _gid(group: str) -> int:
    import grp

    gid = number(group)
    if gid is not None:
        return gid
    try:
        return grp.getgrnam(group).gr_gid
    except KeyError:
        raise CannotStart(f"no group {group!r}") from None


def close_on_exec() -> None:
    """Keep inherited descriptors from the services."""
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - as above
        if int(name) > 2:
            try:
                os.set_inheritable(int(name), False)
            except OSError:
                continue  # the descriptor that listed the directory


def reset_inherited() -> None:
    """Set the umask and directory that plain services inherit."""
    os.umask(OUR_UMASK)
    os.chdir("/")


def is_pid_1() -> bool:
    return os.getpid() == 1


# Built-in commands: short steps that PID 1 runs in a fork of itself, without an exec.
#
# A new interpreter for each was most of a worker's boot. What a fork shares and what it must not:
# docs/decisions/boot-steps-fork-from-pid-1.md. Everything that runs long, or as
# another user, is a program with an exec.


def run_builtin(command: Sequence[str], env: Mapping[str, str]) -> int:
    """Run the command in the child as its own Python would, and return the exit code."""
    name, arguments = command[0].removeprefix(MARK), command[1:]
    os.environ.clear()
    os.environ.update(env)
    try:
        from importlib import import_module

        module, function = BUILTINS[name]
        run = getattr(import_module(module), function)
        code = run(arguments) if arguments else run()
        sys.stdout.flush()
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else 1
    except Exception:
        import traceback

        traceback.print_exc()
        return 1
    return int(code)


def leave_pid_1(name: str) -> None:
    """Drop, in a child without exec, what an exec would drop; get a name of its own in `ps`."""
    # no destructor of PID 1's objects may run here: it would close descriptors that have another owner now
    gc.disable()
    highest = max(int(fd) for fd in os.listdir("/proc/self/fd"))  # noqa: PTH208 - no pathlib on PID 1's path
    os.closerange(3, highest + 1)
    for signal_number in (signal.SIGPIPE, signal.SIGXFSZ):  # like Python's own start: a write fails with an error
        signal.signal(signal_number, signal.SIG_IGN)
    try:
        with open("/proc/self/comm", "w") as stream:  # noqa: PTH123 - as above; prctl would need ctypes
            stream.write(f"minivm-{name}"[:15])
    except OSError:
        return  # a name is optional


# prctl and the capability sets. `ctypes` is imported late: only the child that needs it pays for it.

PR_CAPBSET_DROP, PR_SET_KEEPCAPS, PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT = 24, 8, 38, 47
EINVAL = 22  # of a capability that this kernel does not know


def prctl(option: int, *values: int) -> int:
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    result: int = libc.prctl(option, *(ctypes.c_ulong(value) for value in (*values, 0, 0, 0, 0)[:4]))
    return result


class Capabilities:
    """Restrict capabilities: the bounding set first (it needs SETPCAP), the rest after the change of user."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self._wanted = sum(1 << CAPABILITIES.index(name) for name in names)
        self._bounded = True

    def bound(self) -> None:
        import ctypes

        prctl(PR_SET_KEEPCAPS, 1)
        for bit in range(len(CAPABILITIES)):
            if not self._wanted >> bit & 1:
                self._bounded &= prctl(PR_CAPBSET_DROP, bit) == 0 or ctypes.get_errno() == EINVAL

    def keep(self, *, ambient: bool) -> str:
        """Keep the wanted capabilities; return a warning about what the pod lacks."""
        import ctypes

        libc = ctypes.CDLL(None, use_errno=True)
        header = (ctypes.c_uint32 * 2)(0x20080522, 0)
        data = (ctypes.c_uint32 * 6)()
        if libc.capget(header, data) != 0:
            raise OSError(ctypes.get_errno(), "capget")
        permitted = (data[1] | data[4] << 32) & self._wanted
        low, high = permitted & 0xFFFFFFFF, permitted >> 32
        data = (ctypes.c_uint32 * 6)(low, low, low, high, high, high)
        if libc.capset(header, data) != 0:
            raise OSError(ctypes.get_errno(), "capset")
        for bit in range(len(CAPABILITIES)):
            if ambient and permitted >> bit & 1:
                prctl(PR_CAP_AMBIENT, 2, bit)
        missing = self._wanted & ~permitted
        if missing:
            names = [name for bit, name in enumerate(CAPABILITIES) if missing >> bit & 1]
            return f"the pod does not have the capabilities {' '.join(names)}"
        if not self._bounded and not ambient:
            return "capabilities are kept: the pod lacks SETPCAP, and an exec by root takes back what was dropped"
        return ""
