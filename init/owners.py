"""Which service a process belongs to, asked of the kernel while the process is there."""

from __future__ import annotations

import os


class Owners:
    """Which service a process belongs to: its own children, their sessions, their descendants."""

    def __init__(self) -> None:
        self.pids: dict[int, str] = {}
        self._sessions: dict[int, str] = {}

    def add(self, pid: int, service: str) -> None:
        self.pids[pid] = service
        self._sessions[pid] = service
        if len(self._sessions) > 512:  # a service that failed for days; those whose leader and members are gone
            alive = {_session(other) for other in processes()}
            self._sessions = {sid: name for sid, name in self._sessions.items() if sid in alive}

    def remove(self, pid: int) -> None:
        self.pids.pop(pid, None)

    def owner(self, pid: int) -> str:
        """The service, or nothing. Read at once, while the sender is there to be asked about."""
        seen = 0
        while pid > 1 and seen < 64:
            name = self.pids.get(pid) or self._sessions.get(_session(pid))
            if name:
                return name
            pid = parent(pid)
            seen += 1
        return ""

    def heirs(self, pid: int) -> tuple[int, ...]:
        """What is left of the session that a process began."""
        return tuple(other for other in processes() if other != pid and _session(other) == pid and alive(other))


def _session(pid: int) -> int:
    try:
        return os.getsid(pid)
    except OSError:
        return -1


def processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]  # noqa: PTH208 - as below


def _stat(pid: int) -> list[str]:
    try:
        with open(f"/proc/{pid}/stat", "rb") as stream:  # noqa: PTH123 - pathlib costs 8 ms of boot
            return stream.read().rpartition(b")")[2].decode().split()
    except OSError:
        return []


def parent(pid: int) -> int:
    found = _stat(pid)
    return int(found[1]) if found else 0


def alive(pid: int) -> bool:
    found = _stat(pid)
    return bool(found) and found[0] not in "ZX"


def uids(pid: int) -> tuple[int, ...]:
    """Its real, effective, saved and file-system user. The owner of its directory would not do: a process that may not
    be traced, which any user can make of one, seems to be root's there."""
    try:
        with open(f"/proc/{pid}/status", "rb") as stream:  # noqa: PTH123 - as above
            return tuple(int(word) for line in stream if line.startswith(b"Uid:") for word in line.split()[1:])
    except OSError:
        return ()
