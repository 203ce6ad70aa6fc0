"""A commit that is refused stays refused, until the ref moves or what refused it has changed."""

from __future__ import annotations

from gitsync.cycle.context import Cycle
from gitsync.cycle.ring import tell_ring
from gitsync.errors import GitsyncError
from gitsync.state import Quarantine


def refuse(cycle: Cycle, oid: str, commit: str, step: str, error: GitsyncError) -> None:
    """What is live stays live; the fleet hears of it."""
    reason = str(error)
    quarantine = Quarantine(oid, commit, step, reason, cycle.clock(), cycle.settings.policy())
    cycle.state = cycle.state.refused(quarantine)
    cycle.log.append(f"refused {commit[:12] or oid[:12]}: {reason}")
    cycle.save()
    tell_ring(cycle, commit or oid, ok=False, reason=reason)


def leave_alone(cycle: Cycle, oid: str, commit: str, reason: str) -> None:
    """A person has stepped back from it. The mark of a person's decision is the empty policy."""
    cycle.state = cycle.state.left_alone(Quarantine(oid, commit, "rollback", reason, cycle.clock(), ""))


def is_quarantined(cycle: Cycle, oid: str) -> bool:
    """The ref has not moved, and what refused the commit has not changed."""
    quarantine = cycle.state.quarantine
    if quarantine is None or quarantine.oid != oid:
        return False
    # A person's rollback has no policy: only a moving ref ends it.
    return quarantine.policy in {"", cycle.settings.policy()}
