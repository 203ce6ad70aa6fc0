"""Free memory is in large pieces: without them huge pages and much of RDMA are slow."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from health.api import Check, Class, Context, Files, Finding, Inputs, Unreadable, UserMade, When, ok, problem

CHECK = Check(
    name="memory_fragmentation",
    about="free memory comes in large pieces",
    class_=Class.USER,
    period_s=300,
    when=frozenset({When.BACKGROUND}),
    sources=(Files("buddyinfo", ("/proc/buddyinfo",)), Files("meminfo", ("/proc/meminfo",), evidence=True)),
    thresholds="host",
    user_made=UserMade.YES,
)

_ROW = re.compile(r"^Node (\d+), zone +(\w+)((?: +\d+){8,})$")
PAGE_KB = 4


@dataclass(frozen=True, slots=True)
class Pieces:
    free_kb: int
    large_kb: int
    total_kb: int


def parse(inputs: Inputs) -> Pieces:
    free = large = rows = 0
    for line in inputs["buddyinfo"].splitlines():
        if not line.strip() or line.startswith("==> "):
            continue
        match = _ROW.match(line.strip())
        if match is None:
            raise Unreadable(f"/proc/buddyinfo: {line[:80]!r}")
        rows += 1
        for order, count in enumerate(int(part) for part in match.group(3).split()):
            size = count * PAGE_KB << order
            free += size
            # From 2 MiB up: order 9.
            large += size if order >= 9 else 0
    total = re.search(r"^MemTotal:\s+(\d+) kB$", inputs["meminfo"], re.MULTILINE)
    if not rows or total is None:
        raise Unreadable("/proc/buddyinfo or /proc/meminfo is cut")
    return Pieces(free, large, int(total.group(1)))


def judge(measured: Pieces, context: Context) -> Iterable[Finding]:
    limits = context.limits.default
    least = limits.number("large_pieces_min_percent")
    percent = 100 * measured.large_kb / max(1, measured.free_kb)
    message = f"{percent:.0f} % of the free memory is in pieces of 2 MiB and more"
    # With little free memory the share means nothing: the page cache fills a healthy node.
    enough = measured.free_kb > measured.total_kb * limits.number("fragmentation_judged_from_free_percent") / 100
    if enough and percent < least:
        return [problem(message, measured=f"{percent:.0f}", threshold=f"{least:g}")]
    return [ok(message, measured=f"{percent:.0f}", threshold=f"{least:g}")]
