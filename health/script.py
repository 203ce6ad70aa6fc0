"""Run one script in its own session, with a clean environment, a deadline and bounded output: it cannot hang a run."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import FrameType

OUTPUT_LIMIT = 64 * 1024
GRACE_S = 1.0
# Signals that stop the process that runs scripts: from slurmd, or because a resident runner's client is gone.
GIVES_UP = (signal.SIGTERM, signal.SIGIO)
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:/usr/local/nvidia/bin"
# Passed beside SLURM_* and MINIVM_*: the job's GPUs.
PASSED = ("CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")

# A fork writes its result to this descriptor; prints go elsewhere.
GIVEN = 3
UNFIT = 80  # exit code by which a script says that the node is unfit
# Prefix of the task's own variables in the environment of its task prolog.
JOB_ENV = "MINIVM_JOB_ENV_"


@dataclass(frozen=True, slots=True)
class ScriptOutcome:
    # None if it never started or never ended by itself; negative: the signal that ended it.
    code: int | None
    seconds: float
    out: str = ""
    err: str = ""
    # The reason why the script is broken, not the node.
    broken: str = ""


# Processes stuck in the kernel, which cannot be reaped; PID 1 inherits them when this process ends.
_left: set[int] = set()


class _Ended(BaseException):
    """Raised in a fork that must end. Not SystemExit: the code that loads a check attributes that to the check."""


def environment(kind: str, given: Mapping[str, str], commit: str, tree: str, unfit: int) -> dict[str, str]:
    """Build a script's environment: PATH (Slurm sets none), the job's variables, nothing else."""
    env = {
        name: value
        for name, value in given.items()
        if name.startswith(("SLURM_", "SLURMD_", "MINIVM_")) or name in PASSED
    }
    if kind == "task_prolog":
        # The task prolog must see the user's choices so as not to override them; under other names, they change no
        # script.
        env.update({f"{JOB_ENV}{name}": value for name, value in given.items() if name.isidentifier()})
        # It runs as the user, for the user.
        env.update({name: given[name] for name in ("HOME", "USER", "LOGNAME", "TMPDIR") if name in given})
        env.update({name: value for name, value in given.items() if name.startswith("NCCL_")})
    env.setdefault("HOME", "/")
    env.update(
        PATH=PATH,
        LC_ALL="C.UTF-8",
        MINIVM_KIND=kind,
        MINIVM_SCRIPTS_COMMIT=commit,
        MINIVM_SCRIPTS_TREE=tree,
        MINIVM_UNFIT=str(unfit),
    )
    return env


def run(argv: list[str], env: Mapping[str, str], deadline_s: float, unfit: int) -> ScriptOutcome:
    return _watch(partial(_spawn, argv, env), argv[0], deadline_s, unfit)


def run_here(work: Callable[[], bytes], env: Mapping[str, str], deadline_s: float) -> ScriptOutcome:
    """Run Python code like a script, in a fork of this process instead of a new interpreter.

    The bytes that `work` returns are the output; prints become error output.
    """
    # Text still buffered would be printed twice.
    _flush()
    # Also end the fork when the caller gives up: it has started processes in groups of their own, and ends them.
    return _watch(partial(_fork, work, env, deadline_s), "a fork", deadline_s, UNFIT, grace_s=GRACE_S)


def _spawn(argv: list[str], env: Mapping[str, str], out: int, err: int) -> int:
    return os.posix_spawn(
        argv[0],
        argv,
        env,
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
            (os.POSIX_SPAWN_DUP2, out, 1),
            (os.POSIX_SPAWN_DUP2, err, 2),
        ],
        setsid=True,
        setsigmask=[],
        # Python ignores SIGPIPE, and an ignored signal stays ignored over exec.
        setsigdef=[signal.SIGPIPE, signal.SIGTERM, signal.SIGINT],
    )


def _fork(work: Callable[[], bytes], env: Mapping[str, str], deadline_s: float, out: int, err: int) -> int:
    pid = os.fork()
    if pid:
        # Both processes set the group, as either may run first: the parent may end the child before it did anything.
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)
        return pid
    code = 1
    try:
        os.setpgid(0, 0)
        signal.set_wakeup_fd(-1)
        for number in (*GIVES_UP, signal.SIGINT, signal.SIGALRM, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        # The fork has started processes in groups of their own.
        signal.signal(signal.SIGTERM, _end)
        # The parent may be killed before it ends the fork; then the kernel does, by this timer.
        signal.setitimer(signal.ITIMER_REAL, deadline_s + 2 * GRACE_S)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        # Copy to numbers above the targets first, so that dup2 overwrites none of them.
        descriptors = (os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC), err, err, out)
        for place, fd in enumerate([fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 16) for fd in descriptors]):
            os.dup2(fd, place, inheritable=place < GIVEN)
        os.closerange(GIVEN + 1, 1 << 20)
        os.environ.clear()
        os.environ.update(env)
        result = memoryview(work())
        while result:
            result = result[os.write(GIVEN, result) :]
        code = 0
    except _Ended:
        _kill_children()
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        # Leave by _exit even if the streams failed: a fork that returned would act as a second parent.
        try:
            _flush()
        finally:
            os._exit(code)


def _end(number: int, frame: FrameType | None) -> None:
    # Ignore further SIGTERM: the parent may repeat it, and the started processes must still be ended.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # A check may catch an exception of any type; the timer then ends the fork.
    signal.setitimer(signal.ITIMER_REAL, GRACE_S)
    raise _Ended


def _kill_children() -> None:
    """Kill the programs whose start the signal interrupted: the code that started them does not know them yet."""
    with contextlib.suppress(OSError), open(f"/proc/self/task/{os.getpid()}/children") as file:  # noqa: PTH123  # no pathlib
        for pid in map(int, file.read().split()):
            _kill(pid, signal.SIGKILL)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        # A closed stream raises ValueError.
        with contextlib.suppress(Exception):
            stream.flush()


def _watch(
    start: Callable[[int, int], int], name: str, deadline_s: float, unfit: int, *, grace_s: float = 0.0
) -> ScriptOutcome:
    """Start a process and collect its output until it ends or the deadline passes.

    `start` gets the two descriptors to write to and returns the pid, which leads its own group.
    """
    begun = time.monotonic()
    _bury()
    out_r, out_w = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    err_r, err_w = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    # The script gets blocking ends: a program that meets EAGAIN on its standard output loses lines.
    os.set_blocking(out_w, True)
    os.set_blocking(err_w, True)
    pid = 0
    try:
        # Block the signals whose handlers raise: between the start and the assignment of pid nothing could end the
        # process.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, GIVES_UP)
        try:
            pid = start(out_w, err_w)
        except OSError as error:
            return ScriptOutcome(None, time.monotonic() - begun, broken=_explain_start(name, error))
        finally:
            os.close(out_w)
            os.close(err_w)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        out, err, ended = _read(pid, out_r, err_r, begun + deadline_s)
        code = _reap(pid, ended)
        # Also end what the script left running in its session; a daemon creates a session of its own.
        _kill(pid, signal.SIGKILL)
        pid = 0
    finally:
        if pid:
            # This process is being stopped: leave nothing behind.
            _give_up(pid, grace_s)
        os.close(out_r)
        os.close(err_r)
    seconds = time.monotonic() - begun
    broken = "" if ended else f"did not end within {deadline_s:g} s"
    return ScriptOutcome(code if ended else None, seconds, out, err, broken or why_broken(code, unfit))


def _give_up(pid: int, grace_s: float) -> None:
    """End the process, with signals blocked: a second signal in between would leave the rest undone."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, GIVES_UP)
    try:
        with contextlib.suppress(ChildProcessError):
            if grace_s:
                _kill(pid, signal.SIGTERM)
                _ends(pid, grace_s)
            _kill(pid, signal.SIGKILL)
            if _ends(pid, GRACE_S):
                os.waitpid(pid, 0)
            else:
                _left.add(pid)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _ends(pid: int, within_s: float) -> bool:
    """Wait for a process to end; tell if it did. It stays unreaped, so that its pid is not reused."""
    until = time.monotonic() + within_s
    while not os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
        if time.monotonic() >= until:
            return False
        time.sleep(0.005)
    return True


