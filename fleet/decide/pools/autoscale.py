"""How many pods an elastic pool is to have, by what jobs ask for, and which of them go.

It counts machines, not processors: the pods with jobs, and the nodes that waiting jobs ask for, between min and max. So
nothing is remembered: the pods that are there, what Slurm says of them, and the jobs that wait are all that it needs.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from fleet import reasons
from fleet.decide.actions import Notice
from fleet.decide.orphans import asleep
from fleet.world.jobs import BEHIND, Offer, PendingJob, nodes_of, serves
from fleet.world.kubernetes import Kubernetes, Pod
from fleet.world.slurm import Slurm, SlurmNode
from fleet.world.snapshot import Worker
from fleet.world.worker_pool import ElasticSpec, WorkerPool, offered

# Slurm has looked at a job more than once in this time. One that does not begin on as many idle nodes as it asks for
# waits for something else.
HELPLESS_S = 300.0
SURPLUS = "surplus"
TOLD = 10


@dataclass(frozen=True, slots=True)
class ElasticPlan:
    """What a pool is to be now."""

    # The pods that are to be there; on any Node.
    names: Mapping[str, str]
    # Those that go, and why.
    going: Mapping[str, str]
    wanted: int
    # Why what jobs ask for is not to be had here, in a word and in words; None: not known just now.
    short: tuple[str, str] | None = ("", "")
    tells: tuple[Notice, ...] = ()


@dataclass(slots=True)
class PoolDemand:
    """One pool: its pods by what they are doing, and what is asked of it."""

    pool: WorkerPool
    wants: ElasticSpec
    has: Offer
    alive: list[Worker] = field(default_factory=list)
    # Those that nothing runs on: with a slurmd that takes jobs, or on their way to that, or held for going.
    idle: list[Worker] = field(default_factory=list)
    coming: int = 0
    ready: int = 0
    soon: float = 0.0  # nodes that jobs ask for
    due: float = 0.0  # those of jobs that have waited for long enough
    misfits: dict[str, str] = field(default_factory=dict)
    helpless: list[str] = field(default_factory=list)

    def to_be(self, asked: float) -> int:
        kept = len(self.alive) - len(self.idle)
        return min(self.wants.most, max(self.wants.least, kept + math.ceil(asked - 1e-9)))


def sized(
    pools: Iterable[WorkerPool],
    everyone: list[Worker],
    kubernetes: Kubernetes,
    slurm: Slurm,
    fed: Mapping[str, float],
    now: float,
) -> tuple[Mapping[str, ElasticPlan], Mapping[str, float]]:
    """By pool; and since when jobs have had enough of idle nodes."""
    crews = [_crew(pool, pool.elastic, everyone, kubernetes, slurm) for pool in pools if pool.elastic is not None]
    if slurm.pending is None:
        return {crew.pool.name: _unchanged(crew) for crew in crews}, fed
    fed = _asked(crews, slurm, slurm.pending, fed, now)
    found = {}
    for crew in crews:
        pods = (key.removeprefix("Pod/") for key in kubernetes.unread if key.startswith("Pod/"))
        blind = any(crew.pool.numbered(name) >= 0 for name in pods)
        found[crew.pool.name] = _unchanged(crew) if blind else _sized(crew, kubernetes, slurm, now)
    return found, fed


def left(pool: WorkerPool, pod: Pod, kubernetes: Kubernetes) -> bool:
    """Nobody makes it any more, and it is of the pool's name and label."""
    if pod.owner or pod.deleting or not pod.name.startswith(f"{pool.name}-") or pod.pool != pool.label:
        return False
    return not any(pod.name in names for other, names in kubernetes.wanted.items() if other != pool.name)


