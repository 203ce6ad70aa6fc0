"""Autoscaling of elastic pools: how many pods jobs ask for, and which idle pods go.

It counts machines, not processors: the pods with jobs, and the nodes that waiting jobs ask for, between min and max.
Nothing is remembered: the pods, their state in Slurm and the waiting jobs decide.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from fleet.decide.actions import Notice
from fleet.decide.drain import is_asleep
from fleet.world.kubernetes import KubePod, KubernetesView
from fleet.world.slurm import BEHIND, Offer, PendingJob, SlurmView, mismatch, nodes_needed
from fleet.world.snapshot import Worker
from fleet.world.worker_pool import ElasticSpec, WorkerPool, choose_offer
from ground.errors import counted

# In this time Slurm tries a job more than once. If the job does not start on enough idle nodes, more do not help.
HELPLESS_S = 300.0
SHOWN = 10


@dataclass(frozen=True, slots=True)
class ElasticPlan:
    """The plan for one pool in this pass."""

    # The pods that should exist, on any Node.
    names: Mapping[str, str]
    # The pods that go, and why.
    going: Mapping[str, str]
    wanted: int
    # Why the demand of jobs cannot be met, as reason and message; None: not known now.
    short: tuple[str, str] | None = ("", "")
    notices: tuple[Notice, ...] = ()


@dataclass(slots=True)
class PoolDemand:
    """One pool: its pods by activity, and the demand of jobs."""

    pool: WorkerPool
    spec: ElasticSpec
    offer: Offer
    alive: list[Worker] = field(default_factory=list)  # pods that are not being deleted
    # Pods without work: ready for jobs, still starting, or held because they go.
    idle: list[Worker] = field(default_factory=list)
    coming: int = 0  # idle pods that are not ready yet
    ready: int = 0  # idle pods that are ready and not drained
    requested: float = 0.0  # nodes that waiting jobs need
    due: float = 0.0  # the same, only of jobs that have waited long enough
    misfits: dict[str, str] = field(default_factory=dict)  # jobs that can never run here, and why
    helpless: list[str] = field(default_factory=list)  # jobs that do not start although enough nodes are idle

    def target(self, needed: float) -> int:
        """Return the number of pods that the pool should have for jobs that need `needed` more nodes."""
        busy = len(self.alive) - len(self.idle)
        return min(self.spec.maximum, max(self.spec.minimum, busy + math.ceil(needed - 1e-9)))

    @property
    def why_idle(self) -> str:
        return f"idle for {self.spec.idle_s:g} s, {self.pool.name} grows again when jobs ask"


def plan_elastic(
    pools: Iterable[WorkerPool],
    workers: list[Worker],
    kubernetes: KubernetesView,
    slurm: SlurmView,
    idle_nodes_since: Mapping[str, float],
    now: float,
) -> tuple[Mapping[str, ElasticPlan], Mapping[str, float]]:
    """Plan each pool.

    `idle_nodes_since`, also returned anew: since when each waiting job has had enough idle nodes.
    """
    demands = [_demand(pool, pool.elastic, workers, kubernetes, slurm) for pool in pools if pool.elastic is not None]
    if slurm.pending is None:
        return {demand.pool.name: _keep_unchanged(demand) for demand in demands}, idle_nodes_since
    idle_nodes_since = _assign_jobs(demands, slurm, slurm.pending, idle_nodes_since, now)
    unread = [key.removeprefix("Pod/") for key in kubernetes.unread if key.startswith("Pod/")]
    plans = {}
    for demand in demands:
        blind = any(demand.pool.number_of(name) >= 0 for name in unread)
        plans[demand.pool.name] = _keep_unchanged(demand) if blind else _plan(demand, kubernetes, slurm, now)
    return plans, idle_nodes_since


def is_ownerless(pool: WorkerPool, pod: KubePod, kubernetes: KubernetesView) -> bool:
    """Return whether nothing controls the pod any more, and it has the pool's name and label."""
    if pod.owner or pod.deleting or not pod.name.startswith(f"{pool.name}-") or pod.pool != pool.label:
        return False
    return not any(pod.name in names for other, names in kubernetes.desired_pods.items() if other != pool.name)


