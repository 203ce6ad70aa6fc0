"""/dev/log: messages of PAM, cron and sshd's children by syslog(3), as lines of the service that sent them.

Every user may write here, and may pretend to be sshd. So a line that is not root's starts with its uid, and each user
has a limit per second.
"""

from __future__ import annotations

import os
import re

from init.pid1.log.meter import Meter
from init.pid1.wait.datagrams import Datagrams
from init.pid1.wait.poller import Poller

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from init.pid1.log.logs import Logs
    from init.pid1.spawn.closer import Closer
    from init.pid1.spawn.owners import Owners

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
