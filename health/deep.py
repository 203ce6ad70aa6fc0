"""Summary of this boot's deep checks, in one file.

The pod publishes it as a condition (init/helpers/conditions.py), by which the fleet takes a machine back after a
reboot. The file also records that the checks are not wanted or are running, so that a restarted process knows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

from ground.errors import one_line
from ground.files import read_json, write_json
from health.verdict import Result, Verdict

TEXT_LIMIT = 240


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

    def settled(self, boot_id: str) -> bool:
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


def write(path: Path, summary: DeepSummary) -> None:
    with contextlib.suppress(OSError):
        # The parent directory belongs to root alone, whichever process creates it.
        path.parent.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_json(path, asdict(summary))


def read(path: Path) -> DeepSummary | None:
    """Read the file; None if it is missing or unreadable, which means that nothing is known."""
    data = read_json(path)
    try:
        return DeepSummary(str(data["boot_id"]), DeepState(str(data["state"])), int(data["ran"]), str(data["said"]))
    except (KeyError, ValueError, TypeError, OverflowError):
        return None


def runs(path: Path, boot_id: str) -> bool:
    state = read(path)
    return state is not None and state.state is DeepState.RUNNING and state.boot_id == boot_id


def _line(text: str) -> str:
    return one_line(text)[:TEXT_LIMIT].strip()
