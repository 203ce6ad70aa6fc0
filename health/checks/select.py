"""Which of a tree's checks a round is about, and which of them are due. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from health.api import Check, Command, When
from health.verdict import Verdict

SLURM = frozenset({"scontrol", "sinfo", "squeue", "sacctmgr"})


@dataclass(frozen=True, slots=True)
class Asked:
    """Which of a tree's checks a round is about: those of a time, or those that are named."""

    when: When | None = None
    names: tuple[str, ...] | None = None
    only_due: bool = False
    without_slurm: bool = False

    def takes(self, check: Check, known: Verdict | None, now: float, boot: str) -> bool:
        if self.names is None:
            if self.when is not None and self.when not in check.when:
                return False
            # A deep check runs when it is asked for, and never because everything is.
            if self.when is not When.DEEP and takes_the_machine(check, self.when):
                return False
        if self.without_slurm and asks_slurm(check):
            return False
        return not self.only_due or due(check.period_s, known, now, boot)


def takes_the_machine(check: Check, when: When | None) -> bool:
    """Whether it loads all of the hardware, for minutes: a deep one, or one that runs by its name alone."""
    return when is When.DEEP or check.when <= {When.DEEP}


def asks_slurm(check: Check) -> bool:
    """slurmd answers nobody while it waits for its own health program: a question of ours would wait for it in turn."""
    return any(isinstance(source, Command) and source.argv[0] in SLURM for source in check.sources)


def due(period_s: float, known: Verdict | None, now: float, boot: str) -> bool:
    """Whether a background round must run it again; a little early rather than a round late."""
    return known is None or not known.fresh(now, boot) or now - known.at >= 0.9 * period_s
