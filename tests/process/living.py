"""Check whether a process that a test left behind still runs."""

from __future__ import annotations


def alive(pid: int) -> bool:
    """Tell whether the process runs; a zombie does not: it only waits for its parent."""
    try:
        with open(f"/proc/{pid}/stat") as file:  # noqa: PTH123  # one line of proc
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
