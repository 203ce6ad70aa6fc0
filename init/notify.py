"""$NOTIFY_SOCKET: what services say of themselves, believed only from their own processes."""

from __future__ import annotations

import os
import socket
import struct

from init.owners import alive
from init.poller import IN
from init.records import record
from init.states import Told

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from init.owners import Owners
    from init.poller import Poller

_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
LONGEST = 4096


@record(frozen=True, slots=True)
class Message:
    """One notification, its fields as they came."""

    ready: bool = False
    reloading: bool = False
    stopping: bool = False
    watchdog: bool = False
    status: str | None = None
    main_pid: int = 0


def parse(data: bytes) -> Message:
    """The fields that matter here; unknown ones are the sender's own (systemd's rule: ignore them)."""
    found: dict[str, str] = {}
    for line in data.decode(errors="replace").splitlines():
        name, equals, value = line.partition("=")
        if equals:
            found[name] = value
    main_pid = found.get("MAINPID", "")
    return Message(
        ready=found.get("READY") == "1",
        reloading=found.get("RELOADING") == "1",
        stopping=found.get("STOPPING") == "1",
        watchdog=found.get("WATCHDOG") == "1",
        status=found.get("STATUS"),
        main_pid=int(main_pid) if main_pid.isdigit() and len(main_pid) < 10 else 0,
    )


class Notify:
    """The socket. Messages are handed over in the order sent, each with the service whose process sent it."""

    def __init__(
        self, path: str, poller: Poller, owners: Owners, told: Callable[[str, Told], None], say: Callable[[str], None]
    ) -> None:
        self.path = path
        self._owners, self._told, self._say = owners, told, say
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        if os.path.exists(path):  # noqa: PTH110 - no pathlib on PID 1's path
            os.unlink(path)  # noqa: PTH108
        self._socket.bind(path)
        os.chmod(path, 0o666)  # noqa: PTH101 - any user's service may speak; who it is tells the kernel
        poller.add(self._socket.fileno(), IN, lambda _: self.drain())

    def drain(self) -> None:
        """Everything sent so far. Also called before a death is judged: the successor's word comes first."""
        while True:
            try:
                data, ancillary, _, _ = self._socket.recvmsg(LONGEST, socket.CMSG_SPACE(_CREDENTIALS.size) + 64)
            except BlockingIOError:
                return
            pid = 0
            for level, kind, value in ancillary:
                if level == socket.SOL_SOCKET and kind == socket.SCM_CREDENTIALS:
                    pid = _CREDENTIALS.unpack(value[: _CREDENTIALS.size])[0]
                elif level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                    for (fd,) in struct.iter_unpack("i", value[: len(value) // 4 * 4]):
                        os.close(fd)  # a barrier of sd_notify: closing it is the answer
            self._judge(pid, parse(data))

    def _judge(self, pid: int, message: Message) -> None:
        service = self._owners.owner(pid)
        if not service:
            self._say(f"notify: refused a message of pid {pid}: it belongs to no service")
            return
        main_pid = message.main_pid
        if main_pid and (why := self._refusal(service, main_pid)):
            self._say(f"notify: refused MAINPID={main_pid} of {service} (pid {pid}): {why}")
            main_pid = 0
        status = message.status if message.status is not None else ("stopping" if message.stopping else None)
        self._told(service, Told(message.ready, main_pid, status, message.reloading, message.watchdog))

    def _refusal(self, service: str, pid: int) -> str:
        """Why a process cannot be the main one of a service; empty when it can."""
        if pid == os.getpid():
            return "that is PID 1"
        owner = self._owners.owner(pid)
        if owner == service:
            return "" if alive(pid) else "it has ended"
        if owner:
            return f"it belongs to {owner}"
        return "it does not belong to the service" if alive(pid) else "there is no such process"
