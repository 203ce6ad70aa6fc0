"""Read the needs of an active check from its file without running it.

A file of `active.d` says `NEEDS = {"nodes": 2, "minutes": 2, "period_s": 86400}`. The controller plans by this literal;
the check's own code runs on the nodes only.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from gitsync.errors import GitsyncError
from ground.errors import nearest

ACTIVE = "active.d"
LIMIT = 256 * 1024
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
            tree = ast.parse(file.read(LIMIT))
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
