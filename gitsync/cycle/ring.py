"""The cycle and its ring: whether it is this node's turn to take a commit, and this node's own word on one.

The client costs an import of urllib, which only nodes with a ring pay for.
"""

from __future__ import annotations

from dataclasses import replace

from gitsync.cycle.context import Cycle
from gitsync.repo.listing import Tip
from gitsync.schedule import RingView, Turn, ring_decision


def is_my_turn(cycle: Cycle, tip: Tip) -> bool:
    """Whether this node's ring takes the commit now; the reason is kept with the candidate where not."""
    settings, candidate = cycle.settings, cycle.state.candidate
    assert candidate is not None
    view: RingView | None = None
    if settings.ring_url and settings.canary_percent > 0:
        from gitsync.rings import client

        view = client.ask(settings.ring_url, tip.commit)
    decision = ring_decision(
        settings.pod, settings.canary_percent, settings.ring_delay, cycle.clock(), candidate.seen, view,
        ring_asked=settings.ring_url is not None,
    )  # fmt: skip
    if decision.turn is not Turn.TAKE:
        cycle.state = cycle.state.waiting(replace(candidate, reason=decision.reason))
    return decision.turn is Turn.TAKE


def tell_ring(cycle: Cycle, commit: str, *, ok: bool, reason: str = "") -> None:
    settings = cycle.settings
    if settings.ring_url:
        from gitsync.rings import client

        client.tell(settings.ring_url, settings.pod, commit, ok=ok, reason=reason, secret=settings.ring_secret)


def pass_on_reports(cycle: Cycle) -> None:
    """What the runner has left about broken scripts."""
    settings = cycle.settings
    if any(settings.layout.reports.glob("*.json")):
        from gitsync.rings import client

        client.pass_on(settings.ring_url, settings.pod, settings.layout.reports, settings.ring_secret)
