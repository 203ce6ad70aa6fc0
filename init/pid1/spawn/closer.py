"""Closing of attached descriptors: a child of PID 1 takes such messages, and a grandchild ends with each.

The child takes a message out of PID 1's socket without closing what came with it: the exit of a grandchild does that,
and no process waits for it. An exit does not linger as a close does; if it blocks on anything else (a dead NFS server,
the sender's own file system on an older kernel), it blocks alone. The child starts on demand and ends when idle.
"""

from __future__ import annotations

import os
import select
import socket

from init.errors import ORDINARY
from init.lean import signal
from init.pid1.spawn import procs
from init.pid1.spawn.procs import Streams
from init.pid1.wait import IN

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from init.pid1.wait import Poller, Timer

LATE = 2.0  # seconds after which other work no longer waits for a message
RETRY = 0.1
IDLE = 1.0  # seconds that the child lives without work
TAKING = 1.0  # seconds for a grandchild to receive the message
MOST = 16  # grandchildren that have not ended; beyond it no message is taken
MOST_ATTACHED = 253  # SCM_MAX_FD
_ROOM = socket.CMSG_SPACE(12) + socket.CMSG_SPACE(4 * MOST_ATTACHED)
DONE = b"."


class Closer:
    """PID 1's side: sockets whose first message must be taken, one after the other."""

    def __init__(self, poller: Poller, log: Callable[[str], None]) -> None:
        self._poller, self._log = poller, log
        self._child: socket.socket | None = None
        self._due: list[tuple[int, Callable[[], None]]] = []
        self.late = False  # a descriptor could not be handed over in time
        self.when_late: Callable[[], None] = lambda: None
        self._timer: Timer | None = None

    def take(self, fd: int, done: Callable[[], None]) -> None:
        self._due.append((fd, done))
        if len(self._due) == 1:
            self._next()

    def _next(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._due:
            self._timer = self._poller.after(LATE, self._is_late)
            self._ask()

    def _is_late(self) -> None:
        self._timer = None
        if not self.late:
            self.late = True
            self._log("descriptors sent to a socket of PID 1 cannot be closed: further messages there wait")
        self.when_late()

    def _ask(self) -> None:
        if not self._due:
            return
        try:
            child = self._child or self._start()
            socket.send_fds(child, [DONE], [self._due[0][0]])
        except ORDINARY:  # no process available, or the child has just ended
            self._hung_up()

    def _start(self) -> socket.socket:
        own_end, child_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            procs.fork_own(serve, Streams(child_end.fileno(), 2, 2), "closer")
        except OSError:
            own_end.close()
            raise
        finally:
            child_end.close()
        own_end.setblocking(False)
        self._child = own_end
        self._poller.add(own_end.fileno(), IN, self._read_reply)
        return own_end

    def _read_reply(self, _: int) -> None:
        assert self._child is not None
        try:
            reply = self._child.recv(1)
        except BlockingIOError:
            return
        except OSError:
            reply = b""
        if not reply:
            self._hung_up()
            return
        self.late = False
        _, done = self._due.pop(0)
        self._next()
        done()

    def _hung_up(self) -> None:
        if self._child is not None:
            self._poller.remove(self._child.fileno())
            self._child.close()
            self._child = None
        if self._due:
            self._poller.after(RETRY, self._ask)


def serve() -> None:
    """Take messages, in the child. Standard input is the connection to PID 1."""
    requests = socket.socket(fileno=0)
    ending: set[int] = set()
    _raise_limit()
    while True:
        readable = select.select([requests], [], [], IDLE)[0]
        ending -= _reap_ended(ending)
        if not readable and ending:
            continue
        descriptors = socket.recv_fds(requests, 1, 1)[1] if readable else []
        if not descriptors:
            return
        while len(ending) >= MOST:
            ending.discard(os.waitpid(-1, 0)[0])
        ending.add(_take(descriptors[0]))
        os.close(descriptors[0])
        requests.send(DONE)


def _take(fd: int) -> int:
    """Return when the message is out of the socket, so that PID 1 may read on."""
    received, done = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            os.close(received)
            source = socket.socket(fileno=fd)
            source.recvmsg(1, _ROOM)
            os.write(done, DONE)
        finally:
            os._exit(0)
    os.close(done)
    if not select.select([received], [], [], TAKING)[0]:
        # The kernel closes what it could not deliver, after the message was taken.
        os.kill(pid, signal.SIGKILL)
        ended = os.pidfd_open(pid)
        select.select([ended], [], [], TAKING)
        os.close(ended)
    os.close(received)
    return pid


def _reap_ended(pids: set[int]) -> set[int]:
    return {pid for pid in pids if os.waitpid(pid, os.WNOHANG)[0]}


def _raise_limit() -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
