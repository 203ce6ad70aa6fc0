"""The Lease, kept: of several fleets one acts, the others watch and wait."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from fleet.act.api_client import ApiClient, ApiError, Object
from fleet.errors import FleetError
from fleet.world import fields

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
class LeaseState:
    """What one of them knows, by its own clock."""

    seen: Lease | None = None
    since: float = 0.0  # since when it has stood so
    until: float = NEVER  # until when we may act

    def holds(self, now: float) -> bool:
        return now < self.until


def looked(standing: LeaseState, lease: Lease, me: str, now: float) -> LeaseState:
    """After a read. Of a Lease that another one holds by now nothing is left, whatever was promised."""
    same = standing.seen is not None and standing.seen.version == lease.version
    until = standing.until if lease.holder == me else NEVER
    return LeaseState(lease, standing.since if same else now, until)


def wanted(standing: LeaseState, me: str, now: float) -> bool:
    """Whether it is ours to take or to renew."""
    lease = standing.seen
    return lease is not None and (lease.holder in ("", me) or now - standing.since >= LASTS_S)


def written(lease: Lease, begun: float, now: float) -> LeaseState:
    """After a write of ours that was begun at `begun`, and that found the Lease as it was looked at."""
    return LeaseState(lease, now, begun + HOLDS_S)


# A turn that takes longer is of no use: what it would win is over.
WITHIN_S = 4.0
CONFLICT = 409
Say = Callable[[str], object]


class Leader(Protocol):
    # Whether the Lease was heard of: one that waits for it is as well as the one that has it.
    heard: bool

    def holds(self) -> bool:
        """Whether we may act, in this moment."""

    async def keep(self) -> None:
        """Until it is cancelled."""


class NoElection:
    """Without a Lease: whoever starts it sees to it that there is one."""

    heard = True

    def holds(self) -> bool:
        return True

    async def keep(self) -> None:
        return


class LeaderElection:
    def __init__(self, api: ApiClient, name: str, me: str, say: Say, changed: Callable[[], object]) -> None:
        self.api, self.name, self.me, self.say, self.changed = api, name, me, say, changed
        self.standing, self.heard = LeaseState(), False
        self._said = ""

    def holds(self) -> bool:
        return self.standing.holds(time.monotonic())

    async def keep(self) -> None:
        held = False
        try:
            while True:
                try:
                    async with asyncio.timeout(WITHIN_S):
                        await self._turn()
                    said = ""
                except (FleetError, TimeoutError) as error:
                    said = str(error) or f"no answer about the Lease within {WITHIN_S:g} s"
                self.heard = not said
                if said not in ("", self._said):
                    self.say(said)
                self._said = said
                if held != self.holds():
                    held = not held
                    self.say(f"{self.me} {'acts from now on' if held else 'does not act any more'}")
                    self.changed()
                await asyncio.sleep(RENEW_S)
        finally:
            await self._give_back()

    async def _turn(self) -> None:
        item = await self.api.lease(self.name)
        self.standing = looked(self.standing, parse_lease(item), self.me, time.monotonic())
        begun = time.monotonic()
        if not wanted(self.standing, self.me, begun):
            return
        try:
            taken = await self.api.put_lease(self.name, renewed(item, self.me, time.time()))
        except ApiError as error:
            if error.status == CONFLICT:
                return  # another one was there first; the next turn sees whose it is
            raise
        self.standing = written(parse_lease(taken), begun, time.monotonic())

    async def _give_back(self) -> None:
        """Told to end: the next one need not wait for the Lease to run out."""
        if not self.holds():
            return
        seen, self.standing = self.standing.seen, LeaseState()  # from here on nothing is begun any more
        with contextlib.suppress(FleetError, TimeoutError):
            async with asyncio.timeout(WITHIN_S):
                item = await self.api.lease(self.name)
                if seen is not None and parse_lease(item) == seen:
                    await self.api.put_lease(self.name, renewed(item, "", time.time()))


def parse_lease(item: Object) -> Lease:
    metadata, spec = fields.mapping(item.get("metadata"), "metadata"), fields.mapping(item.get("spec"), "spec")
    return Lease(
        fields.text(metadata.get("resourceVersion"), "metadata.resourceVersion", needed=True),
        fields.text(spec.get("holderIdentity"), "spec.holderIdentity"),
        fields.number(spec.get("leaseTransitions"), "spec.leaseTransitions"),
    )


def renewed(item: Object, me: str, now: float) -> Object:
    """What was read, with another spec; its resourceVersion makes the server refuse it where it has changed."""
    before = parse_lease(item)
    stamp = f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(now))}.{int(now % 1 * 1e6):06d}Z"
    spec = {**fields.mapping(item.get("spec"), "spec"), "holderIdentity": me, "renewTime": stamp}
    if before.holder != me:
        handed = before.handed + 1 if me else before.handed
        spec |= {"acquireTime": stamp, "leaseTransitions": handed, "leaseDurationSeconds": int(LASTS_S)}
    return {**item, "spec": spec}
