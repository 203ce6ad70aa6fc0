"""Files of the active checks: what each check needs (read by the controller), and its last result on this node.

A file of `active.d` says `NEEDS = {"nodes": 2, "minutes": 2, "period_s": 86400}`. The controller reads this literal
without running the file, and plans jobs by it; the check's own code runs on the nodes only. There, jobs of the user
slurm write one record for each check. Root reads the records: only plain files of a bounded size and number.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeGuard

from gitsync.errors import GitsyncError
from ground.errors import nearest
from ground.files import read_plain
from ground.metrics import family
from health.api import Capture, Result

ACTIVE = "active.d"
LARGEST_FILE = 256 * 1024
MOST_NODES, MOST_MINUTES = 2, 10


@dataclass(frozen=True, slots=True)
class Needs:
    # 1: each node by itself; 2: pairs of nodes.
    nodes: int = 1
    # The job's time limit.
    minutes: int = 2
    period_s: int = 86400


@dataclass(frozen=True, slots=True)
class ActiveChecks:
    checks: Mapping[str, Needs]
    # File -> why it cannot be planned.
    broken: Mapping[str, str]


def list_active_checks(tree: Path) -> ActiveChecks:
    checks: dict[str, Needs] = {}
    broken: dict[str, str] = {}
    directory = tree / ACTIVE
    for path in sorted(directory.glob("[!._]*.py")) if directory.is_dir() else []:
        try:
            checks[path.stem] = read_needs(path)
        except GitsyncError as error:
            broken[path.stem] = str(error)
    return ActiveChecks(checks, broken)


def read_needs(path: Path) -> Needs:
    try:
        with path.open("rb") as file:
            tree = ast.parse(file.read(LARGEST_FILE))
    except (OSError, ValueError, SyntaxError, RecursionError, MemoryError) as error:
        raise GitsyncError("plan an active check", f"{type(error).__name__}: {error}", file=path) from error
    for statement in tree.body:
        if isinstance(statement, ast.Assign) and [ast.unparse(target) for target in statement.targets] == ["NEEDS"]:
            try:
                return _needs(ast.literal_eval(statement.value), path)
            except (ValueError, TypeError, RecursionError, MemoryError) as error:
                raise _invalid(f"wanted a literal mapping: {error}", path) from error
    raise _invalid('wanted a line like NEEDS = {"nodes": 1, "minutes": 2, "period_s": 86400}', path)


def _invalid(reason: str, path: Path, field: str = "NEEDS", hint: str = "") -> GitsyncError:
    return GitsyncError("plan an active check", reason, file=path, field=field, hint=hint)


def _needs(data: object, path: Path) -> Needs:
    if not isinstance(data, dict):
        raise _invalid(f"wanted a mapping, not {data!r}", path)
    field_names = [field.name for field in fields(Needs)]
    for key, value in data.items():
        if key not in field_names:
            raise _invalid(f"unknown key {key!r}", path, hint=nearest(str(key), field_names) or "")
        most = {"nodes": MOST_NODES, "minutes": MOST_MINUTES, "period_s": 366 * 86400}[key]
        least = 60 if key == "period_s" else 1
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise _invalid(f"wanted a number from {least} to {most}, not {value!r}", path, f"NEEDS.{key}")
    return Needs(**data)


# The last results on this node.
DIRECTORY = Path("/var/lib/minivm/active")
MOST_RECORDS, LARGEST_RECORD = 100, 64 * 1024
# Largest time and number of a sample.
LARGEST_NUMBER = 1e11


def records(directory: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield each check's record; an empty one for a file that is none."""
    for path in sorted(directory.glob("[!.]*.json"))[:MOST_RECORDS]:
        try:
            data = json.loads(read_plain(path, LARGEST_RECORD) or b"{}")
        except (ValueError, RecursionError):
            data = {}
        yield path.stem, data if isinstance(data, dict) else {}


def active_results(directory: Path = DIRECTORY) -> Capture:
    """Print the last result of each active check as one line of JSON; a file that is none shows as `null`."""
    lines = [json.dumps({**data, "check": name} if data else None) for name, data in records(directory)]
    return Capture("\n".join([f"active results {len(lines)}", *lines, "end", ""]))


def active_summary(directory: Path = DIRECTORY) -> Mapping[str, tuple[int, bool]]:
    """Return when each active check last passed or failed here, and if it passed."""
    return {
        name: (int(data["at"]), data["result"] == Result.OK)
        for name, data in records(directory)
        if data.get("result") in (Result.OK, Result.PROBLEM) and _is_number(data.get("at"))
    }


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
    return isinstance(value, int | float) and 0 <= value < LARGEST_NUMBER
