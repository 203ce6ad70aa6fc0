"""Parser of `df -P`: how full each local file system is."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from health.api import Context, Finding, Unreadable, ok, problem

_ROW = re.compile(r"^(\S.*?)\s+(\d+)\s+(\d+)\s+(-?\d+)\s+(\d+)%\s+(/.*)$")
# A file system without the counted unit: efivarfs and fuse mounts have no blocks, btrfs and vfat no inodes.
_NONE = re.compile(r"^\S.*\s0\s+0\s+0\s+-\s+/")


@dataclass(frozen=True, slots=True)
class Used:
    path: str
    device: str
    percent: int
    free: int


def parse(text: str, heading: str) -> list[Used]:
    rows = text.splitlines()
    if not any(row.startswith("Filesystem") and heading in row for row in rows):
        raise Unreadable(f"df -P: no heading {heading!r}")
    rows_used = []
    for row in rows:
        if not row.strip() or row.startswith(("Filesystem", "df: ")) or _NONE.match(row):
            continue
        match = _ROW.match(row)
        if match is None:
            raise Unreadable(f"df: {row[:80]!r}")
        device, _, _, free, percent, path = match.groups()
        rows_used.append(Used(path, device, int(percent), int(free)))
    return rows_used


def judge(measured: list[Used], context: Context, what: str, sentence: str) -> Iterable[Finding]:
    """Judge by the thresholds WHAT_max_percent and WHAT_max_percent_by_path; `sentence` has {path} and {percent}.

    A user may fill any file system with write access: all count as user-made except those below `closed_to_users`.
    """
    limits = context.limits.default
    skipped = limits.strings("ignore")
    judged = [used for used in measured if not used.path.startswith(skipped)]
    if not judged:
        raise Unreadable("df shows no file system that is judged")
    most, paths = limits.number(f"{what}_max_percent"), limits.mapping(f"{what}_max_percent_by_path")
    closed = limits.strings("closed_to_users")
    for used in judged:
        limit = float(paths.get(used.path, most))
        text = sentence.format(path=used.path, percent=used.percent)
        if used.percent > limit:
            user_made = not any(used.path == path or used.path.startswith(f"{path}/") for path in closed)
            yield problem(text, subject=used.path, measured=used.percent, threshold=f"{limit:g}", user_made=user_made)
        else:
            yield ok(text, subject=used.path, measured=used.percent, threshold=f"{limit:g}")
