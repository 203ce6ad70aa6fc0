"""$NOTIFY_SOCKET: notifications of services, accepted only from their own processes."""

from __future__ import annotations

import os

from init.engine.states import Notified
from init.errors import ORDINARY, in_words
from init.fields import number
from init.lean import replace
from init.pid1.datagrams import Datagrams
from init.pid1.spawn.owners import alive, uids
from init.pid1.wait import MOMENT, Poller
from init.plan.service import Probe

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from init.pid1.spawn.closer import Closer
    from init.pid1.spawn.owners import Owners
    from init.pid1.wait import Timer
    from init.plan.service import Service

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
                    self._refuse(f"lost a message of pid {pid} (uid {uid}): {in_words(error)}")
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
