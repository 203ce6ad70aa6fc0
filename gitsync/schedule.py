"""When a node asks, and when it may take a commit: decided from its pod's name, so that a fleet spreads. Pure."""

from __future__ import annotations

import enum
import hashlib
from dataclasses import dataclass


def place(pod: str, purpose: str) -> float:
    """A pod's fixed place in [0, 1). Another purpose gives an unrelated place: the canary is not always the first
    to ask. No randomness: the same pod does the same thing every time, and a person can compute it."""
    digest = hashlib.sha256(f"{purpose}:{pod}".encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2.0**64


def next_delay(pod: str, period: float, failures: int, backoff_max: float) -> float:
    """Seconds until the next cycle.

    A fleet that starts together must not ask together: the period is stretched or shrunk by up to 10 % by the pod's
    name. After failures it doubles up to the maximum, with a spread of half: the server that comes back meets no wave.
    """
    if failures <= 0:
        return period * (0.9 + 0.2 * place(pod, "period"))
    full = min(backoff_max, max(period, 1.0) * 2.0 ** min(failures - 1, 20))
    return full * (0.5 + 0.5 * place(pod, f"backoff-{failures}"))


def first_delay(pod: str, period: float, *, published: bool) -> float:
    """A node with last good scripts spreads its first question over a period; one with none asks within 2 s."""
    return place(pod, "first") * (period if published else min(2.0, period))


class Turn(enum.Enum):
    TAKE = "take"
    WAIT = "wait"
    HOLD = "hold"


@dataclass(frozen=True, slots=True)
class RingView:
    """What the ring says of a commit: when it was first seen by the fleet, and how many nodes it failed on."""

    first_seen: float | None
    good: int
    failed: int
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Decision:
    turn: Turn
    reason: str


def is_canary(pod: str, percent: float) -> bool:
    return place(pod, "ring") * 100 < percent


def ring_decision(
    pod: str, percent: float, delay: float, now: float, seen_here: float, ring: RingView | None, *, ring_asked: bool
) -> Decision:
    """Whether this node takes a commit now.

    With a ring address that does not answer the node waits: its last good scripts work, and taking an unknown commit
    everywhere at the moment when nothing can be seen is the failure that rings are for.
    """
    if percent <= 0:
        return Decision(Turn.TAKE, "no rings")
    if is_canary(pod, percent):
        return Decision(Turn.TAKE, f"canary: in the first {percent:g} %")
    if ring_asked and ring is None:
        return Decision(Turn.HOLD, "the ring does not answer, so nobody knows how the canaries fare")
    if ring is not None and ring.failed:
        because = f": {ring.reasons[0]}" if ring.reasons else ""
        return Decision(Turn.HOLD, f"{ring.failed} of the ring failed on it{because}")
    first = seen_here if ring is None or ring.first_seen is None else min(seen_here, ring.first_seen)
    if now < first + delay:
        return Decision(Turn.WAIT, f"after the canaries, in {first + delay - now:.0f} s")
    return Decision(Turn.TAKE, f"{delay:g} s after it was first seen")
