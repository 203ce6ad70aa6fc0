"""Interrupt a gitsync cycle at a named step, from outside: patch the function that begins or ends the step.

`python -m tests.process.gitsync_faults STEP ACTION` runs the loop with one step interrupted.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gitsync.cycle import run
from gitsync.layout import UNFINISHED
from gitsync.repo.reader import CommitReader
from gitsync.state import GitsyncState
from gitsync.tree import publish


@dataclass(frozen=True)
class Point:
    """A call that marks a step: the step ends before or after it. `only` selects among calls by their arguments."""

    owner: Any
    name: str
    after: bool = False
    only: Callable[..., bool] = lambda *_, **__: True


def unfinished(kind: str) -> Callable[..., bool]:
    """Select calls whose first or second argument is gitsync's temporary path of this kind."""

    def selects(*arguments: object, **_: object) -> bool:
        paths = [argument for argument in arguments[:2] if isinstance(argument, Path)]
        return any(path.name.startswith(f"{UNFINISHED}{kind}-") for path in paths)

    return selects


# In the order in which a cycle passes them.
POINTS = {
    "locked": Point(publish, "heal"),
    "healed": Point(GitsyncState, "record_attempt"),
    "fetched": Point(run, "_is_up_to_date"),
    "resolved": Point(CommitReader, "tip", after=True),
    "candidate-saved": Point(run, "is_my_turn"),
    "verified": Point(run, "admit", after=True),
    "tree-begun": Point(Path, "mkdir", after=True, only=unfinished("new")),
    "tree-half": Point(publish, "split_batches"),
    "tree-written": Point(publish, "check_links", after=True),
    "checked": Point(publish, "name_tree"),
    "tree-synced": Point(publish, "sync_tree", after=True),
    "tree-named": Point(publish, "name_tree", after=True),
    "link-made": Point(Path, "rename", only=unfinished("link")),
    "link-swapped": Point(publish, "point", after=True),
    "published-saved": Point(run, "report_to_ring"),
    "tree-unnamed": Point(Path, "rename", after=True, only=unfinished("old")),
    "lease-removed": Point(publish, "remove", only=unfinished("old")),
    "pruned": Point(publish, "remove_tree", after=True),
    "saved": Point(run, "forward_reports"),
}
STEPS = tuple(POINTS)


def act(action: str) -> None:
    """Do to this process what a fault does: `kill` it, `stop` it until it is continued, or fail with a `full` disk."""
    signals = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
    if action in signals:
        os.kill(os.getpid(), signals[action])
        return
    assert action == "full", action
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@contextlib.contextmanager
def interrupted(step: str, action: str) -> Iterator[None]:
    """Interrupt every cycle of this process, and of its forked children, at `step`."""
    point = POINTS[step]
    original = getattr(point.owner, point.name)

    @functools.wraps(original)
    def patched(*arguments: Any, **options: Any) -> Any:
        selected = point.only(*arguments, **options)
        if selected and not point.after:
            act(action)
        result = original(*arguments, **options)
        if selected and point.after:
            act(action)
        return result

    setattr(point.owner, point.name, patched)
    try:
        yield
    finally:
        setattr(point.owner, point.name, original)


if __name__ == "__main__":
    from gitsync.cycle import loop

    with interrupted(sys.argv[1], sys.argv[2]):
        sys.exit(loop.main())
