"""Lock that allows one cycle at a time on a root.

It is a flock that git's processes inherit: it is free only when the last of them has ended, so its holder may clean up
after any interrupted cycle.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gitsync.errors import GitsyncError
from gitsync.repo.child import MARK
from ground.files import locked

POLL = 0.05


@dataclass(frozen=True, slots=True)
class HeldLock:
    """The taken lock, as a descriptor for children that write to inherit."""

    fd: int


def _started(pid: int) -> str:
    """Return when a process started, in clock ticks since boot. With it, a reused pid is recognised."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]


def _lives(cycle: str) -> bool:
    pid, _, started = cycle.partition(":")
    try:
        return _started(int(pid)) == started
    except (OSError, ValueError):
        return False


def end_children_of(cycle: str) -> None:
    """Kill the children of a dead cycle: the processes that carry its mark, and no other that waits for the lock."""
    if not cycle:
        return
    mark = f"{MARK}={cycle}".encode()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if mark in (entry / "environ").read_bytes().split(b"\0"):
                    os.kill(int(entry.name), signal.SIGKILL)


@contextlib.contextmanager
def held(path: Path, wait: float) -> Iterator[HeldLock]:
    """Hold the lock. Wait at most `wait` seconds for a live owner; kill a dead owner's children at once."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        deadline = time.monotonic() + wait
        while not locked(fd):
            end_children_of(_dead_owner(fd))
            if time.monotonic() > deadline:
                raise GitsyncError("start a cycle", "another gitsync is running", file=path, hint="try again")
            time.sleep(POLL)
        # A cycle that ends removes its name. A name that is still there belongs to a killed cycle.
        end_children_of(_dead_owner(fd))
        cycle = f"{os.getpid()}:{_started(os.getpid())}"
        # One write of a fixed length: a waiter reads the old name or the new one, never a mix.
        os.pwrite(fd, f"{cycle:<63}\n".encode(), 0)
        os.environ[MARK] = cycle
        yield HeldLock(fd)
        os.pwrite(fd, f"{'':<63}\n".encode(), 0)
    finally:
        os.environ.pop(MARK, None)
        os.close(fd)


def _dead_owner(fd: int) -> str:
    owner = os.pread(fd, 64, 0).decode(errors="replace").strip()
    return "" if _lives(owner) else owner
