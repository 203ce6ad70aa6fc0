"""How much users may log: so many bytes a second each, and all together. Pure; bounded, however many they are."""

from __future__ import annotations

RATE, BURST = 64 << 10, 1 << 20  # bytes a second in the long run, and at once: one user's
RATE_OF_ALL, BURST_OF_ALL = 256 << 10, 4 << 20
OVERHEAD = 128  # what a line costs besides its text
MOST = 256  # users remembered; one who was quiet the longest is forgotten first
NAMED = 8  # users of whom a single line tells


class Allowance:
    """A bucket that fills with time."""

    __slots__ = ("at", "burst", "bytes", "left", "lines", "rate")

    def __init__(self, rate: float, burst: float, now: float) -> None:
        self.rate, self.burst, self.left, self.at = rate, burst, burst, now
        self.lines = self.bytes = 0  # refused since they were told

    def has(self, cost: float, now: float) -> bool:
        self.left = min(self.burst, self.left + (now - self.at) * self.rate)
        self.at = now
        return self.left >= cost


class Meter:
    def __init__(self, now: float) -> None:
        self._users: dict[int, Allowance] = {}  # the one that spoke last comes last
        self._all = Allowance(RATE_OF_ALL, BURST_OF_ALL, now)
        self.refused = 0  # ever

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
        """What was refused since the last time, the worst first. A few lines, whatever happened."""
        found = sorted(((user.lines, user.bytes, uid) for uid, user in self._users.items() if user.lines), reverse=True)
        texts = [f"dropped {_lines(lines, size)} of uid {uid}" for lines, size, uid in found[:NAMED]]
        rest = found[NAMED:]
        lines = self._all.lines + sum(item[0] for item in rest)
        size = self._all.bytes + sum(item[1] for item in rest)
        if lines:
            texts.append(f"dropped {_lines(lines, size)} of other users")
        for user in (self._all, *self._users.values()):
            user.lines = user.bytes = 0
        return [f"{text}: more than {RATE >> 10} KiB/s, or {RATE_OF_ALL >> 10} KiB/s of all users" for text in texts]


def _lines(lines: int, size: int) -> str:
    return f"{lines:,} line{'s' if lines > 1 else ''} ({size:,} bytes)"
