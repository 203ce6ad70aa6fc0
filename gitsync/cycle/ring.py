"""The cycle's use of its ring: ask whether this node may take a commit, and report this node's result.

The ring's client is imported late: it needs urllib, which nodes without a ring do not load.
"""

from __future__ import annotations

from dataclasses import replace

from gitsync.cycle.context import Cycle
from gitsync.repo.listing import Tip
from gitsync.schedule import RingView, Turn, ring_decision


def is_my_turn(cycle: Cycle, tip: Tip) -> bool:
    """Tell whether this node may take the commit now; if not, store the reason with the candidate."""
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


def report_to_ring(cycle: Cycle, commit: str, *, ok: bool, reason: str = "") -> None:
    """Report this node's result with a commit to the ring, if there is one."""
    settings = cycle.settings
    if settings.ring_url:
        from gitsync.rings import client

        client.send_result(settings.ring_url, settings.pod, commit, ok=ok, reason=reason, secret=settings.ring_secret)


def forward_reports(cycle: Cycle) -> None:
    """Forward to the ring what the runner reported about broken scripts."""
    settings = cycle.settings
    if any(settings.layout.reports.glob("*.json")):
        from gitsync.rings import client

        client.forward_reports(settings.ring_url, settings.pod, settings.layout.reports, settings.ring_secret)
