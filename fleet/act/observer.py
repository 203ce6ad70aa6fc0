"""Observe what no watch delivers: Slurm's nodes, its jobs where a decision needs them, clocks, and proofs of death."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from fleet.act import liveness
from fleet.act.api_client import ApiClient
from fleet.act.clock import SLURM, steady
from fleet.act.slurm_client import SlurmClient
from fleet.act.watch_cache import WatchCache
from fleet.decide.causes import LEAVE, TO_GO
from fleet.decide.orphans import removable
from fleet.decide.remediation import ACTED
from fleet.errors import FleetError
from fleet.policy import Policy
from fleet.world.kubernetes import Kubernetes
from fleet.world.slurm import Slurm
from fleet.world.snapshot import Proof, Snapshot, Unknown, Worker

CLAIMS_S = 15.0
# Proofs are renewed after so long, and valid for three times that.
PROOFS_S = 5.0
# How often slurmctld's clock is compared.
CLOCK_S = 30.0


def needs_jobs(snapshot: Snapshot) -> bool:
    """Return whether a decision depends on the jobs: they are many, and mostly none does."""
    waiting = _awaiting_remedy(snapshot)
    return any(_needs_jobs(worker) or (worker.name in waiting and _is_idle(worker)) for worker in snapshot.workers())


def _awaiting_remedy(snapshot: Snapshot) -> frozenset[str]:
    """Return the workers whose machines are treated once nothing runs on them."""
    kubernetes = snapshot.kubernetes
    machines = {} if isinstance(kubernetes, Unknown) else kubernetes.machines or {}
    statuses = (machine.status for machine in machines.values() if machine.status.goal in ACTED)
    due = (status for status in statuses if not (status.remedy and status.remedy.done))
    return frozenset(name for status in due for name in status.worker.split())


def _is_idle(worker: Worker) -> bool:
    return worker.slurm is not None and worker.slurm.drained and not worker.slurm.record.busy


def _needs_jobs(worker: Worker) -> bool:
    """Return whether the pod may go: a node's record does not show suspended jobs."""
    node = worker.slurm
    if node is None or not node.drained or worker.pod.deleting:
        return False
    leaves = bool(worker.pod.ended) or LEAVE in worker.pod.annotations or bool(node.kinds & TO_GO)
    return leaves or not (node.record.busy or worker.pod.free)


def needs_claims(snapshot: Snapshot) -> bool:
    """Return whether a decision depends on waiting jobs and reservations: for removals, elastic pools, and lending."""
    kubernetes = snapshot.kubernetes
    if isinstance(kubernetes, Unknown):
        return False
    if any(guest.waits for guest in kubernetes.guests or ()):
        return True
    if any(pool.elastic for pool in (kubernetes.pools or {}).values()):
        return True
    return any(removable(node) and kubernetes.made(node.name) is False for node in snapshot.orphans())


class Observer:
    def __init__(self, api: ApiClient, slurm: SlurmClient, policy: Callable[[], Policy]) -> None:
        self.api, self.rest, self.policy = api, slurm, policy
        self._claims_at = self._clock_at = float("-inf")
        # What could not be read of claims holds until they are requested again.
        self._doubts: Mapping[str, str] = {}
        self._proofs: tuple[float, Mapping[str, Proof]] = (0.0, {})
        self._leases = liveness.LeaseAges()

    async def slurm(self, kubernetes: Kubernetes | Unknown) -> Slurm | Unknown:
        try:
            side = await asyncio.to_thread(self.rest.look, jobs=False)
            await self._compare_clock()
            snapshot = Snapshot(kubernetes, side)
            # Removals are not urgent, and a claim may last for months.
            needed = needs_claims(snapshot)
            claims = needed and time.monotonic() - self._claims_at >= CLAIMS_S
            self._doubts = self._doubts if needed else {}
            if claims or needs_jobs(snapshot):
                side = await self._with_jobs(side, claims=claims)
            return replace(side, doubts={**self._doubts, **side.doubts})
        except FleetError as error:
            return Unknown(str(error))

    async def _with_jobs(self, side: Slurm, *, claims: bool) -> Slurm:
        self._claims_at = time.monotonic() if claims else self._claims_at
        try:
            side = await asyncio.to_thread(self.rest.look, jobs=True, claims=claims)
        except FleetError as error:
            # Users decide how many jobs there are and how long their texts are. Drains must not depend on them.
            side = replace(side, doubts={"jobs": str(error)})
        self._doubts = side.doubts if claims else self._doubts
        return side

    async def _compare_clock(self) -> None:
        began = time.monotonic()
        if began - self._clock_at < CLOCK_S and not self.api.clocks.wrong(SLURM):
            return
        self._clock_at = began
        # A clock that cannot be read does not count as wrong.
        with contextlib.suppress(FleetError):
            if reported := await asyncio.to_thread(self.rest.server_time):
                self.api.clocks.heard(SLURM, began, reported)

    async def prove_forever(self, cache: WatchCache, leads: Callable[[], bool]) -> None:
        """Renew the proofs beside the loop: a dead machine answers late, and may stay dead for days."""
        while True:
            if leads():
                proofs = await self.prove(cache.counted(steady()), self._leases)
                self._proofs = (time.monotonic(), proofs)
            await asyncio.sleep(PROOFS_S)

    def proofs(self) -> Mapping[str, Proof]:
        """Return the proofs, unless they are too old."""
        at, proofs = self._proofs
        return proofs if time.monotonic() - at < 3 * PROOFS_S else {}

    async def prove(
        self, kubernetes: Kubernetes | Unknown, leases: liveness.LeaseAges | None = None
    ) -> Mapping[str, Proof]:
        if isinstance(kubernetes, Unknown):
            return {}
        return await liveness.prove(self.api, kubernetes, self.policy(), leases)
