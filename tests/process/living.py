"""Whether a process that a test left behind still runs."""

from __future__ import annotations


def alive(pid: int) -> bool:
    """A zombie is not alive: only whoever started it has still to look."""
    try:
        with open(f"/proc/{pid}/stat") as file:  # noqa: PTH123  # one line of proc
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
