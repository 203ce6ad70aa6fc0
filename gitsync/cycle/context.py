"""Context object shared by the steps of one cycle, with its use of the ring and the quarantine."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from gitsync.errors import GitsyncError
from gitsync.repo.listing import Tip
from gitsync.repo.lock import HeldLock
from gitsync.schedule import RingView, Turn, ring_decision
from gitsync.settings import GitsyncSettings
from gitsync.state import GitsyncState, Quarantine, save_state


@dataclass(slots=True)
class Cycle:
    """Settings, lock, state and log of one running cycle: the only mutable object in it."""

    settings: GitsyncSettings
    lock: HeldLock
    state: GitsyncState
    live: str | None
    log: list[str] = field(default_factory=list)
    clock: Callable[[], float] = time.time

    def save(self) -> None:
        save_state(self.settings.layout.state, self.state)

    @contextlib.contextmanager
    def timed(self, step: str) -> Iterator[None]:
        started = time.monotonic()
        try:
            yield
        finally:
            self.state = self.state.took(step, time.monotonic() - started)


# The cycle's use of its ring: ask whether this node may take a commit, and report this node's result.
#
# The ring's client is imported late: it needs urllib, which nodes without a ring do not load.
def is_my_turn(cycle: Cycle, tip: Tip) -> bool:
    """Tell whether this node may take the commit now; if not, store the reason with the candidate."""
    settings, candidate = cycle.settings, cycle.state.candidate
    assert candidate is not None
    view: RingView | None = None
    if settings.ring_url and settings.canary_percent > 0:
        from gitsync import rings

        view = rings.ask(settings.ring_url, tip.commit)
    decision = ring_decision(
        settings.pod, settings.canary_percent, settings.ring_delay, cycle.clock(), candidate.seen, view,
        ring_asked=settings.ring_url is not None,
    )  # fmt: skip
    if decision.turn is not Turn.TAKE:
        cycle.state = cycle.state.waiting(replace(candidate, reason=decision.reason))
    return decision.turn is Turn.TAKE


def report_to_ring(cycle: Cycle, commit: str, *, ok: bool, reason: str = "") -> None:
    """Report this node's result with a commit to the ring, if there is one."""
    settings = cycle.settings
    if settings.ring_url:
        from gitsync import rings

        rings.send_result(settings.ring_url, settings.pod, commit, ok=ok, reason=reason, secret=settings.ring_secret)


def forward_reports(cycle: Cycle) -> None:
    """Forward to the ring what the runner reported about broken scripts."""
    settings = cycle.settings
    if any(settings.layout.reports.glob("*.json")):
        from gitsync import rings

        rings.forward_reports(settings.ring_url, settings.pod, settings.layout.reports, settings.ring_secret)


# Quarantine of refused commits: until the ref moves, or the settings that refused the commit change.
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
