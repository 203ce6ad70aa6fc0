"""Runs in a controller's pod: one life of slurmctld for each kill point, and what the next start makes of it.

    python3 killed_lives.py FIRST STEP fresh|grown

A life begins with a fresh state, or with one that has been saved twice, and takes a job; then slurmctld stops, which
saves everything. The preload killed_at.c kills it before its Nth change of the state. Prints one JSON line a life; ends
with the first life in which nothing was left to kill at.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

STATE, GROWN, ORDER = Path("/var/spool/slurmctld"), Path("/var/spool/grown"), Path("/tmp/killed-at")
MARK = Path("/tmp/was-killed")
WITHIN = 120.0


def ran(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(argv, capture_output=True, text=True, check=False, timeout=180)


def pings() -> bool:
    done = ran("scontrol", "ping")
    return done.returncode == 0


def started() -> bool:
    """Tell whether slurmctld, started by PID 1, answers before the deadline."""
    ran("minivm", "start", "slurmctld")
    end = time.monotonic() + WITHIN
    while not (answers := pings()) and time.monotonic() < end:
        time.sleep(0.02)
    return answers


def stopped() -> None:
    ran("minivm", "stop", "slurmctld")


def submitted(name: str) -> bool:
    return ran("sbatch", "--hold", "--job-name", name, "--output=/dev/null", "--wrap=true").returncode == 0


def listed() -> set[str]:
    return set(ran("squeue", "--noheader", "--format=%j").stdout.split())


def is_saved(name: str) -> bool:
    """Tell whether the valid state file has the job: job_state, or after a kill without one, the finished new one."""
    current, new, old = (STATE / f"job_state{end}" for end in ("", ".new", ".old"))
    file = current if current.exists() else new if old.exists() else None
    return file is not None and file.exists() and name.encode() in file.read_bytes()


def begin(kind: str) -> None:
    stopped()
    for path in STATE.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    if kind == "grown":
        ran("cp", "--archive", f"{GROWN}/.", str(STATE))


def grow() -> None:
    begin("fresh")
    for name in ("first", "second"):
        assert started() and submitted(name)
        stopped()
    shutil.rmtree(GROWN, ignore_errors=True)
    ran("cp", "--archive", str(STATE), str(GROWN))


def life(point: int, kind: str) -> dict[str, object]:
    begin(kind)
    name = f"kill{point:04d}"
    MARK.unlink(missing_ok=True)
    ORDER.write_text(str(point))
    came = started()
    taken = submitted(name)
    stopped()
    saved, files = is_saved(name), sorted(path.name for path in STATE.iterdir())
    ORDER.unlink(missing_ok=True)
    killed = MARK.exists()
    again = started()
    jobs = listed()
    last = "" if again else ran("minivm", "logs", "slurmctld").stdout[-800:]
    kept = {"first", "second"} <= jobs if kind == "grown" else True
    return {
        "point": point, "kind": kind, "killed": killed, "came": came, "taken": taken, "saved": saved, "ready": again,
        "kept": kept and (name in jobs or not saved), "files": files, "last": last,
    }  # fmt: skip


def main() -> None:
    point, step, kind = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    if kind == "grown":
        grow()
    while True:
        found = life(point, kind)
        print(json.dumps(found), flush=True)
        if not found["killed"]:
            return
        point += step


if __name__ == "__main__":
    main()
