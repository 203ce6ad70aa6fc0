"""End processes that belong to no service, after everything has stopped: TERM, a moment, KILL."""

from __future__ import annotations

import os

from init.errors import in_words
from init.lean import signal
from init.pid1.spawn import procs
from init.pid1.spawn.owners import parent, processes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from init.pid1.children import Children
    from init.pid1.core import Core

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
