"""What is asked of the world beside the watch: Slurm's nodes, and the jobs where somebody must know; and of machines
that look dead, whether they are."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from fleet import reasons
from fleet.act import liveness
from fleet.act.api_client import ApiClient
from fleet.act.clock import SLURM, steady
from fleet.act.slurm_client import SlurmClient
from fleet.act.watch_cache import WatchCache
from fleet.decide.causes import LEAVE, TO_GO
from fleet.decide.orphans import over
from fleet.decide.remediation import ACTED
from fleet.errors import FleetError
from fleet.policy import Policy
from fleet.world.kubernetes import Kubernetes
from fleet.world.slurm import Slurm
from fleet.world.snapshot import Proof, Snapshot, Unknown, Worker


def asks_for_jobs(world: Snapshot) -> bool:
    waits = _waits(world)
    return any(_asks(worker) or (worker.name in waits and _idles(worker)) for worker in world.workers())


def _waits(world: Snapshot) -> frozenset[str]:
    """Workers whose machines are to be treated as soon as nothing runs on them."""
    here = world.kubernetes
    machines = {} if isinstance(here, Unknown) else here.machines or {}
    found = (one.status for one in machines.values() if one.status.goal in ACTED)
    return frozenset(name for one in found if not (one.remedy and one.remedy.done) for name in one.worker.split())


def _idles(worker: Worker) -> bool:
    return worker.slurm is not None and worker.slurm.drained and not worker.slurm.record.busy


def asks_for_claims(world: Snapshot) -> bool:
    """Who names a node whose record is to go, or whose machine is asked for; and which jobs elastic pools may serve."""
    here = world.kubernetes
    if isinstance(here, Unknown):
        return False
    if any(one.waits for one in here.guests or ()):
        return True
    if any(pool.elastic for pool in (here.pools or {}).values()):
        return True
    return any(over(node) and here.made(node.name) is False for node in world.orphans())


def _asks(worker: Worker) -> bool:
    """Its record does not tell of a job that is suspended."""
    node = worker.slurm
    if node is None or not node.drained or worker.pod.deleting:
        return False
    leaves = bool(worker.pod.ended) or LEAVE in worker.pod.annotations or bool(reasons.kinds(node.reason) & TO_GO)
    return leaves or not (node.record.busy or worker.pod.free)


CLAIMS_S = 15.0
# Proofs are asked for anew after so long, and hold for three times that.
PROOFS_S = 5.0
# Another clock goes wrong when somebody sets it.
HOUR_S = 30.0


class Observer:
    def __init__(self, api: ApiClient, slurm: SlurmClient, policy: Callable[[], Policy]) -> None:
        self.api, self.rest, self.policy = api, slurm, policy
        self._asked = self._hour = float("-inf")
        # What could not be read of what is asked for now and then: it is so until that is asked for again.
        self._doubts: Mapping[str, str] = {}
        self._proofs: tuple[float, Mapping[str, Proof]] = (0.0, {})
        self._leases = liveness.LeaseAges()

    async def slurm(self, kubernetes: Kubernetes | Unknown) -> Slurm | Unknown:
        try:
            found = await asyncio.to_thread(self.rest.look, jobs=False)
            await self._clock()
            world = Snapshot(kubernetes, found)
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

    async def prove_on(self, cache: WatchCache, may: Callable[[], bool]) -> None:
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
        self, kubernetes: Kubernetes | Unknown, leases: liveness.LeaseAges | None = None
    ) -> Mapping[str, Proof]:
        if isinstance(kubernetes, Unknown):
            return {}
        return await liveness.prove(self.api, kubernetes, self.policy(), leases)
