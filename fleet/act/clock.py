"""The hour as it was when the fleet began, and counted on from there: who sets a machine's clock makes no time pass.

Both servers say what time it is. Where ours is another, nobody knows whose is wrong, and what ends jobs by the time
that has passed waits. It is taken anew once the machine's clock and the API server's agree."""

from __future__ import annotations

import time
from email.utils import parsedate_to_datetime

KUBERNETES, SLURM = "the API server", "slurmctld"
# Of these seconds no proof and no deadline depends.
MOST_S = 30.0
_began = time.time() - time.monotonic()


def steady() -> float:
    return _began + time.monotonic()


def apart(asked: float, heard: float, said: float) -> float:
    """By how much ours is ahead, at least: it was said in between, as a whole second."""
    return max(0.0, asked - (said + 1.0)) or min(0.0, heard - said)


class ClockSkew:
    """Ours against each server's."""

    def __init__(self) -> None:
        self.apart: dict[str, float] = {}
        self._renewed = False

    def http(self, began: float, date: str | None) -> None:
        """The API server's, by a header of its answer; `began`: when it was asked, monotonic."""
        try:
            said = parsedate_to_datetime(date or "").timestamp()
        except (ValueError, OverflowError):
            return
        self.heard(KUBERNETES, began, said)
        passed = time.monotonic() - began
        wall = time.time()
        if self.wrong(KUBERNETES) and abs(apart(wall - passed, wall, said)) <= MOST_S:
            global _began
            _began, self._renewed = wall - time.monotonic(), True
            self.heard(KUBERNETES, began, said)

    def heard(self, who: str, began: float, said: float) -> None:
        self.apart[who] = apart(_began + began, steady(), said)

    def anew(self) -> bool:
        """Whether ours was taken anew since this was asked last: what is remembered is of another hour."""
        found, self._renewed = self._renewed, False
        return found

    def wrong(self, who: str) -> bool:
        return abs(self.apart.get(who, 0.0)) > MOST_S

    def why(self) -> str:
        """Why the hour is not believed, or nothing. No number: it would be another sentence at each look."""
        found = [
            f"{who}'s clock is {'behind' if ours > 0 else 'ahead of'} ours"
            for who, ours in sorted(self.apart.items())
            if self.wrong(who)
        ]
        return f"{', and '.join(found)} by over {MOST_S:g} s" if found else ""
