"""Index of the last round's checks, so that a prolog and the broker need not load the checks to know them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ground.files import read_json, write_json

WITH_JOBS = frozenset({"prolog", "epilog"})
AT_MOST_ONCE = frozenset({"boot", "deep"})


@dataclass(frozen=True, slots=True)
class Listed:
    when: frozenset[str]
    period_s: float
    # True if this node has the hardware that the check is about.
    applies: bool
    # The kind of hardware that the check is about; "any": the host.
    hardware: str = "any"


@dataclass(frozen=True, slots=True)
class Index:
    commit: str
    boot_id: str
    listed: Mapping[str, Listed]
    tree: str = ""
    at: float = 0.0
    # Hardware promised to the pod, as the last round with the pod's environment recorded it.
    expect: Mapping[str, str] = field(default_factory=dict)
    # Checks that could not be loaded. They still exist: a mistake in a parser must not end the drains of earlier pods.
    broken: frozenset[str] = frozenset()

    @property
    def checks(self) -> frozenset[str]:
        """All checks of the tree, including those that could not be loaded."""
        return self.broken.union(self.listed)

    @property
    def with_jobs(self) -> frozenset[str]:
        """Checks that run only when a job starts or ends."""
        return frozenset(name for name, listed in self.listed.items() if listed.when <= WITH_JOBS)

    @property
    def once(self) -> frozenset[str]:
        """Checks that a pod runs at most once unless requested: no round renews their verdicts."""
        return frozenset(name for name, listed in self.listed.items() if listed.when <= AT_MOST_ONCE)


def read_index(path: Path) -> Index | None:
    """Read the index; None if no round has left one or if it is damaged."""
    data = read_json(path)
    try:
        listed = {
            str(name): Listed(
                frozenset(map(str, facts["when"])),
                float(facts["period_s"]),
                facts["applies"] is True,
                str(facts.get("hardware", "any")),
            )
            for name, facts in data["checks"].items()
        }
        expect = {str(key): str(value) for key, value in data.get("expect", {}).items()}
        return Index(
            str(data["commit"]),
            str(data["boot_id"]),
            listed,
            str(data.get("tree", "")),
            float(data.get("at", 0.0)),
            expect,
            frozenset(map(str, data.get("broken", []))),
        )
    except (KeyError, TypeError, ValueError, AttributeError):
        return None


def write_index(path: Path, index: Index) -> None:
    data = asdict(index)
    data["checks"] = data.pop("listed")
    write_json(path, data)
