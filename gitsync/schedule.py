"""Decide when a node fetches and when it may take a commit. The pod's name spreads nodes over time. Pure."""

from __future__ import annotations

import enum
import hashlib
from dataclasses import dataclass


def place(pod: str, purpose: str) -> float:
    """Map a pod's name to a fixed number in [0, 1).

    Different purposes give unrelated numbers: a canary is not always the first to fetch. Nothing is random: the same
    pod behaves the same every time, and a person can compute it.
    """
    digest = hashlib.sha256(f"{purpose}:{pod}".encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2.0**64


# A new cluster's git server may start after its nodes.
FIRST_RETRY_S = 2.0


def next_delay(pod: str, period: float, failures: int, backoff_max: float, *, published: bool = True) -> float:
    """Return the seconds until the next cycle.

    Nodes that start together must not fetch together: the pod's name changes the period by up to 10 %. After failures
    the period doubles up to `backoff_max`, spread over half of it, so that a server that recovers meets no wave. A node
    without a published commit begins with FIRST_RETRY_S.
    """
    if failures <= 0:
        return period * (0.9 + 0.2 * place(pod, "period"))
    first = max(period, 1.0) if published else min(max(period, 1.0), FIRST_RETRY_S)
    full = min(backoff_max, first * 2.0 ** min(failures - 1, 20))
    return full * (0.5 + 0.5 * place(pod, f"backoff-{failures}"))


def first_delay(pod: str, period: float, *, published: bool) -> float:
    """Return the seconds until the first cycle: within a period with published scripts, within 2 s without."""
    return place(pod, "first") * (period if published else min(2.0, period))


class Turn(enum.Enum):
    """A node's decision about a commit. WAIT ends by time, HOLD only when the ring answers or the ref moves."""

    TAKE = "take"
    WAIT = "wait"
    HOLD = "hold"


@dataclass(frozen=True, slots=True)
class RingView:
    """The ring's record of a commit: when the first node saw it, and on how many nodes it is good or failed."""

    first_seen: float | None
    good: int
    failed: int
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RingDecision:
    turn: Turn
    reason: str


def is_canary(pod: str, percent: float) -> bool:
    return place(pod, "ring") * 100 < percent


def ring_decision(
    pod: str, percent: float, delay: float, now: float, seen_here: float, ring: RingView | None, *, ring_asked: bool
) -> RingDecision:
    """Decide whether this node takes a commit now.

    While the ring does not answer, a node that is no canary waits: its last good scripts work, and taking an unknown
    commit everywhere without seeing the canaries is the failure that rings prevent.
    """
    if percent <= 0:
        return RingDecision(Turn.TAKE, "no rings")
    if is_canary(pod, percent):
        return RingDecision(Turn.TAKE, f"canary: in the first {percent:g} %")
    if ring_asked and ring is None:
        return RingDecision(Turn.HOLD, "the ring does not answer, so the canaries' results are unknown")
    if ring is not None and ring.failed:
        because = f": {ring.reasons[0]}" if ring.reasons else ""
        return RingDecision(Turn.HOLD, f"it failed on {ring.failed} nodes of the ring{because}")
    first = seen_here if ring is None or ring.first_seen is None else min(seen_here, ring.first_seen)
    if now < first + delay:
        return RingDecision(Turn.WAIT, f"after the canaries, in {first + delay - now:.0f} s")
    return RingDecision(Turn.TAKE, f"{delay:g} s after it was first seen")
