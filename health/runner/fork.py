"""A fork of the resident runner: a session of its own, and nothing of the runner's but what it knows."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import select
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from types import FrameType

from gitsync.lease import Lease
from health.runner import run as runner
from health.runner.ours import Stopped
from health.runner.request import LONGEST_TEXT, Request, accepted, ended
from health.runner.warm import Warm

# Where the client's connection and the lease lie in the child, above the three that everybody has.
CLIENT = 3
LEASE = 4
GO_S = 5.0


def fork(work: Callable[[], None]) -> int:
    """The child's pid; OSError where there is no room for one."""
    pid = os.fork()
    if pid:
        return pid
    try:
        # What the collector would visit it would copy; the child lives for milliseconds.
        gc.disable()
        os.setsid()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, _stop)
        work()
    except Stopped:
        pass
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def _stop(number: int, frame: FrameType | None) -> None:
    raise Stopped


def serve(client: int, request: Request, held: Lease, warm: Warm, budget_s: float) -> None:
    """One run, whose end the client waits for. Without its word nothing is done: it may have given us up."""
    null = os.open("/dev/null", os.O_RDONLY)
    # By numbers above those that they go to, so that none is lost on the way.
    said = os.memfd_create("said")
    lease = [] if held.fd is None else [held.fd]
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 16) for fd in (null, said, said, client, *lease)]
    for place, fd in enumerate(high):
        os.dup2(fd, place, inheritable=place < CLIENT)
    # Also others' connections: whose end we held would not be heard.
    os.closerange(len(high), 1 << 20)
    os.set_blocking(CLIENT, True)
    own = Lease(held.commit, held.path, LEASE if lease else None)
    with contextlib.suppress(OSError):
        _serve(request, replace(warm, held=own), budget_s)


def _serve(request: Request, warm: Warm, budget_s: float) -> None:
    os.write(CLIENT, accepted(budget_s))
    if not select.select([CLIENT], [], [], GO_S)[0] or os.read(CLIENT, 1) != b"G":
        return
    with _until_it_hangs_up():
        code = runner.perform(request.kind, request.environment, warm)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):
                stream.flush()
    os.write(CLIENT, ended(code, _said()))


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
            raise Stopped

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGIO, signal.SIG_IGN)
