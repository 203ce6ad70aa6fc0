"""A datagram socket that any user may send to. PID 1 never makes the last close of an attached descriptor.

A sender decides how long a close takes: a connection that lingers, a file on a FUSE file system of the sender. On a
socket open to everybody the kernel refuses attached descriptors, where it can (Linux 6.16). Otherwise PID 1 peeks at
each message first, which leaves attachments in the queue. A child (`init.pid1.spawn.closer`) takes a message with
descriptors, and until then PID 1 reads nothing more from that socket.
"""

from __future__ import annotations

import os
import socket
import struct

from init.pid1.wait import IN

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from init.pid1.spawn.closer import Closer
    from init.pid1.wait import Poller

SO_PASSRIGHTS = 83  # asm-generic; an older kernel returns an error
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_ROOM = socket.CMSG_SPACE(_CREDENTIALS.size)  # room for these only: the kernel reports that anything else is attached
QUEUE = 1 << 20


class Datagrams:
    """A bound socket with credentials. Mode 0600 restricts it to its owner."""

    def __init__(
        self, path: str, poller: Poller, closer: Callable[[], Closer], call: Callable[[], None], *, user: int | None
    ) -> None:
        """Open the socket. `user` is the only sender besides root; None: all users may send, and none may attach."""
        self._poller, self._closer, self._call = poller, closer, call
        self._paused = False
        self.waiting = False  # for the closer to take a message
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, QUEUE)
        if os.path.lexists(path):
            os.unlink(path)  # noqa: PTH108 - no pathlib on PID 1's path
        before = os.umask(0o177)  # created with its final mode
        try:
            self._socket.bind(path)
        finally:
            os.umask(before)
        self._refuses = False
        if user is None or not _given(path, user):
            self._refuses = self._refuse()
            os.chmod(path, 0o666)  # noqa: PTH101 - no pathlib on PID 1's path
        poller.add(self._socket.fileno(), IN, lambda _: self._call())

    def _refuse(self) -> bool:
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, SO_PASSRIGHTS, 0)
        except OSError:
            return False
        return True

    def receive(self, longest: int) -> tuple[bytes, int, int] | None:
        """Return the next message with its sender's pid and uid; None: nothing more for now."""
        if self.waiting:
            return None
        try:
            flags = 0 if self._refuses else socket.MSG_PEEK
            data, ancillary, came_with, _ = self._socket.recvmsg(longest, _ROOM, flags)
            if came_with & socket.MSG_CTRUNC:
                self._hand_over()
            elif flags:
                self._socket.recv(1)
        except BlockingIOError:
            return None
        for level, kind, value in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_CREDENTIALS:
                pid, uid, _ = _CREDENTIALS.unpack(value[: _CREDENTIALS.size])
                return data, pid, uid
        return data, 0, -1

    def _hand_over(self) -> None:
        self._closer().take(self._socket.fileno(), self._taken)
        self.waiting = True
        self._listen()

    @property
    def complete(self) -> bool:
        """Tell if all messages so far can be received, or if the closer is late: the wait for it is bounded."""
        return not self.waiting or self._closer().late

    def _taken(self) -> None:
        self.waiting = False
        self._listen()
        self._call()

    def pause(self, paused: bool) -> None:
        """Leave incoming messages in the queue; when it is full, their senders wait."""
        self._paused = paused
        self._listen()

    def _listen(self) -> None:
        self._poller.change(self._socket.fileno(), 0 if self._paused or self.waiting else IN)


def _given(path: str, user: int) -> bool:
    if user == os.geteuid():
        return True
    try:
        os.chown(path, user, -1)
    except OSError:  # without CHOWN: open to all, like a syslog socket
        return False
    return True
