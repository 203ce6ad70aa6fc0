"""Jobs whose slurmstepd the kernel killed because the job's files in /dev/shm hold all of its memory.

Killing the job's processes does not free such files, so the kernel goes on to its slurmstepds. Nothing reports the end
of the job then: Slurm notices after many minutes, and runs it again.
"""

from __future__ import annotations

import contextlib
import os
import signal
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

SOCKETS = Path("/proc/net/unix")
LISTENS = "00010000"  # __SO_ACCEPTCON
BATCH, EXTERN = "4294967291", "4294967292"
LOOK_S = 5.0
DEAD_S = 15.0  # a slurmstepd that starts has no socket that listens yet
AGAIN_S = 60.0  # slurmctld did not answer
OVER_S = 3600.0  # the job has ended; slurmd removes its sockets when it pleases
# Of version 1 and of version 2, below /sys/fs/cgroup; slurmstepd's processes are inside.
JOB = ("memory/slurm*/uid_*/job_{}", "system.slice/*slurmstepd.scope/job_{}")
KILLS = ("memory.oom_control", "memory.events")
USED = (("memory.usage_in_bytes", "memory.limit_in_bytes"), ("memory.current", "memory.max"))
FULL = 0.5  # share of the limit that is still held after the kernel has killed the processes


@dataclass(frozen=True, slots=True)
class Dead:
    """A job whose script or step has lost its slurmstepd."""

    job: int
    alone: bool  # no slurmstepd of it lives here


def dead_jobs(spool: Path, node: str, sockets: Path = SOCKETS) -> dict[int, Dead]:
    """Find them by the sockets, which slurmstepd removes when it ends by itself.

    A job whose batch script still has its slurmstepd is left alone: the script's end is reported.
    """
    steps = _steps(spool, node)
    living = _listening(sockets) if steps else None
    if living is None:
        return {}
    dead = {}
    for job, names in steps.items():
        batch = {name for name, step in names.items() if step == BATCH}
        work = {name for name, step in names.items() if step != EXTERN}
        if work - living and not batch & living:
            dead[job] = Dead(job, alone=not living & set(names))
    return dead


def held_memory(job: int, root: Path) -> int:
    """Return the job's limit in bytes if it is still full after the kernel killed the job's processes, else 0."""
    for directory in _cgroups(job, root):
        for used, limit in USED:
            most = _number(directory / limit)
            is_full = most and _number(directory / used) >= FULL * most
            if is_full and any(_has_kills(Path(place)) for place, _, _ in os.walk(directory)):
                return most
    return 0


def reason(limit: int) -> str:
    return (
        f"minivm: the job was over its memory limit of {limit >> 20} MiB, and its files in /dev/shm count:"
        " submit with a larger --mem"
    )


def end_processes(job: int, root: Path) -> None:
    """Kill what is left in the job's cgroups: without a slurmstepd nothing else does, and no process leaves them."""
    for directory in _cgroups(job, root):
        for place, _, _ in os.walk(directory):
            for pid in _read(Path(place) / "cgroup.procs").split():
                with contextlib.suppress(OSError):
                    os.kill(int(pid), signal.SIGKILL)


def _cgroups(job: int, root: Path) -> list[Path]:
    return [directory for pattern in JOB for directory in root.glob(pattern.format(job))]


def _steps(spool: Path, node: str) -> Mapping[int, dict[str, str]]:
    """Map each job with sockets in slurmd's directory to the names of those, and each of them to its step."""
    steps: dict[int, dict[str, str]] = {}
    with contextlib.suppress(OSError):
        for entry in os.scandir(spool):
            job, dot, step = entry.name.removeprefix(f"{node}_").partition(".")
            is_socket = stat.S_ISSOCK(entry.stat(follow_symlinks=False).st_mode)
            if is_socket and entry.name.startswith(f"{node}_") and dot and job.isdecimal():
                steps.setdefault(int(job), {})[entry.name] = step.partition(".")[0]
    return steps


def _listening(sockets: Path) -> set[str] | None:
    """Return the names of the files on which a process listens; None: the kernel does not say."""
    lines = _read(sockets).splitlines()[1:]
    cells = (line.split(None, 7) for line in lines)
    return {row[7].rpartition("/")[2] for row in cells if len(row) == 8 and row[3] == LISTENS} if lines else None


def _has_kills(place: Path) -> bool:
    for name in KILLS:
        for line in _read(place / name).splitlines():
            word, _, count = line.partition(" ")
            if word == "oom_kill" and count.isdecimal() and int(count):
                return True
    return False


def _number(path: Path) -> int:
    text = _read(path).strip()
    return int(text) if text.isdecimal() else 0


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
