"""Stop the services in order after a bug of our own, with little code, so that no job loses its data."""

from __future__ import annotations

import os
import time

from init.lean import signal
from init.plan import graph

TYPE_CHECKING = False
if TYPE_CHECKING:
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
    for wave in graph.waves(graph.stop_edges(specs.values())):
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
