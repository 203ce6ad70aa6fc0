"""End the processes of people who lost access, on a machine where people log in."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from init.people.spec import IDS

PROC = Path("/proc")
# A shell and its editor save what they can; then each round kills what is still there, and what it has forked.
PATIENCE = 3.0
ROUNDS = 20


def end(gone: Mapping[int, str], is_known: Callable[[int], bool]) -> list[str]:
    """End everything that runs under these uids, except those that `is_known`; return the names."""
    found = {uid for uid in _running() if uid in gone and any(uid in ids for ids in IDS)}
    uids = {uid for uid in found if not is_known(uid)}
    if not uids:
        return []
    _signal(uids, signal.SIGHUP)
    _signal(uids, signal.SIGTERM)
    deadline = time.monotonic() + PATIENCE
    while uids & _running().keys() and time.monotonic() < deadline:
        time.sleep(0.1)
    for _ in range(ROUNDS):
        if not _signal(uids, signal.SIGKILL):
            break
        time.sleep(0.05)
    return sorted(gone[uid] for uid in uids)


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
