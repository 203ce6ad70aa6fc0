"""Runs one script: its own session, a clean environment, a deadline, bounded output. Nothing it does can hang us."""

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
# With which whoever runs scripts is told to stop: slurmd's, and the end of a resident runner's client.
GIVES_UP = (signal.SIGTERM, signal.SIGIO)
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:/usr/local/nvidia/bin"
# Beside SLURM_* and MINIVM_*: which GPUs the job has.
PASSED = ("CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")

# Where what a fork gives goes, in the fork: not where everything goes that is printed in it.
GIVEN = 3
UNFIT = 80  # with which a script says that it is the node that is unfit
# Before each name of a task's own environment, in that of its task prolog.
JOB_ENV = "MINIVM_JOB_ENV_"


@dataclass(frozen=True, slots=True)
class Outcome:
    # None where it was never started or never ended by itself; negative: the signal that ended it.
    code: int | None
    seconds: float
    out: str = ""
    err: str = ""
    # Why it is the script that is wrong, and not the node.
    broken: str = ""


# Stuck in the kernel: nobody waits for them. They are init's when we are gone.
_left: set[int] = set()


class _Ended(BaseException):
    """A fork is told to end. No SystemExit: what loads a check takes that for the check's."""


def environment(kind: str, given: Mapping[str, str], commit: str, tree: str, unfit: int) -> dict[str, str]:
    """PATH, since Slurm sets none; the job's variables; nothing else."""
    env = {
        name: value
        for name, value in given.items()
        if name.startswith(("SLURM_", "SLURMD_", "MINIVM_")) or name in PASSED
    }
    if kind == "task_prolog":
        # What the user chose must be seen, so as not to be overridden; under other names, so that it changes no script.
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


def run(argv: list[str], env: Mapping[str, str], deadline_s: float, unfit: int) -> Outcome:
    return _watch(partial(_spawn, argv, env), argv[0], deadline_s, unfit)


def run_here(work: Callable[[], bytes], env: Mapping[str, str], deadline_s: float) -> Outcome:
    """What is Python of ours, without an interpreter of its own: a fork of this process, otherwise run as a script is.

    What `work` gives is its output; what is printed meanwhile is with its errors.
    """
    # What is not out yet would be said twice.
    _flush()
    # Also where it is given up: it has started others, in groups of their own, and ends them.
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
        # Python ignores SIGPIPE, and what is ignored stays ignored over exec.
        setsigdef=[signal.SIGPIPE, signal.SIGTERM, signal.SIGINT],
    )


def _fork(work: Callable[[], bytes], env: Mapping[str, str], deadline_s: float, out: int, err: int) -> int:
    pid = os.fork()
    if pid:
        # A group of its own, by whichever of the two is first: it may be ended before it has done anything.
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)
        return pid
    code = 1
    try:
        os.setpgid(0, 0)
        signal.set_wakeup_fd(-1)
        for number in (*GIVES_UP, signal.SIGINT, signal.SIGALRM, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        # It has started others, in groups of their own.
        signal.signal(signal.SIGTERM, _end)
        # Who would end it may be killed first: then the kernel does.
        signal.setitimer(signal.ITIMER_REAL, deadline_s + 2 * GRACE_S)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        # By numbers above those that they go to, so that none is lost on the way.
        given = (os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC), err, err, out)
        for place, fd in enumerate([fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 16) for fd in given]):
            os.dup2(fd, place, inheritable=place < GIVEN)
        os.closerange(GIVEN + 1, 1 << 20)
        os.environ.clear()
        os.environ.update(env)
        said = memoryview(work())
        while said:
            said = said[os.write(GIVEN, said) :]
        code = 0
    except _Ended:
        pass
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        # Whatever was done to the streams: who came back from here would go on as a second one of us.
        try:
            _flush()
        finally:
            os._exit(code)


def _end(number: int, frame: FrameType | None) -> None:
    # Once: whoever gives us up in the middle of ending us says it again, and what is started is still to be ended.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # A check may take what is raised for its own, whatever it is.
    signal.setitimer(signal.ITIMER_REAL, GRACE_S)
    raise _Ended


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        # One that was closed says so by a ValueError.
        with contextlib.suppress(Exception):
            stream.flush()


