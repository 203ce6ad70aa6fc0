"""The checks of the last round, in one small file: a prolog and the broker need not load them to know of them."""

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
    # Whether this node has the hardware that it is about.
    applies: bool
    # The kind of hardware that it is about; "any": the host.
    hardware: str = "any"


@dataclass(frozen=True, slots=True)
class Index:
    commit: str
    boot_id: str
    listed: Mapping[str, Listed]
    tree: str = ""
    at: float = 0.0
    # The hardware that the pod was promised, as a round that had the pod's environment wrote it down.
    expect: Mapping[str, str] = field(default_factory=dict)
    # Checks that could not be loaded: they are no checks now, and not gone either, or a mistake in a parser would end
    # every drain of an earlier pod's.
    broken: frozenset[str] = frozenset()

    @property
    def checks(self) -> frozenset[str]:
        """All of the tree's, also those that could not be loaded."""
        return self.broken.union(self.listed)

    @property
    def with_jobs(self) -> frozenset[str]:
        """The checks that run only where a job starts or ends."""
        return frozenset(name for name, listed in self.listed.items() if listed.when <= WITH_JOBS)

    @property
    def once(self) -> frozenset[str]:
        """The checks that a pod runs once at most, where nobody asks: no round repeats what they say."""
        return frozenset(name for name, listed in self.listed.items() if listed.when <= AT_MOST_ONCE)


def read_index(path: Path) -> Index | None:
    """None where no round has left one, or where it is damaged: then nothing is known of the checks."""
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
