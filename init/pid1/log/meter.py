"""Limits on users' log volume: bytes a second for each user and for all together.

Pure; bounded for any number of users.
"""

from __future__ import annotations

RATE, BURST = 64 << 10, 1 << 20  # of one user: bytes a second on average, and at once
RATE_OF_ALL, BURST_OF_ALL = 256 << 10, 4 << 20
OVERHEAD = 128  # cost of a line besides its text
MOST = 256  # users remembered; the one that was quiet the longest is dropped first
NAMED = 8  # users with a summary line of their own


class Allowance:
    """A token bucket that fills with time."""

    __slots__ = ("at", "burst", "bytes", "left", "lines", "rate")

    def __init__(self, rate: float, burst: float, now: float) -> None:
        self.rate, self.burst, self.left, self.at = rate, burst, burst, now
        self.lines = self.bytes = 0  # refused since the last summary

    def has(self, cost: float, now: float) -> bool:
        self.left = min(self.burst, self.left + (now - self.at) * self.rate)
        self.at = now
        return self.left >= cost


class Meter:
    def __init__(self, now: float) -> None:
        self._users: dict[int, Allowance] = {}  # the most recent last
        self._all = Allowance(RATE_OF_ALL, BURST_OF_ALL, now)
        self.refused = 0  # in total

    def admits(self, uid: int, size: int, now: float) -> bool:
        user = self._users.pop(uid, None)
        if user is None:
            if len(self._users) >= MOST:
                forgotten = self._users.pop(next(iter(self._users)))
                self._all.lines += forgotten.lines
                self._all.bytes += forgotten.bytes
            user = Allowance(RATE, BURST, now)
        self._users[uid] = user
        cost = size + OVERHEAD
        if user.has(cost, now) and self._all.has(cost, now):
            user.left -= cost
            self._all.left -= cost
            return True
        user.lines += 1
        user.bytes += size
        self.refused += 1
        return False

    def summary(self) -> list[str]:
        """Summarise in a few lines what was refused since the last summary, the worst user first."""
        refused = sorted(
            ((user.lines, user.bytes, uid) for uid, user in self._users.items() if user.lines), reverse=True
        )
        texts = [f"dropped {_lines(lines, size)} of uid {uid}" for lines, size, uid in refused[:NAMED]]
        rest = refused[NAMED:]
        lines = self._all.lines + sum(item[0] for item in rest)
        size = self._all.bytes + sum(item[1] for item in rest)
        if lines:
            texts.append(f"dropped {_lines(lines, size)} of other users")
        for user in (self._all, *self._users.values()):
            user.lines = user.bytes = 0
        return [f"{text}: more than {RATE >> 10} KiB/s, or {RATE_OF_ALL >> 10} KiB/s of all users" for text in texts]


def _lines(lines: int, size: int) -> str:
    return f"{lines:,} line{'s' if lines > 1 else ''} ({size:,} bytes)"
