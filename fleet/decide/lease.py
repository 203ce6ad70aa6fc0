"""Which of several fleets acts: the one that holds the Lease. Pure.

No two machines' clocks are compared. Who waits measures by his own clock for how long the Lease has stood as it is; who
holds it measures by his own how long ago he began the write that renewed it. A write happens after it was begun, and is
seen after it happened: so the holder has stopped HOLDS_S after that beginning, and nobody else begins before LASTS_S.
What the Lease says of times is written for people, and not believed.
"""

from __future__ import annotations

from dataclasses import dataclass

# One that has stood unchanged for so long is free. The same in every version: in an upgrade two run at once.
LASTS_S = 15.0
# Its holder acts for so long after he began to renew it; the rest is for clocks of another pace and what is on its way.
HOLDS_S = 10.0
RENEW_S = 2.0
NEVER = float("-inf")


@dataclass(frozen=True, slots=True)
class Lease:
    """As the API server has it."""

    version: str
    holder: str = ""
    handed: int = 0  # how often it has changed hands


@dataclass(frozen=True, slots=True)
class Standing:
    """What one of them knows, by its own clock."""

    seen: Lease | None = None
    since: float = 0.0  # since when it has stood so
    until: float = NEVER  # until when we may act

    def holds(self, now: float) -> bool:
        return now < self.until


def looked(standing: Standing, lease: Lease, me: str, now: float) -> Standing:
    """After a read. Of a Lease that another one holds by now nothing is left, whatever was promised."""
    same = standing.seen is not None and standing.seen.version == lease.version
    until = standing.until if lease.holder == me else NEVER
    return Standing(lease, standing.since if same else now, until)


def wanted(standing: Standing, me: str, now: float) -> bool:
    """Whether it is ours to take or to renew."""
    lease = standing.seen
    return lease is not None and (lease.holder in ("", me) or now - standing.since >= LASTS_S)


def written(lease: Lease, begun: float, now: float) -> Standing:
    """After a write of ours that was begun at `begun`, and that found the Lease as it was looked at."""
    return Standing(lease, now, begun + HOLDS_S)