def _watch(
    start: Callable[[int, int], int], name: str, deadline_s: float, unfit: int, *, grace_s: float = 0.0
) -> Outcome:
    """`start` is given the two ends to write to, and returns the pid, which leads a group of its own."""
    begun = time.monotonic()
    _bury()
    out_r, out_w = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    err_r, err_w = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    # The script gets blocking ends: a program that meets EAGAIN on its standard output loses lines.
    os.set_blocking(out_w, True)
    os.set_blocking(err_w, True)
    pid = 0
    try:
        # A signal's handler may give the run up, and between the start and our knowing its pid nobody could end it.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, GIVES_UP)
        try:
            pid = start(out_w, err_w)
        except OSError as error:
            return Outcome(None, time.monotonic() - begun, broken=_not_started(name, error))
        finally:
            os.close(out_w)
            os.close(err_w)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        out, err, ended = _read(pid, out_r, err_r, begun + deadline_s)
        code = _reap(pid, ended)
        # What the script left running in its session goes with it; a daemon makes a session of its own.
        _kill(pid, signal.SIGKILL)
        pid = 0
    finally:
        if pid:
            # We are being stopped ourselves: leave nothing behind.
            _give_up(pid, grace_s)
        os.close(out_r)
        os.close(err_r)
    seconds = time.monotonic() - begun
    broken = "" if ended else f"did not end within {deadline_s:g} s"
    return Outcome(code if ended else None, seconds, out, err, broken or why_broken(code, unfit))


def _give_up(pid: int, grace_s: float) -> None:
    """Without a second word of who gives us up in between: it would leave the rest undone."""
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
    """Whether it has ended by then. It has still to be waited for, so that its number stays its own."""
    until = time.monotonic() + within_s
    while not os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
        if time.monotonic() >= until:
            return False
        time.sleep(0.005)
    return True


def _bury() -> None:
    """Of those that could not be waited for, who has ended since. Who is a fork of ours has no such children."""
    for pid in list(_left):
        with contextlib.suppress(ChildProcessError):
            if not os.waitpid(pid, os.WNOHANG)[0]:
                continue
        _left.discard(pid)


def _read(pid: int, out: int, err: int, deadline: float) -> tuple[str, str, bool]:
    kept = {out: bytearray(), err: bytearray()}
    pidfd = os.pidfd_open(pid)
    # Python hears a signal between two steps of its own; one that comes right before the wait must end the wait.
    woken, wakes = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    others = signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
    ended = False
    try:
        poll = select.poll()
        for fd in (pidfd, woken, out, err):
            poll.register(fd, select.POLLIN)
        while not ended and (left := deadline - time.monotonic()) > 0:
            for fd, _ in poll.poll(left * 1000):
                if fd == pidfd:
                    ended = True
                elif fd == woken:
                    os.read(woken, 64)
                elif not _take(fd, kept[fd]):
                    poll.unregister(fd)
    finally:
        signal.set_wakeup_fd(others)
        for fd in (pidfd, woken, wakes):
            os.close(fd)
    if ended:
        # A process that outlives the script may hold the pipe: take what is there and never wait for its end.
        for fd, taken in kept.items():
            # A pipe holds 64 KiB; more than a few reads are of somebody who goes on writing.
            for _ in range(4):
                if not _take(fd, taken):
                    break
    return kept[out].decode(errors="replace"), kept[err].decode(errors="replace"), ended


def _take(fd: int, kept: bytearray) -> bool:
    try:
        chunk = os.read(fd, 65536)
    except BlockingIOError:
        return False
    kept += chunk
    # Of a flood the end is what explains it.
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


def _not_started(path: str, error: OSError) -> str:
    if error.errno == errno.EACCES:
        return "not executable"
    if error.errno == errno.ENOENT and os.path.exists(path):  # noqa: PTH110  # pathlib is not worth its import here
        return "its interpreter is missing"
    if error.errno == errno.ENOEXEC:
        return "no #! line, and no program"
    return error.strerror or str(error)


def why_broken(code: int, unfit: int) -> str:
    if code in {0, unfit}:
        return ""
    if code < 0:
        return f"ended by {signal.Signals(-code).name}"
    if code in {126, 127}:
        return f"exit {code}: a program is missing or not executable"
    return f"exit {code}"
