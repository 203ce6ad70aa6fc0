"""The collector's list of processes."""

from __future__ import annotations

import re
from dataclasses import dataclass

from health.api import Builtin, Unreadable

PROCESSES = Builtin("processes")
WAITING = Builtin("waiting")
# Accounts of the image's own daemons: slurm, munge, mysql; Debian's lie below 1000.
SERVICES = range(64030, 64033)
PEOPLE_FROM = 1000

_LINE = re.compile(r"(\d+) (\d+) (\d+) ([A-Za-z]) (\d+) (\d+) (.*)")
_WAITS = re.compile(r"(\d+) (\d+) (\d+) (\d+) (yes|no) (.*)")
_STEP = re.compile(r"slurmstepd: \[(\d+)\.(\w+)\]")


@dataclass(frozen=True, slots=True)
class Process:
    pid: int
    start: int
    parent: int
    state: str
    age_s: int
    uid: int
    command: str

    @property
    def key(self) -> str:
        """A pid alone is reused."""
        return f"{self.pid}/{self.start}"


@dataclass(frozen=True, slots=True)
class Waiting:
    """A process that waits in the kernel."""

    pid: int
    start: int
    uid: int
    # How often it has given up the processor so far: one that hangs does so no more.
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
    found = []
    for row in rows[1:-1]:
        match = form.fullmatch(row)
        if match is None:
            raise Unreadable(f"{heading}: {row[:80]!r}")
        found.append(match.groups())
    if len(found) != int(last[1]):
        raise Unreadable(f"{heading}: lines are missing")
    return found


def parse(text: str) -> tuple[Process, ...]:
    found = []
    for pid, start, parent, state, age, uid, command in _rows(text, "processes", _LINE):
        found.append(Process(int(pid), int(start), int(parent), state, int(age), int(uid), command))
    if not found:
        raise Unreadable("the list of processes is cut, or is none")
    return tuple(found)


def waiting(text: str) -> tuple[Waiting, ...]:
    return tuple(
        Waiting(int(pid), int(start), int(uid), int(switches), killed == "yes", command)
        for pid, start, uid, switches, killed, command in _rows(text, "waiting", _WAITS)
    )


def is_a_person_s(process: Process) -> bool:
    return process.uid >= PEOPLE_FROM and process.uid not in SERVICES


def jobs(processes: tuple[Process, ...]) -> set[str]:
    """Jobs that have a step on this node. The extern step is left out: it lives before and after the work."""
    # Anybody may call his process so; slurmstepd itself is root's.
    steps = (_STEP.match(process.command) for process in processes if process.uid == 0)
    return {step.group(1) for step in steps if step and step.group(2) not in {"extern", "4294967292"}}
