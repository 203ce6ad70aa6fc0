"""Words for durations, sizes and signals, and text from users and Slurm made safe for a terminal."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterable

from ground.errors import one_line

LONGEST = 300
SHOWN = 4
FAR = 366 * 86400  # slurmctld counts a job without limit as one of a year or more


def safe(text: str, most: int = LONGEST) -> str:
    """Make text printable on one line and bound its length. Format characters (bidi, zero width) go too."""
    clean = " ".join(one_line(text[: most * 4]).split())
    return clean if len(clean) <= most else f"{clean[: most - 3]}..."


def duration(seconds: float) -> str:
    left = max(0, int(seconds))
    if left < 60:
        return f"{left} s"
    if left < 3600:
        return f"{left // 60} min"
    if left < 2 * 86400:
        minutes = left % 3600 // 60
        return f"{left // 3600} h" + (f" {minutes} min" if minutes else "")
    return f"{left // 86400} days"


def minutes(number: int | None) -> str:
    return "no limit" if number is None else duration(number * 60)


def size(mebibytes: float) -> str:
    if mebibytes >= 1 << 20:
        return f"{mebibytes / (1 << 20):.4g} TiB"
    return f"{mebibytes / 1024:.4g} GiB" if mebibytes >= 1024 else f"{mebibytes:.4g} MiB"


def moment(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def listed(names: Iterable[str], most: int = SHOWN) -> str:
    """List a few names and count the rest: a, b and 3 more."""
    kept = list(names)
    shown = ", ".join(safe(name, 80) for name in kept[:most])
    return f"{shown} and {len(kept) - most} more" if len(kept) > most else shown


def count(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"
