"""A fork of the resident runner: a session of its own, and nothing of the runner's but what it knows.

It stays for further runs, one after the other, where the one before has left nothing (health.runner.hands).
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import FrameType

from gitsync.layout import Layout
from gitsync.lease import Lease
from health.runner import hands, ours
from health.runner import run as runner
from health.runner.request import LONGEST_TEXT, Request, accepted, ended, parse
from health.runner.warm import Warm, policy_of

# Where they lie in the child, above the three that everybody has: the client's connection, where the next run comes
# from, and the lease.
CLIENT, DOOR, LEASE = 3, 4, 5
GO_S = 5.0
# After so many runs what they left in circles is collected, when the last of them has had its answer.
COLLECTS = 10


def fork(work: Callable[[], None]) -> int:
    """The child's pid; OSError where there is no room for one."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        # What the collector would visit it would copy. One that stays collects when nobody waits.
        gc.disable()
        os.setsid()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, _stop)
        work()
        code = 0
    except ours.Stopped:
        pass
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _stop(number: int, frame: FrameType | None) -> None:
    raise ours.Stopped


def serve(
    door: socket.socket, client: int, request: Request, held: Lease, warm: Warm, budget_s: float, layout: Layout
) -> None:
    """One run, whose end the client waits for. Without its word nothing is done: it may have given us up."""
    null = os.open("/dev/null", os.O_RDONLY)
    # By numbers above those that they go to, so that none is lost on the way.
    said = os.memfd_create("said")
    lease = [] if held.fd is None else [held.fd]
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 16) for fd in (null, said, said, client, door.detach(), *lease)]
    for place, fd in enumerate(high):
        os.dup2(fd, place, inheritable=place < CLIENT)
    # Also others' connections: whose end we held would not be heard.
    os.closerange(len(high), 1 << 20)
    # What the runner knew is nobody's garbage.
    gc.freeze()
    own = Lease(held.commit, held.path, LEASE if lease else None)
    with contextlib.suppress(OSError):
        _serve_all(Next(request, replace(warm, held=own), budget_s), layout)


@dataclass(frozen=True, slots=True)
class Next:
    request: Request
    warm: Warm
    budget_s: float


def _serve_all(one: Next | None, layout: Layout) -> None:
    door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET, 0, DOOR)
    number = 0
    while one and (answer := _serve(one)):
        number += 1
        # Before the client knows of its end: who comes after it finds us.
        stays = number < hands.MOST_RUNS and _is_as_before() and _says_so(door)
        os.write(CLIENT, answer)
        os.close(CLIENT)
        if not stays:
            return
        if number % COLLECTS == 0:
            gc.collect()
        one = _next(door, one.warm, layout)


def _says_so(door: socket.socket) -> bool:
    try:
        return door.send(hands.FREE) > 0
    except OSError:
        # The runner is gone. The run is not.
        return False


def _next(door: socket.socket, warm: Warm, layout: Layout) -> Next | None:
    given = hands.take(door)
    if given is None:
        return None
    _become(given.client, CLIENT)
    held = Lease(given.commit, layout.tree(given.commit), None)
    if given.lease is not None:
        _become(given.lease, LEASE)
        held.fd = LEASE
    request, kept = parse(given.text), warm.kept
    if request is None or kept is None:
        return None
    kept.look()
    budget_s = policy_of(held.path, warm.places, kept).kind(request.kind).budget_s
    return Next(request, replace(warm, held=held, after_a_job=given.after_a_job), budget_s)


def _become(fd: int, place: int) -> None:
    if fd != place:
        os.dup2(fd, place, inheritable=False)
        os.close(fd)


def _is_as_before() -> bool:
    """Nothing was said of the last run, no step of it was cut or failed, and no process of it is left."""
    if not ours.whole:
        return False
    try:
        os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return os.fstat(2).st_size == 0
    return False


def _serve(one: Next) -> bytes:
    """Its answer; nothing where it was not done."""
    os.set_blocking(CLIENT, True)
    os.write(CLIENT, accepted(one.budget_s))
    if not select.select([CLIENT], [], [], GO_S)[0] or os.read(CLIENT, 1) != b"G":
        return b""
    with _until_it_hangs_up():
        code = runner.perform(one.request.kind, one.request.environment, one.warm)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):
                stream.flush()
    return ended(code, _said())


def _said() -> bytes:
    """What was printed meanwhile, for the client to print."""
    size = os.fstat(2).st_size
    return os.pread(2, LONGEST_TEXT, max(0, size - LONGEST_TEXT))


class _until_it_hangs_up:
    """slurmd that gives a run up ends the client: then the run ends too, with whatever script it is at."""

    def __enter__(self) -> None:
        signal.signal(signal.SIGIO, self._look)
        fcntl.fcntl(CLIENT, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(CLIENT, fcntl.F_SETFL, fcntl.fcntl(CLIENT, fcntl.F_GETFL) | os.O_ASYNC)
        self._look()

    @staticmethod
    def _look(*_: object) -> None:
        # A client has nothing more to say: what there is to read is its end.
        if select.select([CLIENT], [], [], 0)[0]:
            raise ours.Stopped

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGIO, signal.SIG_IGN)
