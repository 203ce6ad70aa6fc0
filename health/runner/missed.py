"""Runs that the resident runner did not take: counted, and told once. The file tells clients too: they wait less."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

from ground.files import write_whole
from ground.metrics import family

NAME = "missed"


def tell(folder: Path, why: str) -> None:
    """One byte for a run; whoever makes the file is the first, and says it."""
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
        text = f"the runner of jobs' scripts did not take a run ({why}): each job starts a Python of its own"
        print(f"minivm: {text}", file=sys.stderr)
        from health.tell import tell as tell_the_pod

        tell_the_pod(text, "runner")


def forget(folder: Path) -> int:
    """How many there were; from here on the next is told again."""
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
        about = "Runs of jobs' scripts that the resident runner did not take, since it started."
        lines = family("minivm_runner_missed_total", about, [({}, str(count))], "counter")
        write_whole(path, "\n".join(lines) + "\n")
