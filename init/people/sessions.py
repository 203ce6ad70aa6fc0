"""End the processes of people who lost access, on a machine where people log in."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from init.people.spec import IDS

PROC = Path("/proc")
# A shell and its editor save what they can, after SIGHUP and again after SIGTERM; what is still there is killed.
PATIENCE = 3.0
ROUNDS = 20
UNUSED = 64998  # of the reserved ids: no process runs as it


def end(gone: Mapping[int, str], is_known: Callable[[int], bool], suspects: Collection[int] = ()) -> list[str]:
    """End everything that runs under these uids, except those that `is_known`; return the names.

    A chain of forks, each of which ends at once, may be in no look at /proc. So `suspects` are signalled unseen.
    """
    mortal = {uid for uid in gone if any(uid in ids for ids in IDS)}
    unseen = {uid for uid in mortal.intersection(suspects) if not is_known(uid)}
    uids = {uid for uid in mortal & _running().keys() if not is_known(uid)}
    if not uids:
        for uid in unseen:
            _kill_all(uid)
        return []
    for number in (signal.SIGHUP, signal.SIGTERM):
        _signal(uids, number)
        deadline = time.monotonic() + PATIENCE
        while uids & _running().keys() and time.monotonic() < deadline:
            time.sleep(0.1)
    for _ in range(ROUNDS):
        for uid in uids | unseen:
            _kill_all(uid)
        if not uids & _running().keys():
            break
        time.sleep(0.05)
    return sorted(gone[uid] for uid in uids - _running().keys())


def _kill_all(uid: int) -> None:
    """Kill all processes of the uid in one call, against which no fork can win, with that user's rights alone.

    The real user is an unused one, so the user cannot signal the child.
    """
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setresgid(UNUSED, UNUSED, UNUSED)
            os.setresuid(UNUSED, uid, UNUSED)
            if os.getresuid() == (UNUSED, uid, UNUSED):
                os.kill(-1, signal.SIGKILL)
        finally:
            os._exit(0)
    os.waitpid(child, 0)


def _running() -> dict[int, list[int]]:
    """Return the processes by their real and effective uids, without those that have ended."""
    processes: dict[int, list[int]] = {}
    for entry in PROC.iterdir():
        if not entry.name.isdecimal():
            continue
        with contextlib.suppress(OSError, ValueError):
            lines = dict(
                line.split(":", 1)
                for line in (entry / "status").read_text(errors="replace").splitlines()
                if ":" in line
            )
            if lines["State"].split()[0] not in ("Z", "X"):
                for uid in {int(uid) for uid in lines["Uid"].split()}:
                    processes.setdefault(uid, []).append(int(entry.name))
    return processes


def _signal(uids: set[int], number: signal.Signals) -> bool:
    """Signal all their processes; return whether there were any."""
    pids = [(pid, uid) for uid, pids in _running().items() if uid in uids for pid in pids]
    for pid, uid in pids:
        with contextlib.suppress(OSError):
            fd = os.pidfd_open(pid)
            try:
                if pid in _running_of(pid, uid):
                    signal.pidfd_send_signal(fd, number)
            finally:
                os.close(fd)
    return bool(pids)


def _running_of(pid: int, uid: int) -> list[int]:
    """Look again after the process was opened: its number may be another one's by then."""
    text = (PROC / str(pid) / "status").read_text(errors="replace")
    uids = next((line.split()[1:] for line in text.splitlines() if line.startswith("Uid:")), [])
    return [pid] if str(uid) in uids else []