def _demand(
    pool: WorkerPool, spec: ElasticSpec, workers: Iterable[Worker], kubernetes: KubernetesView, slurm: SlurmView
) -> PoolDemand:
    # The records of pods that are away show what the pool's nodes have.
    records = [node.offer for name, node in slurm.nodes.items() if pool.number_of(name) >= 0]
    recorded = Offer(
        partitions=frozenset().union(*(offer.partitions for offer in records)),
        features=frozenset().union(*(offer.features for offer in records)),
        cpus=max((offer.cpus for offer in records), default=0),
        memory=max((offer.memory for offer in records), default=0),
        gpus=max((offer.gpus for offer in records), default=0),
    )
    demand = PoolDemand(pool, spec, choose_offer(spec, recorded))
    for worker in workers:
        if is_ownerless(pool, worker.pod, kubernetes):
            demand.alive.append(worker)  # adopted first
        if worker.pod.owner != pool.uid or worker.pod.deleting:
            continue
        demand.alive.append(worker)
        if _is_idle(worker, slurm):
            demand.idle.append(worker)
            demand.coming += not worker.pod.ready
            demand.ready += worker.pod.ready and worker.slurm is not None and not worker.slurm.drained
    return demand


def _is_idle(worker: Worker, slurm: SlurmView) -> bool:
    """Return whether no job runs on the worker, and no job, reservation or person holds or names it."""
    node = worker.slurm
    if worker.pod.ended or worker.name in (slurm.claims or ()):
        return False  # an ended pod counts until it is deleted
    if node is None:
        return worker.name not in slurm.unread and not worker.pod.ready
    if node.record.busy or slurm.holding(worker.name):
        return False
    # Until a returning pod is ready, its predecessor's drain still holds its node.
    return is_asleep(node) or not (node.drained or node.down)


def leaves(worker: Worker) -> bool:
    """Return whether this pod, and not its predecessor, is drained to go."""
    node = worker.slurm
    return node is not None and "surplus" in node.kinds and worker.pod.created < node.since


def _keep_unchanged(demand: PoolDemand) -> ElasticPlan:
    """Start and stop nothing, because the demand of jobs is not known."""
    going = (
        {worker.name: demand.why_idle for worker in demand.idle if leaves(worker)}
        if demand.pool.max_unavailable
        else {}
    )
    names = {worker.name: "" for worker in demand.alive if worker.name not in going}
    return ElasticPlan(names, going, demand.pool.status.wanted or len(names), None)


def _plan(demand: PoolDemand, kubernetes: KubernetesView, slurm: SlurmView, now: float) -> ElasticPlan:
    spec, pool = demand.spec, demand.pool
    target, present = demand.target(demand.due), len(demand.alive)
    going: dict[str, str] = {}
    if pool.max_unavailable:
        over = present - max(target, demand.target(demand.requested))
        before = now - spec.idle_s
        idle = [(since, worker) for worker in demand.idle if (since := _idle_since(worker, slurm, before)) is not None]
        # First the pods that go already, then those of an older template, then the longest idle.
        idle.sort(key=lambda pair: (not leaves(pair[1]), not pool.is_outdated(pair[1].pod.template), pair[0]))
        going = {worker.name: demand.why_idle for _, worker in idle[: max(0, over)]}
    names = {worker.name: "" for worker in demand.alive if worker.name not in going}
    most = max(spec.step - demand.coming, spec.minimum - present)
    names |= dict.fromkeys(_new_names(demand, kubernetes, slurm, max(0, min(target - present, most))), "")
    texts = [f"job {job} {reason}" for job, reason in demand.misfits.items()]
    more = len(texts) - SHOWN
    texts = texts[:SHOWN] + ([f"and {more} more such jobs"] if more > 0 else [])
    waits = "has not started although enough nodes are idle for it: the fleet creates no more for it"
    texts += [f"job {job} {waits}" for job in demand.helpless[:SHOWN]]
    notices = tuple(Notice(pool.name, "fit", text) for text in texts)
    return ElasticPlan(names, going, max(target, len(names)), _explain_shortage(demand), notices)


def _idle_since(worker: Worker, slurm: SlurmView, before: float) -> float | None:
    """Return since when a pod that may go has been idle; None: the pod stays."""
    node, created = worker.slurm, worker.pod.created
    if node is None:
        return created if created <= before and slurm.claims is not None else None
    if leaves(worker):
        return 0.0
    started = node.record.started
    since = max(node.last_busy, created, float(started) if started.isdecimal() else 0.0)
    # Claims, running jobs and the time of the last job must all be known.
    is_certain = slurm.claims is not None and slurm.jobs is not None and node.last_busy > 0
    return since if since <= before and is_certain else None


