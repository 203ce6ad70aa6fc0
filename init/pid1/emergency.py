"""The end of PID 1: end processes of no service, and, after a bug of PID 1, stop all services in order.

The stop after a bug needs little code, so that no job loses its data.
"""

from __future__ import annotations

import os
import time

from init.errors import in_words
from init.lean import signal
from init.pid1.spawn import procs
from init.pid1.spawn.owners import parent, processes
from init.plan import service

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from init.pid1.children import Children
    from init.pid1.core import Core


def bug(error: Exception) -> str:
    """Format the error with its traceback, if available."""
    try:
        import traceback

        return "".join(traceback.format_exception(error))
    except Exception:
        return f"{type(error).__name__}: {error}\n"


def stop_in_order(core: Core) -> None:
    """Stop wave by wave: signal, wait for the longest grace period, kill. The kernel waits, for SIGCHLD."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
    specs, states = core.engine.specs, core.engine.states
    deadline = time.monotonic() + core.settings.grace * 0.9
    for wave in service.waves(service.stop_edges(specs.values())):
        pids = {states[name].pid: name for name in wave if name in states and states[name].pid}
        for pid, name in pids.items():
            _signal(pid, specs[name].stop.signal)
        until = min(deadline, time.monotonic() + max((specs[name].stop.grace for name in wave), default=0.0))
        _wait(core, pids, until)
        for pid in pids:
            _signal(pid, "KILL")
        _wait(core, pids, time.monotonic() + 1.0)


def _signal(pid: int, name: str) -> None:
    try:
        os.kill(pid, getattr(signal, f"SIG{name}"))
    except OSError:
        return


def _wait(core: Core, pids: dict[int, str], until: float) -> None:
    """Wait until all have ended; drain the log meanwhile, since a service may block on its last lines."""
    while pids:
        try:
            while pids:
                pid, _ = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    break
                pids.pop(pid, None)
        except ChildProcessError:
            return
        try:
            for name in core.logs.rings:
                core.logs.finish(name)
        except Exception:
            os.write(2, b"minivm: the log does not work either\n")
        remaining = until - time.monotonic()
        if not pids or remaining <= 0:
            return
        signal.sigtimedwait([signal.SIGCHLD], min(remaining, 0.1))


MOMENT = 0.8


def sweep(core: Core, children: Children, turn: Callable[[float | None], None]) -> None:
    """Signal the rest. Before every service has stopped, only main processes are signalled."""
    for name in ("TERM", "KILL"):
        children.reap()
        if children.childless:
            return
        _signal_all(core, children, name)
        until = core.poller.now() + MOMENT
        while not children.childless and core.poller.now() < until:
            turn(until)
            children.reap()


def _signal_all(core: Core, children: Children, name: str) -> None:
    if procs.is_pid_1():
        try:
            os.kill(-1, getattr(signal, f"SIG{name}"))
        except ProcessLookupError:
            return
        except OSError as error:
            core.troubled(f"cannot send {name} to what is left: {in_words(error)}")
        return
    own_pid = os.getpid()
    for pid in processes():
        above, steps = pid, 0
        while above > 1 and above != own_pid and steps < 64:
            above, steps = parent(above), steps + 1
        if above == own_pid and pid != own_pid:
            children.kill(pid, name)
