"""Leader election by a Lease: one fleet process acts, the standby processes watch.

No clocks of two machines are compared. A candidate measures by its own clock for how long the Lease has not changed;
the holder measures by its own clock from the beginning of the write that renewed it. A write happens after it began and
is seen after it happened, so the holder stops at most HOLDS_S after that beginning, and no candidate starts before
LASTS_S. The times in the Lease are for people and are not read.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from fleet import FleetError
from fleet.act.api_client import ApiClient, KubernetesError, Object
from fleet.world.fields import Fields

# A Lease that has not changed for this time is free. Never change the value: an upgrade runs two versions at once.
LASTS_S = 15.0
# The holder acts for this time after it began to renew. The difference covers delays and clocks of another pace.
HOLDS_S = 10.0
RENEW_S = 2.0
NEVER = float("-inf")
# A slower request is useless: the term that it would win is over.
WITHIN_S = 4.0
CONFLICT = 409
Log = Callable[[str], object]


@dataclass(frozen=True, slots=True)
class LeaseRecord:
    """The Lease as the API server has it."""

    version: str
    holder: str = ""
    transitions: int = 0


@dataclass(frozen=True, slots=True)
class LeaseState:
    """One candidate's view of the Lease, by its own clock."""

    lease: LeaseRecord | None = None
    since: float = 0.0  # since when the Lease has not changed
    until: float = NEVER  # until when this candidate may act

    def holds(self, now: float) -> bool:
        return now < self.until


def after_read(state: LeaseState, lease: LeaseRecord, me: str, now: float) -> LeaseState:
    """Update the state after a read. If another candidate holds the Lease, this one acts no more at once."""
    same = state.lease is not None and state.lease.version == lease.version
    until = state.until if lease.holder == me else NEVER
    return LeaseState(lease, state.since if same else now, until)


def should_write(state: LeaseState, me: str, now: float) -> bool:
    """Return whether to renew or take the Lease."""
    lease = state.lease
    return lease is not None and (lease.holder in ("", me) or now - state.since >= LASTS_S)


def after_write(lease: LeaseRecord, begun: float, now: float) -> LeaseState:
    """Update the state after a successful write that began at `begun`."""
    return LeaseState(lease, now, begun + HOLDS_S)


class Leader(Protocol):
    # Whether the Lease could be read: a candidate that waits for it is as ready as its holder.
    lease_known: bool

    def holds(self) -> bool:
        """Return whether this fleet may act now."""

    async def keep(self) -> None:
        """Hold the Lease until cancelled."""


class NoElection:
    """Always the leader: the only fleet, without a Lease."""

    lease_known = True

    def holds(self) -> bool:
        return True

    async def keep(self) -> None:
        return


class LeaderElection:
    def __init__(self, api: ApiClient, name: str, me: str, log: Log, changed: Callable[[], object]) -> None:
        self.api, self.name, self.me, self.log, self.changed = api, name, me, log, changed
        self.state, self.lease_known = LeaseState(), False
        self._error = ""

    def holds(self) -> bool:
        return self.state.holds(time.monotonic())

    async def keep(self) -> None:
        was_leader = False
        try:
            while True:
                try:
                    async with asyncio.timeout(WITHIN_S):
                        await self._turn()
                    error = ""
                except (FleetError, TimeoutError) as failure:
                    error = str(failure) or f"no answer about the Lease within {WITHIN_S:g} s"
                self.lease_known = not error
                if error not in ("", self._error):
                    self.log(error)
                self._error = error
                if was_leader != self.holds():
                    was_leader = not was_leader
                    self.log(f"{self.me} {'is the leader' if was_leader else 'is no longer the leader'}")
                    self.changed()
                await asyncio.sleep(RENEW_S)
        finally:
            await self._give_back()

    async def _turn(self) -> None:
        item = await self.api.lease(self.name)
        self.state = after_read(self.state, parse_lease(item), self.me, time.monotonic())
        begun = time.monotonic()
        if not should_write(self.state, self.me, begun):
            return
        try:
            written = await self.api.put_lease(self.name, renew_lease(item, self.me, time.time()))
        except KubernetesError as error:
            if error.status == CONFLICT:
                return  # another candidate was first; the next turn reads its Lease
            raise
        self.state = after_write(parse_lease(written), begun, time.monotonic())

    async def _give_back(self) -> None:
        """Release the Lease at shutdown, so that the next leader need not wait for its end."""
        if not self.holds():
            return
        last_seen, self.state = self.state.lease, LeaseState()  # from here on no change begins
        with contextlib.suppress(FleetError, TimeoutError):
            async with asyncio.timeout(WITHIN_S):
                item = await self.api.lease(self.name)
                if last_seen is not None and parse_lease(item) == last_seen:
                    await self.api.put_lease(self.name, renew_lease(item, "", time.time()))


def parse_lease(item: Object) -> LeaseRecord:
    fields = Fields(item)
    spec = fields.sub("spec")
    version = fields.sub("metadata").text("resourceVersion", needed=True)
    return LeaseRecord(version, spec.text("holderIdentity"), spec.number("leaseTransitions"))


def renew_lease(item: Object, me: str, now: float) -> Object:
    """Return the Lease with a new spec; the server refuses it if its resourceVersion is no longer the present one."""
    before = parse_lease(item)
    stamp = f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(now))}.{int(now % 1 * 1e6):06d}Z"
    spec = {**Fields(item).sub("spec").data, "holderIdentity": me, "renewTime": stamp}
    if before.holder != me:
        transitions = before.transitions + 1 if me else before.transitions
        spec |= {"acquireTime": stamp, "leaseTransitions": transitions, "leaseDurationSeconds": int(LASTS_S)}
    return {**item, "spec": spec}