def _new_names(demand: PoolDemand, kubernetes: KubernetesView, slurm: SlurmView, count: int) -> list[str]:
    """Return the lowest free numbers; names that another drain holds in Slurm come last."""
    free: list[str] = []
    held_names: list[str] = []
    for number in range(demand.spec.maximum if count else 0):
        name = f"{demand.pool.name}-{number}"
        if name in kubernetes.pods or name in kubernetes.others:
            continue
        (held_names if name in slurm.nodes and not is_asleep(slurm.nodes[name]) else free).append(name)
        if len(free) == count:
            break
    return (free + held_names)[:count]


def _explain_shortage(demand: PoolDemand) -> tuple[str, str]:
    if demand.misfits:
        job, reason = next(iter(demand.misfits.items()))
        more = f"; and {counted(len(demand.misfits) - 1, 'more job')}" if len(demand.misfits) > 1 else ""
        return "NeverFits", f"job {job} {reason}{more}"
    demanded = len(demand.alive) - len(demand.idle) + math.ceil(demand.due - 1e-9)
    if demanded > demand.spec.maximum:
        return "AtMost", f"{counted(demanded, 'pod')} would have work, but max is {demand.spec.maximum}"
    return "", ""


def _assign_jobs(
    demands: list[PoolDemand],
    slurm: SlurmView,
    jobs: Iterable[PendingJob],
    idle_nodes_since: Mapping[str, float],
    now: float,
) -> Mapping[str, float]:
    """Assign each job to the first pool that can serve it; return the new `idle_nodes_since`."""
    elastic = [demand.pool for demand in demands]
    other_offers = Counter(
        node.offer for name, node in slurm.nodes.items() if not any(pool.number_of(name) >= 0 for pool in elastic)
    )
    after: dict[str, float] = {}
    for job in sorted(jobs, key=lambda job: (job.since, int(job.job))):
        candidates = [demand for demand in demands if _share_partition(demand.offer.partitions, job)]
        if not job.curable or not candidates:
            continue
        fitting = [demand for demand in candidates if not mismatch(demand.offer, job)]
        sufficient = [demand for demand in fitting if nodes_needed(demand.offer, job) <= demand.spec.maximum]
        if sufficient:
            _assign(sufficient[0], nodes_needed(sufficient[0].offer, job), job, idle_nodes_since, after, now)
            continue
        elsewhere = sum(many for offer, many in other_offers.items() if not mismatch(offer, job))
        if fitting and job.nodes <= elsewhere + sum(demand.spec.maximum for demand in fitting):
            for demand in fitting:
                _assign(demand, float(demand.spec.maximum), job, idle_nodes_since, after, now)
        elif job.nodes > elsewhere:
            for demand in candidates:
                too_few = f"{nodes_needed(demand.offer, job):g} nodes, but max is {demand.spec.maximum}"
                demand.misfits[job.job] = f"can never run here: it asks for {mismatch(demand.offer, job) or too_few}"
    return after


def _share_partition(partitions: frozenset[str], job: PendingJob) -> bool:
    return not partitions or not job.partitions or bool(partitions & {*job.partitions})


def _assign(
    demand: PoolDemand,
    nodes: float,
    job: PendingJob,
    idle_nodes_since: Mapping[str, float],
    after: dict[str, float],
    now: float,
) -> None:
    # The time restarts when a task of the job's array starts, and when the job becomes the first in the queue: until
    # then Slurm may keep idle nodes for another job.
    behind = job.reason.startswith(BEHIND)
    key = f"{job.job}:{job.times}:{'behind' if behind else 'first'}"
    over = key in idle_nodes_since and now - idle_nodes_since[key] >= HELPLESS_S
    if demand.ready >= math.ceil(nodes) or over:
        after[key] = idle_nodes_since.get(key, now)
    if over:
        demand.helpless += [job.job] if not behind else []
        return
    demand.requested += nodes * job.times
    if now - job.since >= demand.spec.pending_s:
        demand.due += nodes * job.times
