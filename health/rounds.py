"""Files that rounds of checks leave for other processes: the index of the checks, and the summary of the deep checks.

By the index a prolog and the broker know the checks of the last round without loading them.

The pod publishes the summary of this boot's deep checks as a condition (init/helpers/conditions.py), by which the fleet
takes a machine back after a reboot. The file also records that the checks are not wanted or are running, so that a
restarted process knows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path

from ground.errors import one_line
from ground.files import read_json, write_json
from health.verdict import Result, Verdict

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


# The summary of the deep checks.

SUMMARY_LIMIT = 240


class DeepState(StrEnum):
    OK = "ok"
    PROBLEM = "problem"
    UNKNOWN = "unknown"  # the checks ran or could not run, and gave no answer
    RUNNING = "running"
    NOT_ASKED = "not asked"


@dataclass(frozen=True, slots=True)
class DeepSummary:
    boot_id: str
    state: DeepState
    ran: int = 0  # number of these checks that were about GPUs
    said: str = ""

    def is_settled(self, boot_id: str) -> bool:
        """Tell if this boot needs no further run. A run requested by name still happens."""
        return bool(boot_id) and self.boot_id == boot_id and self.state is not DeepState.RUNNING


def summarise(
    verdicts: Iterable[Verdict], broken: Iterable[str], boot_id: str, of_gpus: Collection[str]
) -> DeepSummary:
    """Summarise a whole round. Unknown is never ok, and a check that cannot be loaded counts as unknown.

    `of_gpus`: the checks about GPUs; they do not run where GPUs are gone.
    """
    ran = sorted(
        (verdict for verdict in verdicts if verdict.applies),
        key=lambda verdict: (-verdict.class_.weight, verdict.check),
    )
    gpus = sum(verdict.check in of_gpus for verdict in ran)
    problems = [verdict for verdict in ran if verdict.result is Result.PROBLEM]
    doubts = [f"{verdict.check}: {verdict.reason}" for verdict in ran if verdict.result is Result.UNKNOWN]
    doubts += [f"{name}: the check is broken" for name in sorted(broken)]
    if problems:
        text = "; ".join(
            f"{verdict.check}[{verdict.class_}]@{verdict.commit[:7] or 'none'} {verdict.reason}" for verdict in problems
        )
        return DeepSummary(boot_id, DeepState.PROBLEM, gpus, _line(text))
    if doubts:
        return DeepSummary(boot_id, DeepState.UNKNOWN, gpus, _line("; ".join(doubts)))
    return DeepSummary(boot_id, DeepState.OK, gpus, _line(" ".join(verdict.check for verdict in ran)))


def write_deep(path: Path, summary: DeepSummary) -> None:
    with contextlib.suppress(OSError):
        # The parent directory belongs to root alone, whichever process creates it.
        path.parent.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_json(path, asdict(summary))


def read_deep(path: Path) -> DeepSummary | None:
    """Read the file; None if it is missing or unreadable, which means that nothing is known."""
    data = read_json(path)
    try:
        return DeepSummary(str(data["boot_id"]), DeepState(str(data["state"])), int(data["ran"]), str(data["said"]))
    except (KeyError, ValueError, TypeError, OverflowError):
        return None


def deep_checks_run(path: Path, boot_id: str) -> bool:
    """Tell if deep checks run now, in this boot."""
    state = read_deep(path)
    return state is not None and state.state is DeepState.RUNNING and state.boot_id == boot_id


def _line(text: str) -> str:
    return one_line(text)[:SUMMARY_LIMIT].strip()