def _crew(
    pool: WorkerPool, wants: ElasticSpec, everyone: Iterable[Worker], kubernetes: Kubernetes, slurm: Slurm
) -> PoolDemand:
    # Also of pods that are away: their records are what is known of them.
    records = [node.offer for name, node in slurm.nodes.items() if pool.numbered(name) >= 0]
    seen = Offer(
        partitions=frozenset().union(*(one.partitions for one in records)),
        features=frozenset().union(*(one.features for one in records)),
        cpus=max((one.cpus for one in records), default=0),
        memory=max((one.memory for one in records), default=0),
        gpus=max((one.gpus for one in records), default=0),
    )
    crew = PoolDemand(pool, wants, offered(wants, seen))
    for worker in everyone:
        if left(pool, worker.pod, kubernetes):
            crew.alive.append(worker)  # it is taken over before it is asked what it does
        if worker.pod.owner != pool.uid or worker.pod.deleting:
            continue
        crew.alive.append(worker)
        if _idles(worker, slurm):
            crew.idle.append(worker)
            crew.coming += not worker.pod.ready
            crew.ready += worker.pod.ready and worker.slurm is not None and not worker.slurm.drained
    return crew


def _idles(worker: Worker, slurm: Slurm) -> bool:
    """Nothing runs on it, and nobody else holds it or names it."""
    node = worker.slurm
    if worker.pod.ended:
        return False  # it goes for that, and counts until then
    if worker.name in (slurm.claims or ()):
        return False
    if node is None:
        return worker.name not in slurm.unread and not worker.pod.ready
    if node.record.busy or slurm.holding(worker.name):
        return False
    # One that comes back is held for its last going until it is ready.
    return asleep(node) or not (node.drained or node.down)


def leaves(worker: Worker) -> bool:
    """Drained to go; not the one before it."""
    node = worker.slurm
    if node is None or not node.ours or worker.pod.created >= node.since:
        return False
    return SURPLUS in reasons.kinds(node.reason)


def _unchanged(crew: PoolDemand) -> ElasticPlan:
    """What jobs ask for is not known: none comes, and none begins to go."""
    going = {one.name: _why(crew) for one in crew.idle if leaves(one)} if crew.pool.most else {}
    names = {one.name: "" for one in crew.alive if one.name not in going}
    return ElasticPlan(names, going, crew.pool.status.wanted or len(names), None)


def _why(crew: PoolDemand) -> str:
    return f"idle for {crew.wants.idle_s:g} s, {crew.pool.name} grows again when jobs ask"


def _sized(crew: PoolDemand, kubernetes: Kubernetes, slurm: Slurm, now: float) -> ElasticPlan:
    wants = crew.wants
    wanted, there = crew.to_be(crew.due), len(crew.alive)
    going: dict[str, str] = {}
    if crew.pool.most:
        over = there - max(wanted, crew.to_be(crew.soon))
        found = [(since, one) for one in crew.idle if (since := _since(one, slurm, now - wants.idle_s)) is not None]
        # Those that go already first, then those of an older template, then who has been idle for longest.
        found.sort(key=lambda pair: (not leaves(pair[1]), not _old(crew.pool, pair[1]), pair[0]))
        going = {one.name: _why(crew) for _, one in found[: max(0, over)]}
    names = {one.name: "" for one in crew.alive if one.name not in going}
    most = max(wants.step - crew.coming, wants.least - there)
    names |= dict.fromkeys(_new(crew, kubernetes, slurm, max(0, min(wanted - there, most))), "")
    tells = [Notice(crew.pool.name, "fit", f"job {job} {why}") for job, why in crew.misfits.items()]
    more = len(tells) - TOLD
    tells = tells[:TOLD] + ([Notice(crew.pool.name, "fit", f"and {more} more jobs of the kind")] if more > 0 else [])
    waits = "has had as many idle nodes as it asks for, and does not begin: no more come for it"
    tells += [Notice(crew.pool.name, "fit", f"job {job} {waits}") for job in crew.helpless[:TOLD]]
    return ElasticPlan(names, going, max(wanted, len(names)), _short(crew), tuple(tells))


def _old(pool: WorkerPool, worker: Worker) -> bool:
    return (worker.pod.template or pool.status.adopted or pool.hash) != pool.hash


