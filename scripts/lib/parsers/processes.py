"""Parser of the collector's list of processes."""

from __future__ import annotations

import re
from dataclasses import dataclass

from health.api import Builtin, Unreadable

PROCESSES = Builtin("processes")
WAITING = Builtin("waiting")
# Accounts of the image's own daemons: slurm, munge, mysql; Debian's are below 1000.
SERVICES = range(64030, 64033)
PEOPLE_FROM = 1000

_LINE = re.compile(r"(\d+) (\d+) (\d+) ([A-Za-z]) (\d+) (\d+) (.*)")
_WAITS = re.compile(r"(\d+) (\d+) (\d+) (\d+) (yes|no) (.*)")
_STEP = re.compile(r"slurmstepd: \[(\d+)\.(\w+)\]")


@dataclass(frozen=True, slots=True)
class ListedProcess:
    pid: int
    start: int
    parent: int
    state: str
    age_s: int
    uid: int
    command: str

    @property
    def key(self) -> str:
        """Identify a process: a pid alone is reused."""
        return f"{self.pid}/{self.start}"


@dataclass(frozen=True, slots=True)
class Waiting:
    """A process that waits in the kernel."""

    pid: int
    start: int
    uid: int
    # Context switches so far: a process that hangs makes no more.
    switches: int
    killed: bool
    command: str

    @property
    def key(self) -> str:
        return f"{self.pid}/{self.start}"


def _rows(text: str, heading: str, form: re.Pattern[str]) -> list[tuple[str, ...]]:
    rows = text.splitlines()
    last = re.fullmatch(r"# end: (\d+) processes", rows[-1]) if rows else None
    if last is None or not rows[0].startswith(f"# {heading}: "):
        raise Unreadable("the list of processes is cut, or is none")
    groups = []
    for row in rows[1:-1]:
        match = form.fullmatch(row)
        if match is None:
            raise Unreadable(f"{heading}: {row[:80]!r}")
        groups.append(match.groups())
    if len(groups) != int(last[1]):
        raise Unreadable(f"{heading}: lines are missing")
    return groups


def parse(text: str) -> tuple[ListedProcess, ...]:
    listed = []
    for pid, start, parent, state, age, uid, command in _rows(text, "processes", _LINE):
        listed.append(ListedProcess(int(pid), int(start), int(parent), state, int(age), int(uid), command))
    if not listed:
        raise Unreadable("the list of processes is cut, or is none")
    return tuple(listed)


def waiting(text: str) -> tuple[Waiting, ...]:
    return tuple(
        Waiting(int(pid), int(start), int(uid), int(switches), killed == "yes", command)
        for pid, start, uid, switches, killed, command in _rows(text, "waiting", _WAITS)
    )


def is_users(process: ListedProcess) -> bool:
    return process.uid >= PEOPLE_FROM and process.uid not in SERVICES


def jobs(processes: tuple[ListedProcess, ...]) -> set[str]:
    """Return jobs with a step on this node, except the extern step, which lives before and after the work."""
    # Any user may name a process so; slurmstepd itself is root's.
    steps = (_STEP.match(process.command) for process in processes if process.uid == 0)
    return {step.group(1) for step in steps if step and step.group(2) not in {"extern", "4294967292"}}
