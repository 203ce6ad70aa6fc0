"""/dev/log: messages of PAM, cron and sshd's children by syslog(3), as lines of the service that sent them.

Every user may write here, and may pretend to be sshd. So a line that is not root's starts with its uid, and each user
has a limit per second.
"""

from __future__ import annotations

import os
import re

from init.pid1.notify import Datagrams
from init.pid1.wait import Poller

TYPE_CHECKING = False

if TYPE_CHECKING:
    from collections.abc import Callable

    from init.pid1.logs import Logs
    from init.pid1.spawn.closer import Closer
    from init.pid1.spawn.owners import Owners


# Limits on users' log volume: bytes a second for each user and for all together.
# Bounded for any number of users.
RATE, BURST = 64 << 10, 1 << 20  # of one user: bytes a second on average, and at once
RATE_OF_ALL, BURST_OF_ALL = 256 << 10, 4 << 20
OVERHEAD = 128  # cost of a line besides its text
MOST_USERS = 256  # users remembered; the one that was quiet the longest is dropped first
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
            if len(self._users) >= MOST_USERS:
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


# <priority>Mmm dd hh:mm:ss ident[pid]: text
_LINE = re.compile(rb"<\d{1,3}>(?:[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d )?(.*)", re.DOTALL)
_CONTROL = bytes(code if code >= 32 and code != 127 else ord("?") for code in range(256))
LONGEST = 65536
SENDERLESS = "syslog"
MOST = 64  # messages per turn; then other descriptors have a turn, and the socket stays readable
PERIOD = 10.0  # seconds until refused lines are reported


def line(data: bytes) -> bytes:
    """Return the text of a datagram on one line, without priority and time, which the log already has."""
    match = _LINE.fullmatch(data.rstrip(b"\0\n"))
    return (match[1] if match else data.rstrip(b"\0\n")).replace(b"\n", b" ") + b"\n"


def users_line(data: bytes, uid: int) -> bytes:
    """Return the same for a user who is not root: with the uid, and without control characters."""
    return b"uid %d: %s\n" % (uid, line(data)[:-1].replace(b"\t", b" ").translate(_CONTROL))


class Syslog:
    def __init__(self, path: str, poller: Poller, owners: Owners, logs: Logs, closer: Callable[[], Closer]) -> None:
        self._poller, self._owners, self._logs = poller, owners, logs
        self._root = frozenset((0, os.geteuid()))
        self.meter = Meter(poller.now())
        self._telling = False
        self._datagrams = Datagrams(path, poller, closer, self._read_all, user=None)
        logs.pause_too(self._datagrams.pause)

    def _read_all(self) -> None:
        for _ in range(MOST):
            if self._logs.full:  # unread messages fill the kernel's queue, and then senders wait
                break
            message = self._datagrams.receive(LONGEST)
            if message is None:
                break
            data, pid, uid = message
            if uid in self._root:
                self._take(pid, line(data))
            elif self.meter.admits(uid, len(data), self._poller.now()):  # cheaper than looking up the owner
                self._take(pid, users_line(data, uid))
            elif not self._telling:
                self._telling = True
                self._poller.after(PERIOD, self._tell)
        self._logs.flush()

    def _take(self, pid: int, text: bytes) -> None:
        try:
            name = self._owners.owner(pid)
        except OSError:
            name = ""  # better a line without its service than none
        self._logs.take(name or SENDERLESS, "syslog", "tagged", text)

    def _tell(self) -> None:
        self._telling = False
        for text in self.meter.summary():
            self._logs.take(SENDERLESS, "syslog", "tagged", text.encode() + b"\n")
        self._logs.flush()
