"""Fast path for drains that a person requested, concurrent with the main loop.

It decides from Slurm's last known state and re-checks each node in Slurm before it drains the node.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from math import inf

from fleet.act.clock import steady
from fleet.act.watch_cache import WatchCache
from fleet.decide.actions import Change, Drain, Notice
from fleet.decide.drain import urgent_drains
from fleet.decide.memory import FleetMemory
from fleet.policy import Policy
from fleet.world.slurm import SlurmView
from fleet.world.snapshot import Unknown

# The policy limits the number of changes in this time.
PACE_S = 1.0
# Slurm's state is too old after this.
FRESH_S = 15.0


class Claims:
    """Drains that are done or in progress, so that the loop and the fast path never repeat one.

    A claim lasts for the pass of the drain and for the next one, because Slurm's answer in the next pass may be older
    than the drain.
    """

    def __init__(self) -> None:
        self._pass = 0
        self._claims: dict[str, float] = {}  # the pass in which the drain was made; inf: it is being made

    def next_pass(self) -> None:
        self._pass += 1
        self._claims = {name: made_in for name, made_in in self._claims.items() if made_in >= self._pass - 1}

    def has(self, change: Change) -> bool:
        return isinstance(change, Drain) and change.name in self._claims

    def has_name(self, name: str) -> bool:
        return name in self._claims

    def take(self, change: Change) -> None:
        if isinstance(change, Drain):
            self._claims[change.name] = inf

    def settle(self, change: Change, *, done: bool) -> None:
        """Keep the claim of a drain that succeeded; drop the claim of one that failed."""
        if isinstance(change, Drain):
            self._claims.pop(change.name, None)
            if done:
                self._claims[change.name] = self._pass


class FastPath:
    """Make requested drains at once; everything else waits for the main loop."""

    def __init__(
        self,
        cache: WatchCache,
        claims: Claims,
        state: Callable[[], tuple[FleetMemory, Policy]],
        leads: Callable[[], bool],
        perform: Callable[[Drain], Awaitable[bool]],
        attempted: Callable[[], None],
    ) -> None:
        """Store the callbacks; `attempted` runs after each attempt and triggers the main loop."""
        self.cache, self.claims, self.state, self.leads = cache, claims, state, leads
        self.perform, self.attempted = perform, attempted
        self.changed = asyncio.Event()
        self.unreported: list[Change | Notice] = []
        self._slurm: SlurmView | Unknown = Unknown("not asked yet")
        self._slurm_at = 0.0
        self._deferred: set[str] = set()  # workers that the rate limit leaves for the next second
        self._window = (0.0, 0)  # the start of the present second, and the drains in it

    def update(self, slurm: SlurmView | Unknown) -> None:
        """Store the loop's latest view of Slurm; Unknown disables the fast path."""
        self._slurm_at, self._slurm = time.monotonic(), slurm

    async def follow(self) -> None:
        while await self.changed.wait():
            self.changed.clear()
            await self.run_once()

    async def run_once(self) -> None:
        names, slurm = self.cache.touched() | self._deferred, self._slurm
        self._deferred = set()
        if isinstance(slurm, Unknown) or time.monotonic() - self._slurm_at > FRESH_S or self.cache.unknown():
            return
        memory, policy = self.state()
        workers = [worker for worker in self.cache.workers(names, slurm) if not self.claims.has_name(worker.name)]
        drains = list(urgent_drains(workers, memory.marks, steady(), policy))
        now = time.monotonic()
        begun, many = self._window if now - self._window[0] < PACE_S else (now, 0)
        most = max(0, policy.changes - many)
        self._window, self._deferred = (begun, many + len(drains[:most])), {drain.name for drain in drains[most:]}
        for drain in drains[:most]:
            if not self.leads():
                return
            if not self.claims.has(drain) and not await self._attempt(drain):
                return
        if self._deferred:
            await asyncio.sleep(max(0.0, begun + PACE_S - time.monotonic()))
            self.changed.set()

    async def _attempt(self, drain: Drain) -> bool:
        """Make one drain. False: it failed, and further ones would fail too; the loop retries and reports the error."""
        self.claims.take(drain)
        done = False
        try:
            done = await self.perform(drain)
            self.unreported += [drain] if done else []
        except Exception as error:
            self._deferred, self._slurm = set(), Unknown(str(error))
            return False
        finally:
            self.claims.settle(drain, done=done)
            self.attempted()
        return True
