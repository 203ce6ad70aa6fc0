"""End a hand-over of slurmd or sackd that hangs.

At a reconfigure the old process forks twice: the first child ends at once, the second becomes the new daemon and
reports when it serves. The old one waits for both without limit, and only then names the new main process to PID 1. If
either hangs (a lock that another thread held at the fork, an authentication daemon that is away), PID 1 follows the old
one for ever, which answers nobody or has no control any more. Slurm announces no hand-over, so look for processes that
only a hand-over starts: of the old one's session, command line and user, and younger. slurmctld always has such a one
(slurmscriptd), and is not looked at.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Collection, Iterable
from pathlib import Path

from init.pod.client import SOCKET, Client
from init.pod.helper import condition, log
from init.records import record

# For a hand-over, which takes a second. Where the successor hangs nobody answers slurmctld, which gives up the node and
# its jobs after SlurmdTimeout (the chart's: 120 s).
DEADLINE_S = 30.0
REMEMBERED_S = 600.0  # how long the pod's status shows it
EXIT_S = 2.0  # for the old process to exit once its successor is gone


@record(frozen=True, slots=True)
class Process:
    pid: int
    started: float  # seconds since the machine's boot
    session: int
    command: bytes
    user: bytes  # the Uid line: slurmd forks children that open a file for a user, on a file system that may hang

    def hands_over_to(self, other: Process) -> bool:
        alike = (other.session, other.command, other.user) == (self.session, self.command, self.user)
        return alike and other.pid != self.pid and other.started >= self.started


def look_up(pid: int, proc: Path = Path("/proc")) -> Process | None:
    """Describe a living process; None for one that has ended."""
    directory = proc / str(pid)
    with contextlib.suppress(OSError, ValueError, IndexError):
        values = (directory / "stat").read_text(errors="replace").rpartition(")")[2].split()
        status = (directory / "status").read_bytes().splitlines()
        user = next((line for line in status if line.startswith(b"Uid:")), b"")
        if values[0] not in "ZX":
            started = int(values[19]) / os.sysconf("SC_CLK_TCK")
            return Process(pid, started, int(values[3]), (directory / "cmdline").read_bytes(), user)
    return None


def processes_of(session: int) -> Iterable[int]:
    for name in filter(str.isdecimal, os.listdir("/proc")):  # noqa: PTH208 - names alone
        with contextlib.suppress(OSError):
            if os.getsid(int(name)) == session:
                yield int(name)


def find_hanging(main: int, now: float) -> list[Process]:
    """Return the processes of a hand-over that is overdue, the oldest first."""
    old = look_up(main)
    if old is None or not old.command:
        return []
    others = [other for pid in processes_of(old.session) if (other := look_up(pid)) and old.hands_over_to(other)]
    others.sort(key=lambda other: (other.started, other.pid))
    return others if others and now - others[0].started >= DEADLINE_S else []


def kill_all(processes: Iterable[Process]) -> None:
    """Kill them by pidfd: a number may belong to another process by now."""
    for process in processes:
        with contextlib.suppress(OSError):
            descriptor = os.pidfd_open(process.pid)
            try:
                if look_up(process.pid) == process:
                    signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            finally:
                os.close(descriptor)


def wait_for_exit(pid: int, seconds: float) -> bool:
    try:
        descriptor = os.pidfd_open(pid)
    except OSError:
        return True
    try:
        return bool(select.select([descriptor], [], [], seconds)[0])
    finally:
        os.close(descriptor)


def end_hanging(names: Collection[str], control: Path = SOCKET) -> None:
    """Restart the first of these services whose hand-over is overdue; jobs run on in their slurmstepd."""
    with Client(control) as client:
        for view in [view for view in client.snapshot().services if view.name in names]:
            # A first start forks children too: one fetches the configuration.
            settled = view.pid and view.state != "starting"
            hanging = find_hanging(view.pid, time.clock_gettime(time.CLOCK_BOOTTIME)) if settled else []
            if hanging:
                pids = ", ".join(str(process.pid) for process in hanging)
                text = (
                    f"{view.name} (pid {view.pid}) did not hand over to its successor (pid {pids}) within"
                    f" {DEADLINE_S:g} s after a reconfigure, and was restarted; jobs run on"
                )
                log(text)
                condition(control, f"{view.name}-handover", text, expires=REMEMBERED_S)
                # The successor has the port and would keep it. Without it the old one exits, or serves on as before.
                kill_all(hanging)
                if not wait_for_exit(view.pid, EXIT_S):
                    client.request("restart", service=view.name, wait=False)
                return
