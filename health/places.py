"""Where a node's health lives on disk, what hardware it has or was promised, and which checks are due."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from health.api import Check, Command
from health.verdict import HEALTH, VERDICTS, Verdict, health_index, health_state

SLURM = frozenset({"scontrol", "sinfo", "squeue", "sacctmgr"})
CAPSULES = "/var/log/minivm/capsules"


@dataclass(frozen=True, slots=True)
class Places:
    verdicts: Path = Path(VERDICTS)
    state: Path = Path(HEALTH)
    capsules: Path = Path(CAPSULES)

    @classmethod
    def from_environment(cls) -> Places:
        return cls(
            Path(os.environ.get("MINIVM_VERDICTS", VERDICTS)),
            health_state(),
            Path(os.environ.get("MINIVM_CAPSULES", CAPSULES)),
        )

    @property
    def index(self) -> Path:
        return health_index(self.state)

    def memory(self, check: str) -> Path:
        return self.state / "memory" / f"{check}.json"


def asks_slurm(check: Check) -> bool:
    """slurmd answers nobody while it waits for its own health program: a question of ours would wait for it in turn."""
    return any(isinstance(source, Command) and source.argv[0] in SLURM for source in check.sources)


def due(period_s: float, known: Verdict | None, now: float, boot: str) -> bool:
    """Whether a background round must run it again; a little early rather than a round late."""
    return known is None or not known.fresh(now, boot) or now - known.at >= 0.9 * period_s
