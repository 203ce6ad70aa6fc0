"""/dev/log: what PAM, cron and sshd's children say through syslog(3), as lines of the service that sent them.

Everybody may write here, and say what he likes: that he is sshd, and whom he let in. So a line that is not root's
begins with its user, and each user has so much a second.
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
MOST = 64  # messages at a time; then others have a turn, and the socket still says that there are more
PERIOD = 10.0  # seconds after which refused lines are told


def line(data: bytes) -> bytes:
    """The text of a datagram on one line, without priority and time, which the log has already."""
    found = _LINE.fullmatch(data.rstrip(b"\0\n"))
    return (found[1] if found else data.rstrip(b"\0\n")).replace(b"\n", b" ") + b"\n"


def users_line(data: bytes, uid: int) -> bytes:
    """The same of a user who is not root: whose it is, and nothing that a terminal would obey."""
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
            if self._logs.full:  # what is not read here fills the kernel's queue, and then senders wait
                break
            found = self._datagrams.receive(LONGEST)
            if found is None:
                break
            data, pid, uid = found
            if uid in self._root:
                self._take(pid, line(data))
            elif self.meter.admits(uid, len(data), self._poller.now()):  # costs little, unlike the owner
                self._take(pid, users_line(data, uid))
            elif not self._telling:
                self._telling = True
                self._poller.after(PERIOD, self._tell)
        self._logs.flush()

    def _take(self, pid: int, text: bytes) -> None:
        try:
            name = self._owners.owner(pid)
        except OSError:
            name = ""  # a line without its service is better than none
        self._logs.take(name or SENDERLESS, "syslog", "tagged", text)

    def _tell(self) -> None:
        self._telling = False
        for text in self.meter.summary():
            self._logs.take(SENDERLESS, "syslog", "tagged", text.encode() + b"\n")
        self._logs.flush()
