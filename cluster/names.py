"""Which clusters there are, whose each is, and that one command at a time changes it."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from cluster.errors import ClusterError
from cluster.pods import LABEL, STATE_LABEL


def saved(root: Path) -> set[str]:
    """Those that were brought up from this directory."""
    return {path.parent.name for path in root.glob("*/options.json")}


def labelled(api: Any) -> set[str]:
    """Those of which the engine has anything, wherever they were brought up."""
    filters = {"label": LABEL}
    having: list[dict[str, Any]] = [*api.containers(all=True, filters=filters), *api.networks(filters=filters)]
    having += api.volumes(filters=filters)["Volumes"] or []
    return {item["Labels"][LABEL] for item in having}


def hint(known: Iterable[str]) -> str:
    names = sorted(known)
    return f"there {'is' if len(names) == 1 else 'are'} {', '.join(names)}; --name chooses" if names else ""


def own(api: Any, name: str, state: Path, cannot: str) -> None:
    """The engine knows a cluster by its name alone, and two directories may have chosen one: keys, ports and files of
    each are in its own. One whose directory is gone is nobody's."""
    for item in api.containers(all=True, filters={"label": f"{LABEL}={name}"}):
        other = item["Labels"].get(STATE_LABEL, str(state))
        if other != str(state) and (Path(other) / "options.json").exists():
            raise ClusterError(cannot, f"a cluster {name} was brought up from another directory, its state is {other}",
                               hint="--name chooses another name; or go to that directory")  # fmt: skip


@contextlib.contextmanager
def alone(state: Path, cannot: str) -> Iterator[None]:
    """While this lasts no other command changes the cluster. The lock is its directory, which `down` removes."""
    held = _lock(state, cannot)
    try:
        yield
    finally:
        if held is not None:
            os.close(held)


def _lock(state: Path, cannot: str) -> int | None:
    while True:
        try:
            held = os.open(state, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            return None  # nothing is there that a command could change
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(held), state.stat()):
                return held
        except BlockingIOError:
            os.close(held)
            raise ClusterError(cannot, f"another command changes the cluster {state.name} right now",
                               hint="wait for it, or end it with Ctrl-C") from None  # fmt: skip
        except FileNotFoundError:  # its `down` was faster
            pass
        os.close(held)