def _bury() -> None:
    """Reap those stuck processes that have ended. In a fork they are no children and are skipped."""
    for pid in list(_left):
        with contextlib.suppress(ChildProcessError):
            if not os.waitpid(pid, os.WNOHANG)[0]:
                continue
        _left.discard(pid)


def _read(pid: int, out: int, err: int, deadline: float) -> tuple[str, str, bool]:
    output = {out: bytearray(), err: bytearray()}
    pidfd = os.pidfd_open(pid)
    # Python handles a signal between two bytecodes; the wakeup descriptor makes one just before poll() end poll().
    woken, wakes = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    previous_fd = signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
    ended = False
    try:
        poll = select.poll()
        for fd in (pidfd, woken, out, err):
            poll.register(fd, select.POLLIN)
        while not ended and (remaining := deadline - time.monotonic()) > 0:
            for fd, _ in poll.poll(remaining * 1000):
                if fd == pidfd:
                    ended = True
                elif fd == woken:
                    os.read(woken, 64)
                elif not _take(fd, output[fd]):
                    poll.unregister(fd)
    finally:
        signal.set_wakeup_fd(previous_fd)
        for fd in (pidfd, woken, wakes):
            os.close(fd)
    if ended:
        # A process that outlives the script may hold the pipe: read what is there and never wait for its end.
        for fd, buffer in output.items():
            # A pipe holds 64 KiB; more reads than a few mean that a process goes on writing.
            for _ in range(4):
                if not _take(fd, buffer):
                    break
    return output[out].decode(errors="replace"), output[err].decode(errors="replace"), ended


def _take(fd: int, kept: bytearray) -> bool:
    try:
        chunk = os.read(fd, 65536)
    except BlockingIOError:
        return False
    kept += chunk
    # The end of a flood of output explains the failure best.
    del kept[:-OUTPUT_LIMIT]
    return bool(chunk)


def _reap(pid: int, ended: bool) -> int:
    if not ended:
        _kill(pid, signal.SIGTERM)
        _ends(pid, GRACE_S)
        _kill(pid, signal.SIGKILL)
        if not _ends(pid, GRACE_S):
            _left.add(pid)
            return -signal.SIGKILL
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _kill(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def _explain_start(path: str, error: OSError) -> str:
    if error.errno == errno.EACCES:
        return "not executable"
    if error.errno == errno.ENOENT and os.path.exists(path):  # noqa: PTH110  # pathlib is not worth its import here
        return "its interpreter is missing"
    if error.errno == errno.ENOEXEC:
        return "it has no #! line and is not a program"
    return error.strerror or str(error)


def why_broken(code: int, unfit: int) -> str:
    if code in {0, unfit}:
        return ""
    if code < 0:
        return f"ended by {signal.Signals(-code).name}"
    if code in {126, 127}:
        return f"exit {code}: a program is missing or not executable"
    return f"exit {code}"
