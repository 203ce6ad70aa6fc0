"""The fleet's clock: the wall time at its start, advanced by the monotonic clock: setting a clock passes no time.

Both servers report their time. If one disagrees with the fleet's clock, either may be wrong, and decisions that end
jobs because time has passed wait. The fleet resets its clock once its machine and the API server agree.
"""

from __future__ import annotations

import time
from email.utils import parsedate_to_datetime

KUBERNETES, SLURM = "the API server", "slurmctld"
# A smaller difference changes no proof and no deadline.
MOST_S = 30.0
_began = time.time() - time.monotonic()


def steady() -> float:
    """Return the time by the fleet's clock."""
    return _began + time.monotonic()


def apart(asked: float, heard: float, reported: float) -> float:
    """By how much the fleet's clock is ahead at least: the server's whole second lies between question and answer."""
    return max(0.0, asked - (reported + 1.0)) or min(0.0, heard - reported)


class ClockSkew:
    """The difference of the fleet's clock from each server's."""

    def __init__(self) -> None:
        self.apart: dict[str, float] = {}
        self._renewed = False

    def http(self, began: float, date: str | None) -> None:
        """Note the API server's time from a Date header. `began`: the request's start by the monotonic clock."""
        try:
            reported = parsedate_to_datetime(date or "").timestamp()
        except (ValueError, OverflowError):
            return
        self.heard(KUBERNETES, began, reported)
        passed = time.monotonic() - began
        wall = time.time()
        if self.wrong(KUBERNETES) and abs(apart(wall - passed, wall, reported)) <= MOST_S:
            global _began
            _began, self._renewed = wall - time.monotonic(), True
            self.heard(KUBERNETES, began, reported)

    def heard(self, server: str, began: float, reported: float) -> None:
        self.apart[server] = apart(_began + began, steady(), reported)

    def anew(self) -> bool:
        """Return whether the clock was reset since the last call: then remembered times are invalid."""
        renewed, self._renewed = self._renewed, False
        return renewed

    def wrong(self, server: str) -> bool:
        return abs(self.apart.get(server, 0.0)) > MOST_S

    def why(self) -> str:
        """Why the time is not trusted; empty: it is. Without the number, which would be news in each pass."""
        texts = [
            f"{server}'s clock is {'behind' if ahead > 0 else 'ahead of'} ours"
            for server, ahead in sorted(self.apart.items())
            if self.wrong(server)
        ]
        return f"{', and '.join(texts)} by over {MOST_S:g} s" if texts else ""
