"""Quarantine of refused commits: until the ref moves, or the settings that refused the commit change."""

from __future__ import annotations

from gitsync.cycle.context import Cycle
from gitsync.cycle.ring import report_to_ring
from gitsync.errors import GitsyncError
from gitsync.state import Quarantine


def refuse(cycle: Cycle, oid: str, commit: str, step: str, error: GitsyncError) -> None:
    """Quarantine a commit and report it to the ring. The published tree stays."""
    reason = str(error)
    quarantine = Quarantine(oid, commit, step, reason, cycle.clock(), cycle.settings.policy())
    cycle.state = cycle.state.refused(quarantine)
    cycle.log.append(f"refused {commit[:12] or oid[:12]}: {reason}")
    cycle.save()
    report_to_ring(cycle, commit or oid, ok=False, reason=reason)


def leave_alone(cycle: Cycle, oid: str, commit: str, reason: str) -> None:
    """Quarantine a commit that a person rolled back from. An empty policy marks a person's decision."""
    cycle.state = cycle.state.left_alone(Quarantine(oid, commit, "rollback", reason, cycle.clock(), ""))


def is_quarantined(cycle: Cycle, oid: str) -> bool:
    """Tell whether `oid` is still quarantined: the ref has not moved and the refusing settings have not changed."""
    quarantine = cycle.state.quarantine
    if quarantine is None or quarantine.oid != oid:
        return False
    # A person's rollback has no policy: it ends only when the ref moves.
    return quarantine.policy in {"", cycle.settings.policy()}