def _since(worker: Worker, slurm: Slurm, before: float) -> float | None:
    """Since when one has been idle that may go; None: it stays."""
    node, created = worker.slurm, worker.pod.created
    if node is None:
        return created if created <= before and slurm.claims is not None else None
    if leaves(worker):
        return 0.0
    since = max(node.last_busy, created, _started(node))
    # That nobody names it and no job holds it must be known, and since when nothing has run on it.
    known = slurm.claims is not None and slurm.jobs is not None and node.last_busy > 0
    return since if since <= before and known else None


def _started(node: SlurmNode) -> float:
    said = node.record.started
    return float(said) if said.isdecimal() else 0.0


def _new(crew: PoolDemand, kubernetes: Kubernetes, slurm: Slurm, many: int) -> list[str]:
    """The lowest numbers that are free; those that others hold in Slurm last."""
    pool = crew.pool
    free: list[str] = []
    held: list[str] = []
    for number in range(crew.wants.most if many else 0):
        name = f"{pool.name}-{number}"
        if name in kubernetes.pods or name in kubernetes.others:
            continue
        (held if name in slurm.nodes and not asleep(slurm.nodes[name]) else free).append(name)
        if len(free) == many:
            break
    return (free + held)[:many]


def _short(crew: PoolDemand) -> tuple[str, str]:
    if crew.misfits:
        job, why = next(iter(crew.misfits.items()))
        more = f"; and {len(crew.misfits) - 1} more jobs" if len(crew.misfits) > 1 else ""
        return "NeverFits", f"job {job} {why}{more}"
    asked = len(crew.alive) - len(crew.idle) + math.ceil(crew.due - 1e-9)
    if asked > crew.wants.most:
        return "AtMost", f"{asked} would have work, and max is {crew.wants.most}"
    return "", ""


# What jobs ask for.


def _asked(
    crews: list[PoolDemand], slurm: Slurm, jobs: Iterable[PendingJob], fed: Mapping[str, float], now: float
) -> Mapping[str, float]:
    """Gives each job to the first pool that can serve it. What is returned is `fed`, as it is now."""
    names = [crew.pool for crew in crews]
    others = Counter(
        node.offer for name, node in slurm.nodes.items() if not any(pool.numbered(name) >= 0 for pool in names)
    )
    after: dict[str, float] = {}
    for job in sorted(jobs, key=lambda one: (one.since, int(one.job))):
        ours = [one for one in crews if _shares(one.has.partitions, job)]
        if not job.curable or not ours:
            continue
        good = [one for one in ours if not serves(one.has, job)]
        here = [one for one in good if nodes_of(one.has, job) <= one.wants.most]
        if here:
            _give(here[0], nodes_of(here[0].has, job), job, fed, after, now)
            continue
        elsewhere = sum(many for offer, many in others.items() if not serves(offer, job))
        if good and job.nodes <= elsewhere + sum(one.wants.most for one in good):
            for one in good:
                _give(one, float(one.wants.most), job, fed, after, now)
        elif job.nodes > elsewhere:
            for one in ours:
                why = serves(one.has, job) or f"{nodes_of(one.has, job):g} nodes, and max is {one.wants.most}"
                one.misfits[job.job] = f"can never run here: it asks for {why}"
    return after


def _shares(partitions: frozenset[str], job: PendingJob) -> bool:
    return not partitions or not job.partitions or bool(partitions & {*job.partitions})


def _give(
    crew: PoolDemand, nodes: float, job: PendingJob, fed: Mapping[str, float], after: dict[str, float], now: float
) -> None:
    # An array of which one has begun since is another one. So is a job that idle nodes were kept from for another,
    # once it is the first itself.
    behind = job.reason.startswith(BEHIND)
    key = f"{job.job}:{job.times}:{'behind' if behind else 'first'}"
    enough = crew.ready >= math.ceil(nodes)
    over = key in fed and now - fed[key] >= HELPLESS_S
    if enough or over:
        after[key] = fed.get(key, now)
    if over:
        crew.helpless += [job.job] if not behind else []
        return
    crew.soon += nodes * job.times
    if now - job.since >= crew.wants.pending_s:
        crew.due += nodes * job.times
