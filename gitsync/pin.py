"""A person's word that a node is to stay on one commit, whatever the ref does: a file, until it is taken away."""

from __future__ import annotations

import json

from gitsync.layout import ZERO, Layout, is_commit
from ground.files import write_whole


def read_pin(layout: Layout) -> str | None:
    """The commit, or `zero`; None where nothing is pinned, or what is there names none."""
    try:
        commit = json.loads(layout.pin.read_text())["commit"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return commit if isinstance(commit, str) and (is_commit(commit) or commit == ZERO) else None


def write_pin(layout: Layout, commit: str, now: float) -> None:
    write_whole(layout.pin, json.dumps({"commit": commit, "at": now}) + "\n")
