"""Parser of the kernel's log in the format of `dmesg -r`, with the collector's first and last line.

Users can put text into it: the kernel writes the name of a process, at most 15 characters of any kind, at the start of
a record ("NAME[4711]: segfault at ...", "NAME invoked oom-killer: ..."), and file names further on. So a pattern counts
only from a record's start, with more than 15 fixed characters before any variable part, and only in the kernel's own
facility, at the level at which that message is written.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from health.api import Builtin, Unreadable

KERNEL_LOG = Builtin("kernel_log", evidence=True)
WARNING = 4

_FIRST = re.compile(r"# kernel log, now=(\d+\.\d+)")
_LINE = re.compile(r"\[\s*(\d+\.\d+)\] ?(?:<(\d+)> )?(.*)")
_LAST = re.compile(r"# end: (\d+) lines")
# Continuations of records that start with a process's name. They only decide if an odd line is worth reporting.
_OF_A_PROCESS = re.compile(
    r".{0,15}?(?:\[\d+\]| \(\d+\)|/\d+)[: ]|.{0,15}?(?: invoked oom-killer: |: page allocation |: attempt to access )"
)


@dataclass(frozen=True, slots=True)
class Line:
    at: float
    text: str
    # Facility * 8 + level; None in a recording of an older form without it.
    priority: int | None = None

    def from_kernel(self, level: int = WARNING) -> bool:
        """Tell if the kernel wrote it, at this level or a more severe one."""
        return self.priority is None or self.priority <= level

    @property
    def starts_with_a_process(self) -> bool:
        return _OF_A_PROCESS.match(self.text) is not None


@dataclass(frozen=True, slots=True)
class KernelLog:
    """A parsed log. Times are seconds since boot, so that setting the clock does not move the cursor."""

    now: float
    lines: tuple[Line, ...]

    def since(self, cursor: float) -> tuple[Line, ...]:
        return tuple(line for line in self.lines if line.at > cursor)


def parse(text: str) -> KernelLog:
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
    return KernelLog(float(first.group(1)), tuple(lines))
