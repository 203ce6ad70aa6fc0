"""Select the checks of a round, and those that are due. Pure functions."""

from __future__ import annotations

from dataclasses import dataclass

from health.api import Check, Command, When
from health.verdict import Verdict

SLURM = frozenset({"scontrol", "sinfo", "squeue", "sacctmgr"})


@dataclass(frozen=True, slots=True)
class CheckSelection:
    """Selection of a round's checks: by occasion or by name."""

    when: When | None = None
    names: tuple[str, ...] | None = None
    only_due: bool = False
    without_slurm: bool = False

    def takes(self, check: Check, known: Verdict | None, now: float, boot: str) -> bool:
        if self.names is None:
            if self.when is not None and self.when not in check.when:
                return False
            # A deep check runs on request only, never because all checks are requested.
            if self.when is not When.DEEP and takes_the_machine(check, self.when):
                return False
        if self.without_slurm and asks_slurm(check):
            return False
        return not self.only_due or due(check.period_s, known, now, boot)


def takes_the_machine(check: Check, when: When | None) -> bool:
    """Tell if the check loads all hardware for minutes: a deep check, or one that runs by name only."""
    return when is When.DEEP or check.when <= {When.DEEP}


def asks_slurm(check: Check) -> bool:
    """Tell if the check queries Slurm.

    While slurmd waits for its health program it answers nothing, so both would wait.
    """
    return any(isinstance(source, Command) and source.argv[0] in SLURM for source in check.sources)


def due(period_s: float, known: Verdict | None, now: float, boot: str) -> bool:
    """Tell if a background round must run the check again; a little early rather than a round late."""
    return known is None or not known.fresh(now, boot) or now - known.at >= 0.9 * period_s
