"""Files that rounds of checks leave on the node for later rounds and the prolog: memories and a lock.

All of them may be lost: a round continues without them and knows a little less.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from ground.files import locked, read_json, write_json
from health.index import read_index
from health.places import Places

ROUND_WAIT_S = 5.0
# Name prefix of the verdicts on broken scripts.
SCRIPTS = "scripts_"


def recall(places: Places, check: str, boot_id: str) -> Mapping[str, Any]:
    """Read what a check remembered since this boot."""
    data = read_json(places.memory(check))
    state = data.get("state")
    return state if data.get("boot_id") == boot_id and isinstance(state, dict) else {}


def remember(places: Places, check: str, boot_id: str, state: Mapping[str, Any]) -> None:
    path = places.memory(check)
    if not state and not path.exists():
        return
    with contextlib.suppress(OSError):
        write_json(path, {"boot_id": boot_id, "state": dict(state)}, 0o600)


def bury(places: Places, alive: Collection[str]) -> None:
    """Delete the verdicts of checks that are no longer in the tree.

    Keeps the verdicts of prolog and epilog scripts, which have other names.
    """
    for path in places.verdicts.glob("[!.]*.json"):
        name = path.stem
        if name not in alive and "." not in name and not name.startswith(SCRIPTS):
            forget(places, name)


def forget(places: Places, check: str) -> None:
    """Delete a check's verdict and its memory."""
    for path in (places.memory(check), places.verdict(check)):
        with contextlib.suppress(OSError):
            path.unlink()


def promised(places: Places) -> Mapping[str, str]:
    """Return the hardware promised to the pod, recorded by the last round that had the pod's environment."""
    index = read_index(places.index)
    return index.expect if index else {}


@contextlib.contextmanager
def one_round(places: Places, within: float | None) -> Iterator[bool]:
    """Hold the lock on rounds; yield whether this round is alone.

    A prolog waits briefly and then goes on: each file is published atomically. None: a check that loads the whole
    machine waits for the end of the round before it.
    """
    try:
        places.state.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(places.state / "round.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        yield True
        return
    try:
        alone = locked(fd, within or 0.0)
        if not alone and within is None:
            print("another round of checks runs; this one waits for its end", file=sys.stderr, flush=True)
            fcntl.flock(fd, fcntl.LOCK_EX)
            alone = True
        yield alone
    finally:
        os.close(fd)
