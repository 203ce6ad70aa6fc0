"""The kernel's log as `dmesg -r` prints it, with the collector's first and last line.

What a user can bring into it: the kernel writes the name of a process, at most 15 characters of any kind, at the start
of a record ("NAME[4711]: segfault at ...", "NAME invoked oom-killer: ..."), and names of files further on. So a form
counts only from a record's start, with more than 15 fixed characters before anything that may vary freely, and only in
the kernel's own facility, at the level at which that form is written.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from health.api import Builtin, Unreadable

KERNEL_LOG = Builtin("kernel_log", evidence=True)
NAME_MAX = 15
WARNING = 4

_FIRST = re.compile(r"# kernel log, now=(\d+\.\d+)")
_LINE = re.compile(r"\[\s*(\d+\.\d+)\] ?(?:<(\d+)> )?(.*)")
_LAST = re.compile(r"# end: (\d+) lines")
# How records go on that start with a process's name. They decide nothing but whether an odd line is worth a word.
_OF_A_PROCESS = re.compile(
    r".{0,15}?(?:\[\d+\]| \(\d+\)|/\d+)[: ]|.{0,15}?(?: invoked oom-killer: |: page allocation |: attempt to access )"
)


@dataclass(frozen=True, slots=True)
class Line:
    at: float
    text: str
    # Facility * 8 + level; None in a recording of an older form, which does not tell.
    priority: int | None = None

    def from_kernel(self, level: int = WARNING) -> bool:
        """Written by the kernel itself, at this level or a graver one."""
        return self.priority is None or self.priority <= level

    @property
    def starts_with_a_process(self) -> bool:
        return _OF_A_PROCESS.match(self.text) is not None


@dataclass(frozen=True, slots=True)
class Log:
    """Times are seconds since boot, so that a clock that is set does not move the cursor."""

    now: float
    lines: tuple[Line, ...]

    def since(self, cursor: float) -> tuple[Line, ...]:
        return tuple(line for line in self.lines if line.at > cursor)


def parse(text: str) -> Log:
    rows = text.splitlines()
    first = _FIRST.fullmatch(rows[0]) if rows else None
    last = _LAST.fullmatch(rows[-1]) if rows else None
    if first is None or last is None:
        raise Unreadable("the kernel log is cut, or is none")
    lines = []
    for row in rows[1:-1]:
        match = _LINE.match(row)
        if match is None:
            raise Unreadable(f"kernel log: no time in {row[:80]!r}")
        lines.append(Line(float(match[1]), match[3], None if match[2] is None else int(match[2])))
    if len(lines) != int(last.group(1)):
        raise Unreadable(f"kernel log: {last.group(1)} lines announced, {len(lines)} there")
    return Log(float(first.group(1)), tuple(lines))
