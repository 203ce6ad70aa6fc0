"""/dev/log: what PAM, cron and sshd's children say through syslog(3), as lines of the service that sent them."""

from __future__ import annotations

import os
import re
import socket
import struct

from init.poller import IN

TYPE_CHECKING = False
if TYPE_CHECKING:
    from init.logs import Logs
    from init.owners import Owners
    from init.poller import Poller

# <priority>Mmm dd hh:mm:ss ident[pid]: text
_LINE = re.compile(rb"<\d{1,3}>(?:[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d )?(.*)", re.DOTALL)
_CREDENTIALS = struct.Struct("3i")
LONGEST = 65536
SENDERLESS = "syslog"


def line(data: bytes) -> bytes:
    """The text of a datagram on one line, without priority and time, which the log has already."""
    found = _LINE.fullmatch(data.rstrip(b"\0\n"))
    return (found[1] if found else data.rstrip(b"\0\n")).replace(b"\n", b" ") + b"\n"


class Syslog:
    def __init__(self, path: str, poller: Poller, owners: Owners, logs: Logs) -> None:
        self._owners, self._logs = owners, logs
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        if os.path.lexists(path):
            os.unlink(path)  # noqa: PTH108 - no pathlib on PID 1's path
        self._socket.bind(path)
        os.chmod(path, 0o666)  # noqa: PTH101 - everybody logs
        poller.add(self._socket.fileno(), IN, lambda _: self._drain())
        logs.pause_too(self._socket.fileno())

    def _drain(self) -> None:
        for _ in range(256):  # then let others have a turn
            if self._logs.full:  # what is not read here fills the kernel's queue, and then senders wait
                break
            try:
                data, ancillary, _, _ = self._socket.recvmsg(LONGEST, socket.CMSG_SPACE(_CREDENTIALS.size))
            except BlockingIOError:
                break
            pid = 0
            for level, kind, value in ancillary:
                if level == socket.SOL_SOCKET and kind == socket.SCM_CREDENTIALS:
                    pid = _CREDENTIALS.unpack(value[: _CREDENTIALS.size])[0]
            name = self._owners.owner(pid) or SENDERLESS
            self._logs.take(name, "syslog", "tagged", line(data))
        self._logs.flush()
