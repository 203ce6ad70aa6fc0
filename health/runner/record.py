"""Records of a run: one JSON line, and the output of a script that failed. Both are bounded in size."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from ground.files import write_whole
from ground.metrics import family

LOG = "/var/log/minivm"
RUNS_LIMIT = 8 * 1024 * 1024
OUTPUTS_KEPT = 50
LOCK_ATTEMPTS = 10
LOCK_PAUSE = 0.05


def directory() -> Path:
    return Path(os.environ.get("MINIVM_LOG", LOG))


def _open(path: Path) -> int:
    """Open a log for root only, even an older file: a user who may read it could lock it and hold up every prolog."""
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    with contextlib.suppress(OSError):
        os.fchmod(fd, 0o600)
    return fd


def _locked(fd: int) -> bool:
    """Try briefly to take the lock; tell if it succeeded."""
    for attempt in range(LOCK_ATTEMPTS):
        if attempt:
            time.sleep(LOCK_PAUSE)
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
    return False


def append(record: Mapping[str, object]) -> bool:
    """Append one line to runs.jsonl; at its limit the file becomes runs.jsonl.1. Never fails a job."""
    line = (json.dumps(record, separators=(",", ":")) + "\n").encode()
    path = directory() / "runs.jsonl"
    try:
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        fd = _open(path)
    except OSError:
        return False
    try:
        # A line is one write at the end and needs no lock; only the rotation does.
        if os.fstat(fd).st_size + len(line) > RUNS_LIMIT and _locked(fd):
            # Another run may have rotated it while we waited for the lock; then this is the old file.
            with contextlib.suppress(OSError):
                if os.stat(path).st_ino == os.fstat(fd).st_ino:  # noqa: PTH116  # the pair of calls belongs together
                    path.rename(path.with_suffix(".jsonl.1"))
            newer = _open(path)
            os.close(fd)
            fd = newer
        os.write(fd, line)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


def keep_output(kind: str, script: str, job: str, text: str) -> str:
    """Return the path of the kept output, or ""."""
    folder = directory() / "scripts"
    stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
    path = folder / f"{stamp}-{kind}-{script}-{job or 'nojob'}-{os.getpid()}.log"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "w") as file:
            file.write(text)
        for old in sorted(folder.iterdir(), key=lambda entry: entry.name)[:-OUTPUTS_KEPT]:
            old.unlink(missing_ok=True)
    except OSError:
        return ""
    return str(path)


# Runs that the resident runner did not take, counted and reported once. Clients that see the file wait less.


NAME = "missed"


def tell(folder: Path, reason: str) -> None:
    """Count a run that the resident runner did not take; the first one after a reset reports the fault."""
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
    """Clear the pod's problem: the resident runner takes runs again."""
    from health.tell import tell as tell_the_pod

    tell_the_pod("", "runner")


def write_metrics(path: Path, lines: Iterable[str]) -> None:
    """Write lines of Prometheus' format; a file that cannot be written costs the metrics alone."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, "\n".join(lines) + "\n")


def missed_metric(count: int) -> list[str]:
    about = "Runs that the resident runner did not take since it started."
    return family("minivm_runner_missed_total", about, [({}, str(count))], "counter")
