"""Wait for real processes, which run in their own time: poll a condition until it holds or the deadline passes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

# Only a test that fails ever waits this long, and these machines are shared.
PATIENCE = 300.0


def until(look: Callable[[], T], what: str, *, within: float = PATIENCE, seen: Callable[[], object] | None = None) -> T:
    """Look until the answer is true, and return it; `seen` adds to the failure what is there instead.

    A look may fail the test at once, by an assertion of its own, when what is waited for can no longer come.
    """
    begun = began_look = time.monotonic()
    while not (answer := look()):
        now = time.monotonic()
        waited, took = now - begun, now - began_look
        if waited > within:
            instead = f"\n{seen()}" if seen else ""
            raise AssertionError(f"waited {waited:.0f} s in vain: {what}; the last look found {answer!r}{instead}")
        # Ever more slowly: a short wait costs little time, and a long one little of the machine, where a command in a
        # container takes 0.15 s of a processor.
        time.sleep(min(0.01 + waited / 10, max(0.1, min(2 * took, 1.0))))
        began_look = time.monotonic()
    return answer
