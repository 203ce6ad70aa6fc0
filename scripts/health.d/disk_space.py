"""Room on the local file systems."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from gitsync.health_api import Check, Class, Command, Context, Finding, Inputs, Unreadable, When, ok, problem

CHECK = Check(
    name="disk_space",
    about="room on the local file systems",
    class_=Class.NODE,
    period_s=120,
    when=frozenset({When.PROLOG, When.BACKGROUND, When.EPILOG}),
    # -l: never ask a network file system, which may hang.
    sources=(Command("df", ("df", "-P", "-l", "-k"), deadline_s=5.0, accept=(0, 1), evidence=True),),
    thresholds="disk",
)

_ROW = re.compile(r"^(\S.*?)\s+(\d+)\s+(\d+)\s+(-?\d+)\s+(\d+)%\s+(/.*)$")


@dataclass(frozen=True, slots=True)
class Used:
    path: str
    device: str
    percent: int
    free_kib: int


def parse(inputs: Inputs) -> list[Used]:
    rows = inputs["df"].splitlines()
    if not any(row.startswith("Filesystem") and "1024-blocks" in row for row in rows):
        raise Unreadable("df -P -k: no heading")
    found = []
    for row in rows:
        if not row.strip() or row.startswith(("Filesystem", "df: ")):
            continue
        match = _ROW.match(row)
        if match is None:
            if re.match(r"^\S.*\s0\s+0\s+0\s+-\s+/", row):
                # A file system without blocks (efivarfs, a fuse mount).
                continue
            raise Unreadable(f"df: {row[:80]!r}")
        device, _, _, free, percent, path = match.groups()
        found.append(Used(path, device, int(percent), int(free)))
    return found


def judge(measured: list[Used], context: Context) -> Iterable[Finding]:
    limits = context.limits.default
    skipped = limits.strings("ignore")
    judged = [used for used in measured if not used.path.startswith(skipped)]
    if not judged:
        raise Unreadable("df shows no file system that is judged")
    most, paths = limits.number("space_max_percent"), limits.mapping("space_max_percent_by_path")
    for used in judged:
        limit = float(paths.get(used.path, most))
        said = f"{used.path} is {used.percent} % full"
        if used.percent > limit:
            yield problem(said, subject=used.path, measured=used.percent, threshold=f"{limit:g}")
        else:
            yield ok(said, subject=used.path, measured=used.percent, threshold=f"{limit:g}")
