"""Memory of the planner of active checks between turns, as JSON. A lost file only makes tests run again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from ground.files import read_plain, write_json
from health.active.culprit import Culprit, GroupResult, Part
from health.active.groups import GroupTest

LIMIT = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class MachineResult:
    """Last result of a machine in one check."""

    at: float = 0.0
    passed: bool = False
    # In a row, of single-node checks.
    failures: int = 0
    # Last attempt without a result; 0: none since the last result.
    tried: float = 0.0


@dataclass(frozen=True, slots=True)
class SweepState:
    """One round of group tests."""

    number: int
    started: float
    groups: tuple[GroupTest, ...]
    results: tuple[GroupResult, ...] = ()


@dataclass(frozen=True, slots=True)
class CheckState:
    machines: Mapping[str, MachineResult] = field(default_factory=dict)
    sweep: SweepState | None = None
    # Number of the next round, and when the last one began.
    number: int = 0
    began: float = 0.0
    culprits: tuple[Culprit, ...] = ()
    # Attempts in a row that gave no result and were not cancelled, and the time of the last one.
    broken: int = 0
    broken_at: float = 0.0


@dataclass(frozen=True, slots=True)
class PlanMemory:
    checks: Mapping[str, CheckState] = field(default_factory=dict)
    # Ended jobs that are taken in and that slurmctld still lists.
    taken: frozenset[str] = frozenset()

    def of(self, check: str) -> CheckState:
        return self.checks.get(check, CheckState())

    def with_check(self, check: str, state: CheckState) -> PlanMemory:
        return replace(self, checks={**self.checks, check: state})


def load(path: Path) -> PlanMemory:
    """Read the memory; empty if it is absent, damaged or of another release."""
    text = read_plain(path, LIMIT)
    try:
        data = json.loads(text or b"{}")
        checks = {str(name): _check(item) for name, item in data["checks"].items()}
        return PlanMemory(checks, frozenset(map(str, data["taken"])))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return PlanMemory()


def save(path: Path, memory: PlanMemory) -> None:
    write_json(path, {"checks": {name: asdict(item) for name, item in memory.checks.items()},
                      "taken": sorted(memory.taken)})  # fmt: skip


def _check(data: Mapping[str, object]) -> CheckState:
    fields = dict(data)
    machines = {str(name): MachineResult(**item) for name, item in fields.pop("machines").items()}  # type: ignore[attr-defined]  # caught
    sweep = fields.pop("sweep")
    culprits = tuple(Culprit(**{**item, "part": Part(item["part"])}) for item in fields.pop("culprits"))  # type: ignore[attr-defined]  # caught
    return CheckState(machines, _sweep(sweep) if sweep else None, culprits=culprits, **fields)  # type: ignore[arg-type]  # caught


def _sweep(data: Mapping[str, object]) -> SweepState:
    groups, results = data["groups"], data["results"]
    if not isinstance(groups, list) or not isinstance(results, list):
        raise TypeError("wanted lists")
    return SweepState(
        int(str(data["number"])),
        float(str(data["started"])),
        tuple(_test(item) for item in groups),
        tuple(GroupResult(_test(item["test"]), item["passed"] is True) for item in results),
    )


def _test(data: Mapping[str, object]) -> GroupTest:
    suspects, partners = data["suspects"], data["partners"]
    if not isinstance(suspects, list) or not isinstance(partners, list):
        raise TypeError("wanted lists")
    return GroupTest(tuple(map(str, suspects)), tuple(map(str, partners)))
