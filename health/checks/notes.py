"""What rounds of checks leave on the node for one another and for the prolog: memories, a lock.

All of it may be lost: a round goes on without it, and knows a little less.
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
# How the verdicts on scripts that broke are called.
SCRIPTS = "scripts_"


def recall(places: Places, check: str, boot_id: str) -> Mapping[str, Any]:
    """What a check remembered since this boot."""
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
    """A verdict dies with its check: what a commit has taken out of the tree says nothing any more.

    Scripts of prologs and epilogs have verdicts too, and names of their own.
    """
    for path in places.verdicts.glob("[!.]*.json"):
        name = path.stem
        if name not in alive and "." not in name and not name.startswith(SCRIPTS):
            forget(places, name)


def forget(places: Places, check: str) -> None:
    """Its verdict, and what it remembers."""
    for path in (places.memory(check), places.verdict(check)):
        with contextlib.suppress(OSError):
            path.unlink()


def promised(places: Places) -> Mapping[str, str]:
    """The hardware that the pod was promised, as a round that had the pod's environment wrote it down."""
    index = read_index(places.index)
    return index.expect if index else {}


@contextlib.contextmanager
def one_round(places: Places, within: float | None) -> Iterator[bool]:
    """Whether this round is alone; a prolog waits a little for that and then goes on: each file is published whole.
    None: what loads the whole machine waits for as long as the one before it takes."""
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
