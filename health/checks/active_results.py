"""Records of the active checks that ran on this node: text for a health check, and metrics.

Jobs of the user slurm write them, root reads them: only plain files of a bounded size and number.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeGuard

from ground.files import read_plain
from ground.metrics import family
from health.api import Capture

DIRECTORY = Path("/var/lib/minivm/active")
MOST, LARGEST = 100, 64 * 1024
# Largest time and number of a sample.
LIMIT = 1e11


def records(directory: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield each check's record; an empty one for a file that is none."""
    for path in sorted(directory.glob("[!.]*.json"))[:MOST]:
        try:
            data = json.loads(read_plain(path, LARGEST) or b"{}")
        except (ValueError, RecursionError):
            data = {}
        yield path.stem, data if isinstance(data, dict) else {}


def active_results(directory: Path = DIRECTORY) -> Capture:
    """Print the last result of each active check as one line of JSON; a file that is none shows as `null`."""
    lines = [json.dumps({**data, "check": name} if data else None) for name, data in records(directory)]
    return Capture("\n".join([f"active results {len(lines)}", *lines, "end", ""]))


def active_metrics(directory: Path = DIRECTORY) -> str:
    """Return time, failures, period and rate of each active check's last result; "" without one."""
    samples: dict[str, list[tuple[Mapping[str, str], str]]] = {"at": [], "failures": [], "period_s": []}
    rates: list[tuple[Mapping[str, str], str]] = []
    for name, data in records(directory):
        numbers = {key: data.get(key) for key in samples}
        if all(_is_number(value) for value in numbers.values()):
            for key, value in numbers.items():
                samples[key].append(({"check": name}, f"{value:.0f}"))
            state = data.get("state")
            rate = state.get("last_mbs") if isinstance(state, dict) else None
            if _is_number(rate):
                rates.append(({"check": name}, f"{rate * 1e6:.0f}"))
    if not samples["at"]:
        return ""
    prefix = "minivm_health_active"
    lines = [
        *family(f"{prefix}_at_seconds", "When an active check last had a result here.", samples["at"]),
        *family(f"{prefix}_failures", "Failures in a row of an active check.", samples["failures"]),
        *family(f"{prefix}_period_seconds", "Age from which the result is stale.", samples["period_s"]),
    ]
    if rates:
        lines += family("minivm_health_active_bytes_per_second", "Rate that an active check measured last.", rates)
    return "\n".join(lines) + "\n"


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and 0 <= value < LIMIT
