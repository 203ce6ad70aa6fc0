"""Context object shared by the steps of one cycle."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from gitsync.repo.lock import HeldLock
from gitsync.settings import GitsyncSettings
from gitsync.state import GitsyncState, save_state


@dataclass(slots=True)
class Cycle:
    """Settings, lock, state and log of one running cycle: the only mutable object in it."""

    settings: GitsyncSettings
    lock: HeldLock
    state: GitsyncState
    live: str | None
    log: list[str] = field(default_factory=list)
    clock: Callable[[], float] = time.time

    def save(self) -> None:
        save_state(self.settings.layout.state, self.state)

    @contextlib.contextmanager
    def timed(self, step: str) -> Iterator[None]:
        started = time.monotonic()
        try:
            yield
        finally:
            self.state = self.state.took(step, time.monotonic() - started)
