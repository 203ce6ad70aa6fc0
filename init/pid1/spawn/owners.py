"""Owners of processes: the service of a pid, looked up in the kernel while the process exists."""

from __future__ import annotations

import os

from init.pid1.wait import shut

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

LEFT_BEHIND = 3.0  # seconds that a session without a known process counts: a hand-over takes at most two
# Errors from /proc for a process that has ended. Any other error proves nothing: treating it as an end would refuse a
# hand-over and start a second daemon beside the first.
GONE = (FileNotFoundError, ProcessLookupError)


class Owners:
    """Find a process's service by PID 1's children, their sessions and their descendants.

    A session has its leader's number, which the kernel reuses after the last member's end, without an event. So a
    session counts while a known process of the service is in it, and a little longer.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.pids: dict[int, str] = {}
        self._session_of: dict[int, int] = {}  # of each known pid
        self._sessions: dict[int, str] = {}
        self._left: dict[int, float] = {}  # sessions without a known process, oldest first

    def add(self, pid: int, service: str) -> None:
        """Add a child that leads a session of its own."""
        self.pids[pid] = service
        self._session_of[pid] = pid
        self._sessions[pid] = service
        self._left.pop(pid, None)

    def follow(self, pid: int, service: str) -> None:
        """Add a main process that is not PID 1's child, in any session."""
        self.pids[pid] = service
        self._session_of[pid] = session = _session(pid)
        self._left.pop(session, None)

    def remove(self, pid: int) -> None:
        self.pids.pop(pid, None)
        session = self._session_of.pop(pid, 0)
        if session in self._sessions and session not in self._session_of.values():
            self._left[session] = self._clock()
        self._forget()

    def owner(self, pid: int) -> str:
        """Return the service, or "". Call at once, while the sender exists."""
        self._forget()
        steps = 0
        while pid > 1 and steps < 64:
            name = self.pids.get(pid) or self._by_session(_session(pid))
            if name:
                return name
            pid = parent(pid)
            steps += 1
        return ""

    def _by_session(self, session: int) -> str:
        name = self._sessions.get(session, "")
        if name and session not in self.pids and _session(session) >= 0:
            # The leader was reaped, so the number belongs to another process now, and the session had ended.
            self._end(session)
            return ""
        return name

    def _forget(self) -> None:
        while self._left:
            session, since = next(iter(self._left.items()))
            if self._clock() - since < LEFT_BEHIND:
                return
            self._end(session)

    def _end(self, session: int) -> None:
        self._left.pop(session, None)
        self._sessions.pop(session, None)

    def heirs(self, pid: int) -> tuple[int, ...]:
        """Return the remaining processes of the session that a process began."""
        return tuple(other for other in processes() if other != pid and _session(other) == pid and alive(other))


def _session(pid: int) -> int:
    try:
        return os.getsid(pid)
    except OSError:
        return -1


def processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()]  # noqa: PTH208 - pathlib costs 8 ms of boot


def _read(pid: int, name: str) -> bytes:
    """Read a file of /proc in one call, up to the size needed; empty if the process has ended."""
    fd = -1
    try:
        fd = os.open(f"/proc/{pid}/{name}", os.O_RDONLY | os.O_CLOEXEC)
        return os.read(fd, 4096)
    except GONE:
        return b""
    finally:
        if fd >= 0:
            shut(fd)


def _stat(pid: int) -> list[str]:
    return _read(pid, "stat").rpartition(b")")[2].decode().split()


def parent(pid: int) -> int:
    values = _stat(pid)
    return int(values[1]) if values else 0


def alive(pid: int) -> bool:
    values = _stat(pid)
    return bool(values) and values[0] not in "ZX"


def uids(pid: int) -> tuple[int, ...]:
    """Return the real, effective, saved and file-system user.

    The owner of its directory in /proc does not do: root owns it for a process that may not be traced, and any user can
    create one.
    """
    lines = _read(pid, "status").splitlines()
    return tuple(int(word) for line in lines if line.startswith(b"Uid:") for word in line.split()[1:])
