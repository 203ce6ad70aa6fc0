"""$NOTIFY_SOCKET: notifications of services, accepted only from their own processes.

Any user may send to this datagram socket, and to the syslog socket (`init.pid1.syslog`). PID 1 never makes the last
close of an attached descriptor: a sender decides how long a close takes: a connection that lingers, a file on a FUSE
file system of the sender. On a socket open to every user the kernel refuses attached descriptors, where it can (Linux
6.16). Otherwise PID 1 peeks at each message first, which leaves attachments in the queue. A child
(`init.pid1.spawn.owners`) takes a message with descriptors, and until then PID 1 reads nothing more from that socket.
"""

from __future__ import annotations

import os
import socket
import struct

from init.engine.states import Notified
from init.errors import ORDINARY, describe_error
from init.fields import number
from init.lean import replace
from init.pid1.spawn.owners import alive, uids
from init.pid1.wait import IN, MOMENT, Poller
from init.plan.service import Probe

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from init.pid1.spawn.closer import Closer
    from init.pid1.spawn.owners import Owners
    from init.pid1.wait import Timer
    from init.plan.service import Service

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
        if user is None or not _give_socket(path, user):
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
        self._closer().take(self._socket.fileno(), self._resume)
        self.waiting = True
        self._listen()

    @property
    def complete(self) -> bool:
        """Tell if all messages so far can be received, or if the closer is late: the wait for it is bounded."""
        return not self.waiting or self._closer().late

    def _resume(self) -> None:
        self.waiting = False
        self._listen()
        self._call()

    def pause(self, paused: bool) -> None:
        """Leave incoming messages in the queue; when it is full, their senders wait."""
        self._paused = paused
        self._listen()

    def _listen(self) -> None:
        self._poller.change(self._socket.fileno(), 0 if self._paused or self.waiting else IN)


def _give_socket(path: str, user: int) -> bool:
    if user == os.geteuid():
        return True
    try:
        os.chown(path, user, -1)
    except OSError:  # without CHOWN: open to all, like a syslog socket
        return False
    return True


LONGEST = 4096
MOST = 256  # messages per turn; then other descriptors have a turn, and the socket stays readable
KEPT = 3.0  # seconds for which a message is retried when its sender cannot be examined
REFUSALS, PERIOD = 10, 10.0  # lines per seconds: any process can be refused as often as it likes


def parse(data: bytes) -> Notified:
    """Parse the fields that matter here; ignore unknown ones (systemd's rule)."""
    values: dict[str, str] = {}
    for line in data.decode(errors="replace").splitlines():
        name, equals, value = line.partition("=")
        if equals:
            values[name] = value
    main_pid = values.get("MAINPID", "")
    status = "stopping" if values.get("STOPPING") == "1" else None
    return Notified(
        ready=values.get("READY") == "1",
        reloading=values.get("RELOADING") == "1",
        watchdog=values.get("WATCHDOG") == "1",
        standby=values.get("STANDBY") == "1",
        status=_plain(values["STATUS"]) if "STATUS" in values else status,
        main_pid=(number(main_pid) or 0) if len(main_pid) < 10 else 0,
    )


def _plain(text: str) -> str:
    """Keep printable characters: no escape sequence, nothing that changes the line's direction."""
    return "".join(letter for letter in text if letter.isprintable())


