"""What is asked of the world beside the watch: Slurm's nodes, and the jobs where somebody must know; and of machines
that look dead, whether they are."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from fleet.act import fencing
from fleet.act.cache import Cache
from fleet.act.clock import SLURM, steady
from fleet.act.kubernetes import Api
from fleet.act.slurm import SlurmRest
from fleet.decide.needs import asks_for_claims, asks_for_jobs
from fleet.errors import FleetError
from fleet.policy import Policy
from fleet.world.kubernetes import Kubernetes
from fleet.world.proof import Proof
from fleet.world.slurm import Slurm
from fleet.world.world import Unknown, World

CLAIMS_S = 15.0
# Proofs are asked for anew after so long, and hold for three times that.
PROOFS_S = 5.0
# Another clock goes wrong when somebody sets it.
HOUR_S = 30.0


class Look:
    def __init__(self, api: Api, slurm: SlurmRest, policy: Callable[[], Policy]) -> None:
        self.api, self.rest, self.policy = api, slurm, policy
        self._asked = self._hour = float("-inf")
        # What could not be read of what is asked for now and then: it is so until that is asked for again.
        self._doubts: Mapping[str, str] = {}
        self._proofs: tuple[float, Mapping[str, Proof]] = (0.0, {})
        self._leases = fencing.Leases()

    async def slurm(self, kubernetes: Kubernetes | Unknown) -> Slurm | Unknown:
        try:
            found = await asyncio.to_thread(self.rest.look, jobs=False)
            await self._clock()
            world = World(kubernetes, found)
            # That a record goes is no haste, and what names it may name it for months.
            needed = asks_for_claims(world)
            claims = needed and time.monotonic() - self._asked >= CLAIMS_S
            self._doubts = self._doubts if needed else {}
            if claims or asks_for_jobs(world):
                found = await self._with_jobs(found, claims=claims)
            return replace(found, doubts={**self._doubts, **found.doubts})
        except FleetError as error:
            return Unknown(str(error))

    async def _with_jobs(self, found: Slurm, *, claims: bool) -> Slurm:
        self._asked = time.monotonic() if claims else self._asked
        try:
            found = await asyncio.to_thread(self.rest.look, jobs=True, claims=claims)
        except FleetError as error:
            # How many jobs there are, and of how many words, is their users' doing. Drains need none of them.
            found = replace(found, doubts={"jobs": str(error)})
        self._doubts = found.doubts if claims else self._doubts
        return found

    async def _clock(self) -> None:
        began = time.monotonic()
        if began - self._hour < HOUR_S and not self.api.clocks.wrong(SLURM):
            return
        self._hour = began
        # One that does not tell is none that is wrong.
        with contextlib.suppress(FleetError):
            if said := await asyncio.to_thread(self.rest.hour):
                self.api.clocks.heard(SLURM, began, said)

    async def prove_on(self, cache: Cache, may: Callable[[], bool]) -> None:
        """Beside all else: what is dead answers late, and may be so for days."""
        while True:
            if may():
                proofs = await self.prove(cache.counted(steady()), self._leases)
                self._proofs = (time.monotonic(), proofs)
            await asyncio.sleep(PROOFS_S)

    def proven(self) -> Mapping[str, Proof]:
        """Nothing, where it is not of these seconds."""
        at, proofs = self._proofs
        return proofs if time.monotonic() - at < 3 * PROOFS_S else {}

    async def prove(
        self, kubernetes: Kubernetes | Unknown, leases: fencing.Leases | None = None
    ) -> Mapping[str, Proof]:
        if isinstance(kubernetes, Unknown):
            return {}
        return await fencing.prove(self.api, kubernetes, self.policy(), leases)
