"""Who closes the descriptors that strangers attach to messages: a child of PID 1, and for each message one of its own.

The child takes a message out of a socket of PID 1's without ever closing what came with it: that is the end of a
grandchild, which nobody waits for. An end does not linger as a close does, and what it may wait for besides (a dead NFS
server, a file system of the sender's own on an older kernel) it waits for alone. Loaded when it is first needed, gone
when it is not.
"""

from __future__ import annotations

import os
import select
import socket

from init.errors import ORDINARY
from init.lean import signal
from init.pid1.spawn import procs
from init.pid1.spawn.procs import Streams
from init.pid1.wait.poller import IN

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from init.pid1.wait.poller import Poller, Timer

LATE = 2.0  # seconds after which nobody else waits for a message to be taken
RETRY = 0.1
IDLE = 1.0  # the child's life without work
TAKING = 1.0  # what a grandchild may need until it has the message
MOST = 16  # grandchildren that do not come to their end; then no more messages are taken
MOST_ATTACHED = 253  # SCM_MAX_FD
_ROOM = socket.CMSG_SPACE(12) + socket.CMSG_SPACE(4 * MOST_ATTACHED)
DONE = b"."


class Closer:
    """PID 1's side: sockets whose first message is to be taken, one after the other."""

    def __init__(self, poller: Poller, log: Callable[[str], None]) -> None:
        self._poller, self._log = poller, log
        self._child: socket.socket | None = None
        self._due: list[tuple[int, Callable[[], None]]] = []
        self.late = False  # somebody's descriptor is not even given away
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
            self._log("descriptors that were sent to us cannot be closed: what else is sent there waits")
        self.when_late()

    def _ask(self) -> None:
        if not self._due:
            return
        try:
            child = self._child or self._start()
            socket.send_fds(child, [DONE], [self._due[0][0]])
        except ORDINARY:  # no process to be had, or the child has just gone home
            self._hung_up()

    def _start(self) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            procs.fork_own(serve, Streams(theirs.fileno(), 2, 2), "closer")
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        ours.setblocking(False)
        self._child = ours
        self._poller.add(ours.fileno(), IN, self._heard)
        return ours

    def _heard(self, _: int) -> None:
        assert self._child is not None
        try:
            word = self._child.recv(1)
        except BlockingIOError:
            return
        except OSError:
            word = b""
        if not word:
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
    """The child's life. Its standard input is the way to PID 1."""
    asked = socket.socket(fileno=0)
    ending: set[int] = set()
    _raise_limit()
    while True:
        asked_again = select.select([asked], [], [], IDLE)[0]
        ending -= _ended(ending)
        if not asked_again and ending:
            continue
        found = socket.recv_fds(asked, 1, 1)[1] if asked_again else []
        if not found:
            return
        while len(ending) >= MOST:
            ending.discard(os.waitpid(-1, 0)[0])
        ending.add(_take(found[0]))
        os.close(found[0])
        asked.send(DONE)


def _take(fd: int) -> int:
    """Come back when the message is out of the socket: then its receiver may read on."""
    heard, tell = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            os.close(heard)
            source = socket.socket(fileno=fd)
            source.recvmsg(1, _ROOM)
            os.write(tell, DONE)
        finally:
            os._exit(0)
    os.close(tell)
    if not select.select([heard], [], [], TAKING)[0]:
        # The kernel closes what could not be given to it, and does so after the message was taken.
        os.kill(pid, signal.SIGKILL)
        ended = os.pidfd_open(pid)
        select.select([ended], [], [], TAKING)
        os.close(ended)
    os.close(heard)
    return pid


def _ended(pids: set[int]) -> set[int]:
    return {pid for pid in pids if os.waitpid(pid, os.WNOHANG)[0]}


def _raise_limit() -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
