"""What the steps of one cycle share."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from gitsync import state as state_
from gitsync.repo.lock import Held
from gitsync.settings import Settings
from gitsync.state import State


@dataclass(slots=True)
class Cycle:
    """The one mutable thing: the state as it grows, and what this run was asked for."""

    settings: Settings
    lock: Held
    state: State
    live: str | None
    log: list[str] = field(default_factory=list)

    def save(self) -> None:
        state_.save(self.settings.layout.state, self.state)

    @contextlib.contextmanager
    def timed(self, step: str) -> Iterator[None]:
        begun = time.monotonic()
        try:
            yield
        finally:
            self.state = replace(
                self.state, durations={**self.state.durations, step: round(time.monotonic() - begun, 4)}
            )
