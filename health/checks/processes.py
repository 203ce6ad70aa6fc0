"""Processes in /proc as text of a fixed form: all of them, and those that wait in the kernel."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from health.api import Capture, Failure

# The real user: root owns the directory where a user runs a set-uid program.
_UID = re.compile(r"^Uid:\t(\d+)\t", re.MULTILINE)
_PENDING = re.compile(r"^S(?:ig|hd)Pnd:\t([0-9a-f]+)$", re.MULTILINE)
_SWITCHES = re.compile(r"^(?:non)?voluntary_ctxt_switches:\t(\d+)$", re.MULTILINE)
KILL = 1 << 8  # SIGKILL's bit in a signal set


@dataclass(frozen=True, slots=True)
class _Process:
    pid: str
    state: str
    parent: str
    start: int
    uid: str
    name: str
    command: str
    status: str

    @property
    def shown(self) -> str:
        return " ".join((self.command or f"[{self.name}]").split())


def _all() -> Iterator[_Process]:
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        try:
            head, _, tail = _head(f"{entry.path}/stat").rpartition(")")
            command = _head(f"{entry.path}/cmdline").replace("\0", " ").strip()
            # The kernel escapes a line break in the name (the first line) as two characters.
            status = _head(f"{entry.path}/status", 8192)
        except OSError:
            # The process ended meanwhile.
            continue
        fields = tail.split()
        uid = _UID.search(status)
        if uid is not None:
            name = head.partition("(")[2]
            yield _Process(entry.name, fields[0], fields[1], int(fields[19]), uid[1], name, command, status)


def processes() -> Capture:
    """Print one line per process: pid, start, parent, state, seconds since its start, real user, command line."""
    ticks = os.sysconf("SC_CLK_TCK")
    try:
        uptime = float(Path("/proc/uptime").read_text().split()[0])
    except (OSError, ValueError) as error:
        return Capture("", Failure.FAILED, f"/proc/uptime: {error}")
    lines = ["# processes: pid start ppid state age uid command"]
    for process in _all():
        age = max(0, int(uptime - process.start / ticks))
        lines.append(
            f"{process.pid} {process.start} {process.parent} {process.state} {age} {process.uid} {process.shown}"
        )
    return Capture("\n".join([*lines, f"# end: {len(lines) - 1} processes"]))


def waiting() -> Capture:
    """Print one line per process in uninterruptible sleep: its number of context switches and whether it was killed.

    Kernel threads rest like this by design and are left out.
    """
    lines = ["# waiting: pid start uid switches killed command"]
    for process in _all():
        if process.state != "D" or not process.command:
            continue
        switches = sum(map(int, _SWITCHES.findall(process.status)))
        killed = any(int(pending, 16) & KILL for pending in _PENDING.findall(process.status))
        lines.append(
            f"{process.pid} {process.start} {process.uid} {switches} {'yes' if killed else 'no'} {process.shown}"
        )
    return Capture("\n".join([*lines, f"# end: {len(lines) - 1} processes"]))


def kept_waiting(pid: int) -> float:
    """Return how many seconds its most delayed thread was ready to run but got no processor.

    A process that hangs in a driver or on a server waits for something else.
    """
    longest = 0
    with contextlib.suppress(OSError):
        for thread in os.scandir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError, ValueError, IndexError):
                longest = max(longest, int(_head(f"{thread.path}/schedstat").split()[1]))
    return longest / 1e9


def start_of(pid: int | str) -> str:
    """Return the kernel's start time, which with the pid identifies one process; "" if there is none."""
    try:
        return _stat(pid)[19]
    except (OSError, ValueError, IndexError):
        return ""


def is_there(pid: str, start: str) -> bool:
    """Tell if this very process is still running."""
    try:
        fields = _stat(pid)
        return fields[19] == start and fields[0] not in "ZX"
    except (OSError, ValueError, IndexError):
        return False


def _stat(pid: int | str) -> list[str]:
    """Return the fields after the name, starting with the state; the name may contain any text."""
    return _head(f"/proc/{int(pid)}/stat").rpartition(")")[2].split()


def _head(path: str, size: int = 1024) -> str:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(fd, size).decode(errors="replace")
    finally:
        os.close(fd)
