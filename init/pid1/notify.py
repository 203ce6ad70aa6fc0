"""$NOTIFY_SOCKET: what services say of themselves, believed only from their own processes."""

from __future__ import annotations

import os

from init.engine.states import Notified
from init.errors import ORDINARY, in_words
from init.fields import number
from init.pid1.spawn.owners import alive, uids
from init.pid1.wait.datagrams import Datagrams
from init.pid1.wait.poller import MOMENT, Poller
from init.plan.service import Probe
from init.records import replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from init.pid1.spawn.closer import Closer
    from init.pid1.spawn.owners import Owners
    from init.pid1.wait.poller import Timer
    from init.plan.service import Service

LONGEST = 4096
MOST = 256  # messages at a time; then others have a turn, and the socket still says that there are more
KEPT = 3.0  # seconds for which a message that cannot be judged is tried again
REFUSALS, PERIOD = 10, 10.0  # so many lines in so many seconds: anybody can be refused, as often as he likes


def parse(data: bytes) -> Notified:
    """The fields that matter here; unknown ones are the sender's own (systemd's rule: ignore them)."""
    found: dict[str, str] = {}
    for line in data.decode(errors="replace").splitlines():
        name, equals, value = line.partition("=")
        if equals:
            found[name] = value
    main_pid = found.get("MAINPID", "")
    status = "stopping" if found.get("STOPPING") == "1" else None
    return Notified(
        ready=found.get("READY") == "1",
        reloading=found.get("RELOADING") == "1",
        watchdog=found.get("WATCHDOG") == "1",
        status=_plain(found["STATUS"]) if "STATUS" in found else status,
        main_pid=(number(main_pid) or 0) if len(main_pid) < 10 else 0,
    )


def _plain(text: str) -> str:
    """What a terminal may be shown: no escape sequence, nothing that turns the line around."""
    return "".join(letter for letter in text if letter.isprintable())


class Notify:
    """The sockets: one for the services of each user, whom it belongs to, so that nobody else can send to it. Messages
    are handed over in the order sent, each with the service whose process sent it.

    A service's processes include what its users run, such as a login's shell. So the sender's user counts too: root, or
    the one that the service runs as.
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
        self._users: dict[str, int] = {}  # the uids of those that services run as
        self._period = -PERIOD  # when the first refusal of these was told
        self._refused = 0
        self._again: Callable[[], object] | None = None
        self._timer: Timer | None = None
        self._kept: list[tuple[float, int, int, bytes]] = []  # since when; taken, and not judged yet
        self._sockets = {os.geteuid(): self._open(path, os.geteuid())}

    def _open(self, path: str, uid: int) -> Datagrams:
        return Datagrams(path, self._poller, self._closer, self.readable, user=uid)

    def address(self, user: str) -> str:
        """Where services of this user speak. Looked up here, once: never for a stranger's message."""
        if user and user not in self._users:
            uid = number(user)
            if uid is None:
                import pwd

                try:
                    uid = pwd.getpwnam(user).pw_uid
                except KeyError:
                    return self.path  # the start fails, and says so
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
        """What was sent so far. Also called before a death is judged: the successor's word comes first. False: somebody
        attached a descriptor, and what comes behind it can be read only in a moment; `again` is called then."""
        kept, self._kept = self._kept, []
        for at, pid, uid, data in kept:
            self._take(at, pid, uid, data)
        for source in tuple(self._sockets.values()):  # a word may start a service, whose user gets a socket
            for _ in range(MOST):
                found = source.receive(LONGEST) if not self._kept else None
                if found is None:
                    break
                data, pid, uid = found
                self._take(self._poller.now(), pid, uid, data)
        complete = not self._kept and all(source.complete for source in self._sockets.values())
        if not complete and again is not None:
            self._again = again
        return complete

    @property
    def keeps(self) -> bool:
        """Whether something was said that could not be judged yet."""
        return bool(self._kept)

    def _take(self, at: float, pid: int, uid: int, data: bytes) -> None:
        """A message that has been taken must not be lost because PID 1 cannot look at its sender now."""
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
        who = f"a message of pid {pid} (uid {uid})"
        if uid not in self._root and uid not in self._users.values():  # costs nothing, unlike the owner
            self._refuse(f"refused {who}: no service that notifies runs as that user")
            return
        service = self._owners.owner(pid)
        spec = self._specs(service)
        if spec is None:
            self._refuse(f"refused {who}: it belongs to no service")
            return
        if not self._speaks(spec, uid):
            self._refuse(f"refused {who}: {service} runs as {spec.user or 'root'}")
            return
        word = parse(data)
        if word.main_pid and (why := self._refusal(spec, word.main_pid)):
            self._refuse(f"refused MAINPID={word.main_pid} of {service} (pid {pid}): {why}")
            word = replace(word, main_pid=0)
        self._notified(service, word)

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
        """Why a process cannot be the main one of a service; empty when it can."""
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
