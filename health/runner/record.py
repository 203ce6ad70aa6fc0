"""Records of the runner's runs: one JSON line for each, the output of failed scripts, and missed runs.

- `runs.jsonl`: one line for each prolog, epilog and round after a job (`entry`, `append`). It has the `seconds` of the
  run and of each script. The rest of a run's time went into its checks (`health.runner.gate`): `checks` counts those
  that ran because no verdict was fresh, and has the broker's answer, for which the run waits.
- `scripts/`: the output of each script that failed (`keep_output`), for the line's `evidence`.
- the file `missed`: a byte for each run that the resident runner did not take (`count_missed_run`). Clients that see it
  wait less. The first missed run is reported in the pod's status, until the resident runner takes runs again.

All files are bounded in size and for root only.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from ground.files import locked
from ground.metrics import family

LOG = "/var/log/minivm"
RUNS_LIMIT = 8 * 1024 * 1024
OUTPUTS_KEPT = 50
LOCK_WAIT_S = 0.5


def directory() -> Path:
    return Path(os.environ.get("MINIVM_LOG", LOG))


def _open(path: Path) -> int:
    """Open a log for root only, even an older file: a user who may read it could lock it and hold up every prolog."""
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    with contextlib.suppress(OSError):
        os.fchmod(fd, 0o600)
    return fd


def entry(
    kind: str, job: str, commit: str, result: str, began: float, *, scripts: Sequence[object] = (),
    checks: Mapping[str, object] | None = None, broken: Sequence[str] = (),
) -> dict[str, object]:  # fmt: skip
    """Build the record of a run that began at this time of the steady clock and ends now."""
    fields: dict[str, object] = {
        "at": round(time.time(), 3), "kind": kind, "job": job, "commit": commit, "result": result,
        "seconds": round(time.monotonic() - began, 4), "scripts": scripts,
    }  # fmt: skip
    return fields | ({"checks": checks} if checks else {}) | ({"broken": broken} if broken else {})


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
        if os.fstat(fd).st_size + len(line) > RUNS_LIMIT and locked(fd, LOCK_WAIT_S):
            # Another run may have rotated it during the wait for the lock; then this is the old file.
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
    """Write a failed script's output to a file of its own, and drop the oldest files; return the path, or ""."""
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


# Runs that the resident runner did not take.

MISSED = "missed"


def count_missed_run(folder: Path, reason: str) -> None:
    """Count a run that the resident runner did not take; the first one after a reset reports the fault."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(folder / MISSED, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError:
        return
    try:
        is_first = os.fstat(fd).st_size == 0
        os.write(fd, b".")
    except OSError:
        is_first = False
    finally:
        os.close(fd)
    if is_first:
        text = f"the resident runner did not take a run ({reason}): each job starts its own Python until it does"
        print(f"minivm: {text}", file=sys.stderr)
        from health.tell import tell

        tell(text, "runner")


def take_missed_count(folder: Path) -> int:
    """Return the count and reset it, so that the next missed run is reported again."""
    path = folder / MISSED
    try:
        count = path.stat().st_size
    except OSError:
        return 0
    with contextlib.suppress(OSError):
        path.unlink()
    return count


def report_recovery() -> None:
    """Clear the pod's problem: the resident runner takes runs again."""
    from health.tell import tell

    tell("", "runner")


def format_missed_metric(count: int) -> str:
    """Format the number of missed runs for Prometheus."""
    about = "Runs that the resident runner did not take since it started."
    return "\n".join(family("minivm_runner_missed_total", about, [({}, str(count))], "counter")) + "\n"
