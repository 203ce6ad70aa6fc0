"""The pin file: a person's request that the node stays on one commit until the file is removed."""

from __future__ import annotations

import json

from gitsync.layout import ZERO, Layout, is_commit
from ground.files import write_whole


def read_pin(layout: Layout) -> str | None:
    """Return the pinned commit or `zero`; None without a pin, or when the file is damaged."""
    try:
        commit = json.loads(layout.pin.read_text())["commit"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return commit if isinstance(commit, str) and (is_commit(commit) or commit == ZERO) else None


def write_pin(layout: Layout, commit: str, now: float) -> None:
    write_whole(layout.pin, json.dumps({"commit": commit, "at": now}) + "\n")