class Notify:
    """The sockets: one per user of services, owned by that user, so that no other user can send to it.

    Messages are handed over in the order sent, each with the service whose process sent it. A service's processes
    include those of its users, such as a login's shell. So the sender's user counts too: root, or the user that the
    service runs as.
    """

    def __init__(
        self,
        path: str,
        poller: Poller,
        owners: Owners,
        specs: Callable[[str], Service | None],
        notified: Callable[[str, Notified], None],
        log: Callable[[str], None],
        closer: Callable[[], Closer],
    ) -> None:
        self.path = path
        self._poller, self._closer = poller, closer
        self._owners, self._specs, self._notified, self._log = owners, specs, notified, log
        self._root = frozenset((0, os.geteuid()))
        self._users: dict[str, int] = {}  # uids of the users that services run as
        self._period = -PERIOD  # when the first refusal of this period was logged
        self._refused = 0
        self._again: Callable[[], object] | None = None
        self._timer: Timer | None = None
        self._kept: list[tuple[float, int, int, bytes]] = []  # since when; received, and not examined yet
        self._sockets = {os.geteuid(): self._open(path, os.geteuid())}

    def _open(self, path: str, uid: int) -> Datagrams:
        return Datagrams(path, self._poller, self._closer, self.readable, user=uid)

    def address(self, user: str) -> str:
        """Return the address for services of this user, looked up once here, never for a stranger's message."""
        if user and user not in self._users:
            uid = number(user)
            if uid is None:
                import pwd

                try:
                    uid = pwd.getpwnam(user).pw_uid
                except KeyError:
                    return self.path  # the start fails and reports the error
            self._users[user] = uid
        uid = self._users.get(user, 0)
        if uid in self._root:
            return self.path
        path = f"{self.path.removesuffix('.sock')}-{uid}.sock"
        if uid not in self._sockets:
            self._sockets[uid] = self._open(path, uid)
        return path

    def readable(self) -> None:
        self.read_all()
        if self._again is not None and not self._kept:
            again, self._again = self._again, None
            again()

    def read_all(self, again: Callable[[], object] | None = None) -> bool:
        """Read all messages so far. Also called before a death is handled: a successor's message comes first.

        False: a message had a descriptor attached, and the messages behind it can be read only in a moment; `again` is
        called then.
        """
        messages, self._kept = self._kept, []
        for at, pid, uid, data in messages:
            self._take(at, pid, uid, data)
        for source in tuple(self._sockets.values()):  # a copy: a message may start a service, whose user gets a socket
            for _ in range(MOST):
                message = source.receive(LONGEST) if not self._kept else None
                if message is None:
                    break
                data, pid, uid = message
                self._take(self._poller.now(), pid, uid, data)
        complete = not self._kept and all(source.complete for source in self._sockets.values())
        if not complete and again is not None:
            self._again = again
        return complete

    @property
    def keeps(self) -> bool:
        """True while a message could not be examined yet."""
        return bool(self._kept)

    def _take(self, at: float, pid: int, uid: int, data: bytes) -> None:
        """Examine a message; keep it while PID 1 cannot look at its sender."""
        if not self._kept:
            try:
                self._judge(pid, uid, data)
                return
            except ORDINARY as error:
                if self._poller.now() - at > KEPT:
                    self._refuse(f"lost a message of pid {pid} (uid {uid}): {describe_error(error)}")
                    return
                if self._timer is None:
                    self._timer = self._poller.after(MOMENT, self._once_more)
        self._kept.append((at, pid, uid, data))

    def _once_more(self) -> None:
        self._timer = None
        self.readable()

    def _judge(self, pid: int, uid: int, data: bytes) -> None:
        message = f"a message of pid {pid} (uid {uid})"
        if uid not in self._root and uid not in self._users.values():  # cheaper than looking up the owner
            self._refuse(f"refused {message}: no service that notifies runs as that user")
            return
        service = self._owners.owner(pid)
        spec = self._specs(service)
        if spec is None:
            self._refuse(f"refused {message}: it belongs to no service")
            return
        if not self._speaks(spec, uid):
            self._refuse(f"refused {message}: {service} runs as {spec.user or 'root'}")
            return
        notification = parse(data)
        if notification.main_pid and (objection := self._refusal(spec, notification.main_pid)):
            self._refuse(f"refused MAINPID={notification.main_pid} of {service} (pid {pid}): {objection}")
            notification = replace(notification, main_pid=0)
        self._notified(service, notification)

    def _refuse(self, text: str) -> None:
        now = self._poller.now()
        if now - self._period >= PERIOD:
            if self._refused > REFUSALS:
                self._log(f"notify: refused {self._refused - REFUSALS} more before")
            self._period, self._refused = now, 0
        self._refused += 1
        if self._refused <= REFUSALS:
            self._log(f"notify: {text}")

    def _speaks(self, spec: Service, uid: int) -> bool:
        return uid in self._root or uid == self._users.get(spec.user)

    def _refusal(self, spec: Service, pid: int) -> str:
        """Return why a process cannot be the service's main one; "" if it can."""
        if spec.ready.probe is not Probe.NOTIFY:
            return "the service is not one of `ready: notify`"
        if pid == os.getpid():
            return "that is PID 1"
        owner = self._owners.owner(pid)
        if owner and owner != spec.name:
            return f"it belongs to {owner}"
        if not alive(pid):
            return "it has ended" if owner else "there is no such process"
        if not owner:
            return "it does not belong to the service"
        strangers = [uid for uid in uids(pid) if not self._speaks(spec, uid)]
        return f"it runs as uid {strangers[0]}, the service as {spec.user or 'root'}" if strangers else ""
