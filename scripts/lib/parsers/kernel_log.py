"""The kernel's log as dmesg prints it, with the collector's first and last line."""

from __future__ import annotations

import re
from dataclasses import dataclass

from gitsync.health_api import Builtin, Unreadable

KERNEL_LOG = Builtin("kernel_log", evidence=True)

_FIRST = re.compile(r"# kernel log, now=(\d+\.\d+)")
_LINE = re.compile(r"\[\s*(\d+\.\d+)\] ?(.*)")
_LAST = re.compile(r"# end: (\d+) lines")


@dataclass(frozen=True, slots=True)
class Line:
    at: float
    text: str


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
        lines.append(Line(float(match.group(1)), match.group(2)))
    if len(lines) != int(last.group(1)):
        raise Unreadable(f"kernel log: {last.group(1)} lines announced, {len(lines)} there")
    return Log(float(first.group(1)), tuple(lines))
