"""What rounds of checks leave on the node for one another and for the prolog: memories, the index, a lock.

All of it may be lost: a round goes on without it, and knows a little less.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from health.api import CheckModule, Hardware
from health.checks.judge import Setting
from health.places import Places
from health.verdict import write_json

ROUND_WAIT_S = 5.0
# How the verdicts on scripts that broke are called.
SCRIPTS = "scripts_"


def recall(places: Places, check: str, boot_id: str) -> Mapping[str, Any]:
    """What a check remembered since this boot."""
    try:
        data = json.loads(places.memory(check).read_bytes())
        return dict(data["state"]) if data["boot_id"] == boot_id else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def remember(places: Places, check: str, boot_id: str, state: Mapping[str, Any]) -> None:
    path = places.memory(check)
    if not state and not path.exists():
        return
    with contextlib.suppress(OSError):
        write_json(path, {"boot_id": boot_id, "state": dict(state)}, 0o600)


def write_index(
    places: Places,
    tree: Path,
    checks: Mapping[str, CheckModule],
    has: Mapping[Hardware, bool],
    setting: Setting,
    broken: Iterable[str] = (),
) -> None:
    """What the prolog needs to know about the checks without loading them. `broken`: those that could not be loaded:
    they are no checks now, and not gone either, or a mistake in a parser would end every drain of an earlier pod's."""
    listed = {
        name: {
            "when": sorted(module.CHECK.when),
            "period_s": module.CHECK.period_s,
            "applies": has[module.CHECK.hardware],
        }
        for name, module in sorted(checks.items())
    }
    index = {
        "commit": setting.commit,
        "tree": str(tree),
        "boot_id": setting.boot_id,
        "at": setting.now,
        "expect": dict(setting.expect),
        "checks": listed,
        "broken": sorted(broken),
    }
    with contextlib.suppress(OSError):
        write_json(places.index, index)


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
    for path in (places.memory(check), places.verdicts / f"{check}.json"):
        with contextlib.suppress(OSError):
            path.unlink()


def promised(places: Places) -> Mapping[str, str]:
    """The hardware that the pod was promised, as a round that had the pod's environment wrote it down."""
    try:
        return {str(key): str(value) for key, value in json.loads(places.index.read_bytes())["expect"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


@contextlib.contextmanager
def one_round(places: Places, *, patient: bool) -> Iterator[bool]:
    """Whether this round is alone; a prolog waits a little for that and then goes on: each file is published whole."""
    try:
        places.state.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(places.state / "round.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        yield True
        return
    try:
        yield _locked(fd, ROUND_WAIT_S if patient else 0.0)
    finally:
        os.close(fd)


def _locked(fd: int, wait_s: float) -> bool:
    deadline = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.02)
