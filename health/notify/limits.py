"""Limits on messages: so many an hour for each user and in all; what is over them is counted, and told as one message.

Pure. An hour begins with a user's first message, and an hour of counts with the first one that is over the limit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

HOUR = 3600.0
MOST_KEPT = 2000  # users and recipients with a count; beyond that messages are lost, which is counted
MOST_RECIPIENTS = 20  # of a user
MOST_EVENTS = 8


@dataclass
class MessageWindow:
    since: float
    used: int = 0


@dataclass
class HeldMessages:
    since: float
    counts: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Digest:
    """Messages of a user to one recipient that were not sent one by one."""

    user: str
    to: str
    counts: Mapping[str, int]

    @property
    def number(self) -> int:
        return sum(self.counts.values())


@dataclass
class MessageLimits:
    per_user: int
    total: int
    windows: dict[str, MessageWindow] = field(default_factory=dict)  # "" is all users together
    held: dict[tuple[str, str], HeldMessages] = field(default_factory=dict)
    lost: int = 0

    def has_room(self, user: str, now: float, more: int = 0) -> bool:
        """Tell if one message may go beside `more` that wait."""
        own, everyone = self._window(user, now), self._window("", now)
        return own.used + more < self.per_user and everyone.used + more < self.total

    def take(self, user: str, now: float, number: int = 1) -> None:
        """Count a message, once for each of its recipients."""
        self._window(user, now).used += number
        self._window("", now).used += number

    def hold(self, user: str, to: str, event: str, now: float) -> None:
        """Count a message for the digest. A user with many recipients gets the rest of the counts."""
        if (user, to) not in self.held and sum(owner == user for owner, _ in self.held) >= MOST_RECIPIENTS:
            to = user
        digest = self.held.get((user, to))
        if digest is None:
            if len(self.held) >= MOST_KEPT:
                self.lost += 1
                return
            digest = self.held[user, to] = HeldMessages(now)
        if event not in digest.counts and len(digest.counts) >= MOST_EVENTS:
            event = "other"
        digest.counts[event] = digest.counts.get(event, 0) + 1

    def due(self, now: float) -> list[Digest]:
        """Take out the digests whose hour is over. They count as messages."""
        for user in [user for user, window in self.windows.items() if not 0 <= now - window.since < HOUR]:
            del self.windows[user]
        ready = []
        for (user, to), digest in list(self.held.items()):
            if not 0 <= now - digest.since < HOUR and self.has_room(user, now):
                self.take(user, now)
                ready.append(Digest(user, to, digest.counts))
                del self.held[user, to]
        return ready

    def put_back(self, digests: list[Digest], now: float) -> None:
        """Take back digests that could not be kept; they are due at once."""
        for digest in digests:
            self.held[digest.user, digest.to] = HeldMessages(now - HOUR, dict(digest.counts))

    def next_due(self, now: float) -> float | None:
        """Return the seconds until a digest may go; None without any."""
        if not self.held:
            return None
        first = min(digest.since for digest in self.held.values()) + HOUR
        return first - now if first > now else HOUR / 60  # it waits for room

    def _window(self, user: str, now: float) -> MessageWindow:
        window = self.windows.get(user)
        if window is None or not 0 <= now - window.since < HOUR:
            window = self.windows[user] = MessageWindow(now)
        return window

    def as_json(self) -> dict[str, Any]:
        return {
            "windows": {user: [window.since, window.used] for user, window in self.windows.items()},
            "held": [[user, to, digest.since, digest.counts] for (user, to), digest in self.held.items()],
            "lost": self.lost,
        }

    def restore(self, data: Mapping[str, Any]) -> None:
        """Take over what an earlier life counted; damaged data counts as none."""
        try:
            windows = {str(user): MessageWindow(float(at), int(used)) for user, (at, used) in data["windows"].items()}
            digests = {
                (str(user), str(to)): HeldMessages(float(since), {str(event): int(counts[event]) for event in counts})
                for user, to, since, counts in data["held"]
            }
            self.windows, self.held, self.lost = windows, digests, int(data["lost"])
        except (KeyError, TypeError, ValueError, AttributeError):
            return
