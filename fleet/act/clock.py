"""The hour as it was when the fleet began, and counted on from there: who sets a machine's clock makes no time pass."""

from __future__ import annotations

import time

_BEGAN = time.time() - time.monotonic()


def steady() -> float:
    return _BEGAN + time.monotonic()
