"""Both worlds with an autoscaled pool, and a scheduler that places jobs where it may."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from fleet.decide.actions import Change, CreatePod, Evict
from fleet.policy import Policy
from fleet.world import slurm
from fleet.world.slurm import SlurmView, parse_pending_jobs
from fleet.world.snapshot import FleetSnapshot
from tests.fleet_pools_world import POOL, PoolWorlds, template
from tests.fleet_world import BEGIN

PARTITION = "main"


@dataclass
class Job:
    since: float
    nodes: int = 1
    reason: str = "Resources"
    # Further fields, as slurmrestd has them.
    more: dict[str, Any] = field(default_factory=dict)
    # Slurm does not begin it, whatever there is.
    stuck: bool = False
    on: list[str] = field(default_factory=list)


class ElasticWorlds(PoolWorlds):
    """`size` pods to begin with, on as many Nodes."""

    def __init__(self, size: int = 0, policy: Policy | None = None, **wants: Any) -> None:
        self.queue: dict[int, Job] = {}
        self.last_busy: dict[str, float] = {}
        self.reserved: set[str] = set()
        self.claimed: frozenset[str] | None = frozenset()  # as this look saw it
        self.shrunk: set[str] = set()
        self.others: list[dict[str, Any]] = []
        # Which jobs wait is not asked at this look, or who names a node.
        self.asked = self.claims = True
        # As far as these are known, a node has so many; 0: it is not told.
        self.cpus, self.megabytes = 0, 0
        super().__init__(max(size, 1), policy)
        said = {"min": 0, "max": 4, "idleSeconds": 600, "pendingSeconds": 30, **wants}
        if not size:
            self.pods.clear()
            self.slurm.clear()
        del self.pool.spec["replicas"]
        self.pool.spec |= {"mode": "elastic", "elastic": said}

    @property
    def most(self) -> int:
        found = self.read().elastic
        assert found is not None
        return found.maximum

    def elastic_is(self, **wants: Any) -> None:
        self.wants_of_it(elastic={**self.pool.spec["elastic"], **wants})

    def world(self, *, blind: str = "") -> FleetSnapshot:
        found = super().world(blind=blind)
        if not isinstance(found.slurm, SlurmView):
            return found
        claims = None
        if self.claims and found.slurm.claims is not None:
            claims = found.slurm.claims | self.reserved
        waiting = parse_pending_jobs([self._job(number) for number in self.queue]) if self.asked else None
        return replace(found, slurm=replace(found.slurm, claims=claims, pending=waiting))

    def _slurm(self, name: str) -> dict[str, Any]:
        own = {
            "partitions": [PARTITION],
            "features": ["minivm", POOL],
            "last_busy": int(self.last_busy.get(name, BEGIN)),
        }
        size = {"cpus": self.cpus, "real_memory": self.megabytes}
        return {**super()._slurm(name), **own, **size, "slurmd_start_time": 1}

    def _job(self, number: int) -> dict[str, Any]:
        job = self.queue[number]
        usual = {"node_count": job.nodes, "cpus": job.nodes, "partition": PARTITION, "state_reason": job.reason}
        state = "RUNNING" if job.on else "PENDING"
        return {"job_id": number, "job_state": [state], "eligible_time": int(job.since), **usual, **job.more}

    # What people and Slurm do.

    def submit(self, nodes: int = 1, *, reason: str = "Resources", stuck: bool = False, **more: Any) -> int:
        number = 100 + len(self.queue) + self.count * 1000
        while number in self.queue:
            number += 1
        self.queue[number] = Job(self.now, nodes, reason, more, stuck)
        return number

    def is_done(self, number: int) -> None:
        job = self.queue.pop(number, None)
        for name in job.on if job else ():
            if name in self.slurm:
                self.slurm[name].jobs.discard(number)
                self.last_busy[name] = self.now

    def schedules(self) -> None:
        for number, job in self.queue.items():
            free = [name for name in sorted(self.pods) if self._free(name)]
            if not job.on and not job.stuck and len(free) >= job.nodes:
                job.on = free[: job.nodes]
                for name in job.on:
                    self.slurm[name].jobs.add(number)

    def _free(self, name: str) -> bool:
        node = self.slurm.get(name)
        well = node is not None and not (node.drained_by or node.down or node.jobs) and node.responds
        return well and self.pods[name].ready and name not in self.leaving

    def slurmd_answers(self, name: str) -> None:
        known = name in self.slurm and self.slurm[name].responds
        super().slurmd_answers(name)
        if not known:
            self.last_busy[name] = self.now

    def goes_on(self, seconds: float = 60, looks: int = 3) -> None:
        """Let time pass, and run the looks and kubelets that follow."""
        self.now += seconds
        for _ in range(looks):
            self.look()
            self.kubelets()
            self.schedules()
        self.look()

    # What must never happen.

    def comes(self, name: str) -> bool:
        return self.read().may_create(name)

    def away(self) -> set[str]:
        return super().away() - self.shrunk

    def spare(self) -> set[str]:
        return self.shrunk

    def kept_idle(self) -> set[str]:
        return {name for name in super().kept_idle() if "surplus" not in slurm.causes_in(self.slurm[name].reason)}

    def look(self, *, cut: int | None = None, blind: str = "", world: FleetSnapshot | None = None) -> int:
        seen = world or self.world(blind=blind)
        self.claimed = seen.slurm.claims if isinstance(seen.slurm, SlurmView) else None
        return super().look(cut=cut, world=seen)

    def perform(self, change: Change) -> None:
        match change:
            case Evict(name) if "grows again" in change.reason:
                known = self.claimed is not None or name in self.unplaced
                assert known, "nobody knows whether a reservation names it"
                assert name not in (self.claimed or set()) - self.unplaced, "a reservation's node goes"
                self.shrunk.add(name)
            case CreatePod(name):
                assert change.pool.may_create(name), "beyond max"
        super().perform(change)

    def pod_goes(self, name: str) -> None:
        super().pod_goes(name)
        self.shrunk.discard(name)
        for number in [number for number, job in self.queue.items() if name in job.on]:
            job = self.queue[number]
            for other in job.on:
                if other in self.slurm:
                    self.slurm[other].jobs.discard(number)
            job.on = []


__all__ = ["ElasticWorlds", "template"]
