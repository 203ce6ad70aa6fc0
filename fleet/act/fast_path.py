"""A drain that a person asks for waits for nothing else that the fleet does."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from fleet.act.clock import steady
from fleet.act.watch_cache import WatchCache
from fleet.decide.actions import Change, Drain, Notice
from fleet.decide.drain import hurried
from fleet.decide.memory import Memory
from fleet.policy import Policy
from fleet.world.slurm import Slurm
from fleet.world.snapshot import Unknown

# So many changes as a policy allows are made within this time.
PACE_S = 1.0
# What Slurm said longer ago says nothing of now.
FRESH_S = 15.0


class FastPath:
    """Of what has changed, and by what Slurm said last: of each it is asked whether it is still so. What is not done
    here is decided with all else."""

    def __init__(
        self,
        cache: WatchCache,
        mind: Callable[[], tuple[Memory, Policy]],
        holds: Callable[[], bool],
        perform: Callable[[Drain], Awaitable[bool]],
        news: Callable[[], None],
    ) -> None:
        """`news`: that one was tried, and all is to be decided anew."""
        self.cache, self.mind, self.holds, self.perform, self.news = cache, mind, holds, perform, news
        self.heard = asyncio.Event()
        self.untold: list[Change | Notice] = []
        self._at = 0.0
        self._known: Slurm | Unknown = Unknown("not asked yet")
        self._now = ""  # whom for, in this moment
        self._done: set[str] = set()  # and since all was decided last
        self._before: set[str] = set()  # and before that: Slurm's answer may be from before it was done
        self._later: set[str] = set()  # those that are too many for now
        self._pace = (0.0, 0)  # since when, and for how many

    def knows(self, slurm: Slurm | Unknown) -> None:
        self._at, self._known = time.monotonic(), slurm

    def decided(self) -> None:
        """Of what is hurried for from here on the next look decides."""
        self._before, self._done = self._done, set()

    def has(self, change: Change) -> bool:
        """It is done here, or in this moment."""
        return isinstance(change, Drain) and change.name in self._before | self._done | {self._now}

    def leave(self, change: Change) -> None:
        """Somebody else does it."""
        self._done |= {change.name} if isinstance(change, Drain) else set()

    def give_back(self, change: Change) -> None:
        """He has not: it is due still."""
        self._done -= {change.name} if isinstance(change, Drain) else set()

    async def follow(self) -> None:
        while await self.heard.wait():
            self.heard.clear()
            await self.once()

    async def once(self) -> None:
        names, slurm = self.cache.touched() | self._later, self._known
        self._later = set()
        if isinstance(slurm, Unknown) or time.monotonic() - self._at > FRESH_S or self.cache.unknown():
            return
        memory, policy = self.mind()
        done_already = self._done | self._before
        workers = [one for one in self.cache.workers(names, slurm) if one.name not in done_already]
        drains = list(hurried(workers, memory.marks, steady(), policy))
        begun, many = self._pace if time.monotonic() - self._pace[0] < PACE_S else (time.monotonic(), 0)
        most = max(0, policy.changes - many)
        self._pace, self._later = (begun, many + len(drains[:most])), {change.name for change in drains[most:]}
        for change in drains[:most]:
            if not self.holds():
                return
            if change.name in self._done:
                continue  # it was its turn meanwhile
            self._now = change.name
            try:
                if await self.perform(change):
                    self.untold.append(change)
                    # Also where all was decided meanwhile: what Slurm was asked before this moment may not know of it.
                    self._done.add(change.name)
            except Exception as error:
                # Who does not answer one of them answers none; all is tried again with all else, and told then. So is
                # a mistake of ours.
                self._later, self._known = set(), Unknown(str(error))
                return
            finally:
                self._now = ""
                self.news()
        if self._later:
            await asyncio.sleep(max(0.0, begun + PACE_S - time.monotonic()))
            self.heard.set()
