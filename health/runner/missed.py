"""Runs that the resident runner did not take, counted and reported once. Clients that see the file wait less."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

from ground.files import write_whole
from ground.metrics import family

NAME = "missed"


def tell(folder: Path, reason: str) -> None:
    """Add one byte per run; the process that creates the file reports the fault."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(folder / NAME, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError:
        return
    try:
        first = os.fstat(fd).st_size == 0
        os.write(fd, b".")
    except OSError:
        first = False
    finally:
        os.close(fd)
    if first:
        text = f"the resident runner did not take a run ({reason}): each job starts its own Python until it does"
        print(f"minivm: {text}", file=sys.stderr)
        from health.tell import tell as tell_the_pod

        tell_the_pod(text, "runner")


def forget(folder: Path) -> int:
    """Return the count and reset it, so that the next missed run is reported again."""
    path = folder / NAME
    try:
        count = path.stat().st_size
    except OSError:
        return 0
    with contextlib.suppress(OSError):
        path.unlink()
    return count


def recovered() -> None:
    from health.tell import tell as tell_the_pod

    tell_the_pod("", "runner")


def write_metrics(path: Path, count: int) -> None:
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        about = "Runs that the resident runner did not take since it started."
        lines = family("minivm_runner_missed_total", about, [({}, str(count))], "counter")
        write_whole(path, "\n".join(lines) + "\n")
