"""A fork of the resident runner, in a session of its own, that shares nothing with the runner but what it has read.

It stays for further runs, one after the other, unless a run left something behind (health.runner.hands).
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

# Descriptors in the child, above the standard three: the client's connection, the source of further runs, and the
# lease.
CLIENT, DOOR, LEASE = 3, 4, 5
GO_S = 5.0
# Collect reference cycles after this many runs, once the last run's client has its answer.
COLLECTS = 10


def fork(work: Callable[[], None]) -> int:
    """Fork and run `work` in the child; return the child's pid. OSError if no process can be created."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        # A collection would copy the pages that it visits. A fork that stays collects between runs.
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
    """Serve a run whose client waits for the end, then further runs. Does nothing until the client's "go"."""
    null = os.open("/dev/null", os.O_RDONLY)
    # Copy to numbers above the targets first, so that dup2 overwrites none of them.
    output = os.memfd_create("output")
    lease = [] if held.fd is None else [held.fd]
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 16) for fd in (null, output, output, client, door.detach(), *lease)]
    for place, fd in enumerate(high):
        os.dup2(fd, place, inheritable=place < CLIENT)
    # Close other clients' connections too: a client notices its end only if no process holds it.
    os.closerange(len(high), 1 << 20)
    # Objects of the runner are never garbage here.
    gc.freeze()
    own = Lease(held.commit, held.path, LEASE if lease else None)
    with contextlib.suppress(OSError):
        _serve_all(Next(request, replace(warm, held=own), budget_s), layout)


@dataclass(frozen=True, slots=True)
class Next:
    request: Request
    warm: Warm
    budget_s: float


def _serve_all(current: Next | None, layout: Layout) -> None:
    door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET, 0, DOOR)
    number = 0
    while current and (answer := _serve(current)):
        number += 1
        # Before the client learns of the end, so that the next run finds this process.
        stays = number < hands.MOST_RUNS and _is_unchanged() and _offers_itself(door)
        os.write(CLIENT, answer)
        os.close(CLIENT)
        if not stays:
            return
        if number % COLLECTS == 0:
            gc.collect()
        current = _next(door, current.warm, layout)


def _offers_itself(door: socket.socket) -> bool:
    try:
        return door.send(hands.FREE) > 0
    except OSError:
        # The runner is gone; the current run continues.
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


def _is_unchanged() -> bool:
    """Tell if the last run printed nothing, no step was cut or failed, and no process of it remains."""
    if not ours.whole:
        return False
    try:
        os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return os.fstat(2).st_size == 0
    return False


def _serve(current: Next) -> bytes:
    """Perform one run and return its answer; empty if the client did not ask for it."""
    os.set_blocking(CLIENT, True)
    os.write(CLIENT, accepted(current.budget_s))
    if not select.select([CLIENT], [], [], GO_S)[0] or os.read(CLIENT, 1) != b"G":
        return b""
    with _StopOnHangUp():
        code = runner.perform(current.request.kind, current.request.environment, current.warm)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):
                stream.flush()
    return ended(code, _printed())


def _printed() -> bytes:
    """Return what the run printed, for the client to print."""
    size = os.fstat(2).st_size
    return os.pread(2, LONGEST_TEXT, max(0, size - LONGEST_TEXT))


class _StopOnHangUp:
    """Stop the run when its client ends, as slurmd does when it gives a run up; the current script ends too."""

    def __enter__(self) -> None:
        signal.signal(signal.SIGIO, self._look)
        fcntl.fcntl(CLIENT, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(CLIENT, fcntl.F_SETFL, fcntl.fcntl(CLIENT, fcntl.F_GETFL) | os.O_ASYNC)
        self._look()

    @staticmethod
    def _look(*_: object) -> None:
        # A client sends nothing more: readable means that it has closed the connection.
        if select.select([CLIENT], [], [], 0)[0]:
            raise ours.Stopped

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGIO, signal.SIG_IGN)
