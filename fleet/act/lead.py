"""The Lease, kept: of several fleets one acts, the others watch and wait."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Protocol

from fleet.act.answers import ApiError, Object
from fleet.act.kubernetes import Api
from fleet.decide import lease
from fleet.decide.lease import Lease, Standing
from fleet.errors import FleetError
from fleet.world import reading

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


class Alone:
    """Without a Lease: whoever starts it sees to it that there is one."""

    heard = True

    def holds(self) -> bool:
        return True

    async def keep(self) -> None:
        return


class Lead:
    def __init__(self, api: Api, name: str, me: str, say: Say, changed: Callable[[], object]) -> None:
        self.api, self.name, self.me, self.say, self.changed = api, name, me, say, changed
        self.standing, self.heard = Standing(), False
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
                await asyncio.sleep(lease.RENEW_S)
        finally:
            await self._give_back()

    async def _turn(self) -> None:
        item = await self.api.lease(self.name)
        self.standing = lease.looked(self.standing, read(item), self.me, time.monotonic())
        begun = time.monotonic()
        if not lease.wanted(self.standing, self.me, begun):
            return
        try:
            taken = await self.api.put_lease(self.name, ours(item, self.me, time.time()))
        except ApiError as error:
            if error.status == CONFLICT:
                return  # another one was there first; the next turn sees whose it is
            raise
        self.standing = lease.written(read(taken), begun, time.monotonic())

    async def _give_back(self) -> None:
        """Told to end: the next one need not wait for the Lease to run out."""
        if not self.holds():
            return
        seen, self.standing = self.standing.seen, Standing()  # from here on nothing is begun any more
        with contextlib.suppress(FleetError, TimeoutError):
            async with asyncio.timeout(WITHIN_S):
                item = await self.api.lease(self.name)
                if seen is not None and read(item) == seen:
                    await self.api.put_lease(self.name, ours(item, "", time.time()))


def read(item: Object) -> Lease:
    metadata, spec = reading.mapping(item.get("metadata"), "metadata"), reading.mapping(item.get("spec"), "spec")
    return Lease(
        reading.text(metadata.get("resourceVersion"), "metadata.resourceVersion", needed=True),
        reading.text(spec.get("holderIdentity"), "spec.holderIdentity"),
        reading.number(spec.get("leaseTransitions"), "spec.leaseTransitions"),
    )


def ours(item: Object, me: str, now: float) -> Object:
    """What was read, with another spec; its resourceVersion makes the server refuse it where it has changed."""
    before = read(item)
    stamp = f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(now))}.{int(now % 1 * 1e6):06d}Z"
    spec = {**reading.mapping(item.get("spec"), "spec"), "holderIdentity": me, "renewTime": stamp}
    if before.holder != me:
        handed = before.handed + 1 if me else before.handed
        spec |= {"acquireTime": stamp, "leaseTransitions": handed, "leaseDurationSeconds": int(lease.LASTS_S)}
    return {**item, "spec": spec}
