"""The collector's list of processes."""

from __future__ import annotations

import re
from dataclasses import dataclass

from gitsync.health_api import Builtin, Unreadable

PROCESSES = Builtin("processes")

_LINE = re.compile(r"(\d+) (\d+) (\d+) ([A-Za-z]) (\d+) (\d+) (.*)")
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


def parse(text: str) -> tuple[Process, ...]:
    rows = text.splitlines()
    if len(rows) < 3 or not rows[0].startswith("# processes: ") or not re.fullmatch(r"# end: \d+ processes", rows[-1]):
        raise Unreadable("the list of processes is cut, or is none")
    found = []
    for row in rows[1:-1]:
        match = _LINE.fullmatch(row)
        if match is None:
            raise Unreadable(f"processes: {row[:80]!r}")
        pid, start, parent, state, age, uid, command = match.groups()
        found.append(Process(int(pid), int(start), int(parent), state, int(age), int(uid), command))
    if len(found) != int(rows[-1].split()[2]):
        raise Unreadable("processes: lines are missing")
    return tuple(found)


def jobs(processes: tuple[Process, ...]) -> set[str]:
    """Jobs that have a step on this node. The extern step is left out: it lives before and after the work."""
    steps = (_STEP.match(process.command) for process in processes)
    return {step.group(1) for step in steps if step and step.group(2) not in {"extern", "4294967292"}}
