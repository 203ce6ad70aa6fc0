"""Remains of a job that could not be killed, from /proc without files on which a hung process blocks the reader."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from health.broker.slurm_drains import Remains, Unkilled

PROC = Path("/proc")
LEAST_BYTES, LEAST_INODES = 64 << 20, 256
NAMED = 3  # in a reason, which is short
STEP = "slurmstepd"


def of_job(job: int, proc: Path = PROC) -> tuple[tuple[int, str], ...]:
    """Return pid and start of each process below the job's slurmstepds or in its cgroups."""
    parents: dict[int, int] = {}
    starts: dict[int, str] = {}
    steps, found = set(), set()
    for pid in _pids(proc):
        name, fields = _stat(proc / str(pid))
        if not fields:
            continue
        parents[pid], starts[pid] = int(fields[1]), fields[19]
        if name == STEP and _is_ours(proc / str(pid)):
            # Its own title, "slurmstepd: [46.batch]"; it does not hang.
            title = _read(proc / str(pid) / "cmdline")
            steps |= {pid} if f"[{job}." in title else set()
        elif f"/job_{job}/" in _read(proc / str(pid) / "cgroup"):
            found.add(pid)
    while more := {pid for pid, parent in parents.items() if parent in steps | found} - found - steps:
        found |= more
    return tuple((pid, starts[pid]) for pid in sorted(found - steps))


def look(unkilled: Unkilled | None, spool: Path, proc: Path = PROC) -> Remains:
    """Report which of its processes have not ended, and whether the spool directory has room."""
    hanging: list[str] = []
    for pid, start in sorted({*unkilled.processes, *of_job(unkilled.job, proc)} if unkilled else ()):
        if text := _living(proc / str(pid), start):
            hanging.append(f"pid {pid} {text}")
    shown = hanging[:NAMED] + ([f"and {len(hanging) - NAMED} more"] if len(hanging) > NAMED else [])
    return Remains(tuple(shown), _no_room(spool))


def _living(process: Path, start: str) -> str:
    """Return name, state and place in the kernel of a process that has not ended, or "".

    A zombie counts while one of its threads does not end.
    """
    name, fields = _stat(process)
    if not fields or fields[19] != start:
        return ""
    threads = [(_stat(process / "task" / str(tid))[1], tid) for tid in _pids(process / "task")]
    states = [(of[0], tid) for of, tid in threads if of and of[0] not in "ZX"]
    if not states:
        return ""
    state, tid = min(states, key=lambda item: (item[0] != "D", item[1]))
    place = _read(process / "task" / str(tid) / "wchan").strip()
    return f"({name}) state {state}" + (f" in {place}" if place not in ("", "0") else "")


def _is_ours(process: Path) -> bool:
    """Tell whether the process is root's: a user's may have any name."""
    with contextlib.suppress(OSError):
        return process.stat().st_uid == os.geteuid()
    return False


def _no_room(spool: Path) -> str:
    try:
        room = os.statvfs(spool)
    except OSError as error:
        return f"{spool}: {error.strerror}"
    if room.f_bavail * room.f_frsize < LEAST_BYTES:
        return f"{spool} has {room.f_bavail * room.f_frsize >> 20} MiB left"
    if room.f_files and room.f_favail < LEAST_INODES:
        return f"{spool} has {room.f_favail} inodes left"
    return ""


def _pids(directory: Path) -> list[int]:
    with contextlib.suppress(OSError):
        return [int(entry.name) for entry in os.scandir(directory) if entry.name.isdecimal()]
    return []


def _stat(process: Path) -> tuple[str, list[str]]:
    """Return the name, which may hold any text, and the fields after it: the state first."""
    head, _, tail = _read(process / "stat").rpartition(")")
    fields = tail.split()
    return (head.partition("(")[2], fields) if len(fields) > 19 else ("", [])


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
