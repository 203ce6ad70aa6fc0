"""End the processes of people who lost access, on a machine where people log in."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from init.people.spec import IDS
from init.pod.helper import run_as

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
    uids = {uid for uid in mortal & _running() if not is_known(uid)}
    for number in (signal.SIGHUP, signal.SIGTERM):
        for uid in uids:
            _signal(uid, number)
        deadline = time.monotonic() + PATIENCE
        while uids & _running() and time.monotonic() < deadline:
            time.sleep(0.1)
    left = uids | unseen
    for _ in range(ROUNDS):
        for uid in left:
            _signal(uid, signal.SIGKILL)
        left = uids and uids & _running()
        if not left:
            break
        time.sleep(0.05)
    return sorted(gone[uid] for uid in uids - left)


def _signal(uid: int, number: signal.Signals) -> None:
    """Signal all processes of the uid in one call, against which no fork can win, with that user's rights alone."""
    run_as(uid, UNUSED, lambda: os.kill(-1, number), unused=UNUSED)


def _running() -> set[int]:
    """Return the real and effective uids of all processes that have not ended."""
    uids: set[int] = set()
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
                uids.update(map(int, lines["Uid"].split()))
    return uids
