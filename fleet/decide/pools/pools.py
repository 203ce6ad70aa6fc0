"""What is to become of each pool's pods. Where a pool is not known nothing of its is begun, and nothing lifted."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from operator import attrgetter

from fleet import crd_pools, reasons
from fleet.decide.actions import Action, Adopt, CreatePod, Evict, Key, NotePool, Notice, action_key
from fleet.decide.causes import LEAVE, OF_POOL, well
from fleet.decide.memory import Refused
from fleet.decide.pools import ended_pods, lending
from fleet.decide.pools.autoscale import SURPLUS, ElasticPlan, left, sized
from fleet.decide.pools.rollout import Stale, is_to_go, turns
from fleet.policy import Policy
from fleet.reasons import plain
from fleet.world.kubernetes import Kubernetes, Pod
from fleet.world.slurm import Slurm
from fleet.world.snapshot import Worker
from fleet.world.worker_pool import PoolCondition, PoolStatus, WorkerPool


def refusals(kubernetes: Kubernetes) -> Mapping[str, str]:
    """Pools that are in an older one's way, and why. One that is about to go still has its pods."""
    labels: dict[str, str] = {}
    names: dict[str, str] = {}
    refused: dict[str, str] = {}
    elastic: list[WorkerPool] = []
    for pool in sorted((kubernetes.pools or {}).values(), key=lambda one: (one.created, one.uid)):
        wanted = kubernetes.wanted.get(pool.name, {})
        if pool.label in labels:
            refused[pool.name] = f"none of its pods is touched: {labels[pool.label]}, older, has its label {pool.label}"
        elif both := next((name for name in wanted if name in names), "") or next(filter(pool.may_have, names), ""):
            refused[pool.name] = f"none of its pods is touched: {names[both]}, older, has {both} too"
        elif other := next((one for one in elastic if any(map(one.may_have, wanted))), None):
            refused[pool.name] = f"none of its pods is touched: {other.name}, older, may have one of their names"
        else:
            elastic += [pool] if pool.elastic else []
            labels[pool.label] = pool.name
            names |= dict.fromkeys(wanted, pool.name)
    return refused


Causes = Mapping[str, str]
NAMED = 5
UNKNOWN = "none of its pods is touched: which StatefulSets make pods is not known"


@dataclass(frozen=True, slots=True)
class Pools:
    causes: Mapping[str, Causes] = field(default_factory=dict)
    # Not known just now: what holds their pods stays, and none is evicted, for nobody knows who is missing.
    unsure: bool = False
    # How many of a pool may be away, and who is missing; by the label of its pods.
    most: Mapping[str, int] = field(default_factory=dict)
    missing: Mapping[str, frozenset[str]] = field(default_factory=dict)
    actions: tuple[Action, ...] = ()
    # Those that nobody misses: their pools have shrunk.
    spare: frozenset[str] = frozenset()
    # None of these goes just now: it is not known who names it.
    named: frozenset[str] = frozenset()
    fed: Mapping[str, float] = field(default_factory=dict)

    def room(self, worker: Worker, away: int, policy: Policy) -> bool:
        """`away`: so many others of its pool are there, and not well."""
        label = worker.pod.pool
        if worker.name in self.spare:
            return True
        if label in self.most and not worker.pod.ready:
            return True  # it is missed already
        return away + len(self.missing.get(label, ())) < self.most.get(label, policy.away)


def pools(
    workers: Iterable[Worker],
    kubernetes: Kubernetes,
    slurm: Slurm,
    now: float,
    policy: Policy,
    fed: Mapping[str, float] | None = None,
    failed: Mapping[Key, Refused] | None = None,
) -> Pools:
    """`fed`: since when jobs have had enough of idle nodes. `failed`: what could not be made, a pod among it."""
    everyone, fed = list(workers), fed or {}
    if kubernetes.unsure:
        return Pools({one.name: _before(one) for one in everyone}, unsure=True, fed=fed)
    if kubernetes.pools and kubernetes.sets is None:
        tells = [Notice(name, "pool", UNKNOWN) for name in kubernetes.pools]
        return Pools({one.name: _before(one) for one in everyone}, unsure=True, actions=tuple(tells), fed=fed)
    causes: dict[str, Causes] = {}
    most: dict[str, int] = {}
    missing: dict[str, frozenset[str]] = {}
    actions: list[Action] = []
    spare: set[str] = set()
    named: set[str] = set()
    # In the order of their names: each status that is written puts its pool elsewhere among those that are read.
    known = [one for _, one in sorted((kubernetes.pools or {}).items()) if not one.deleting]
    refused, sets = refusals(kubernetes), kubernetes.sets or {}
    working = [one for one in known if one.name not in sets and one.name not in refused]
    sizes, fed = sized(working, everyone, kubernetes, slurm, fed, now)
    gives = lending.lent(working, everyone, kubernetes, slurm, now, policy)
    actions += lending.unknown({one.label for one in known}, policy)
    for pool in known:
        if why := refused.get(pool.name):
            actions += [Notice(pool.name, "pool", why), *PoolView(pool, kubernetes, everyone, now, policy).note(why)]
            continue
        if pool.name in sets:
            actions.append(
                Notice(pool.name, "pool", "none of its pods is touched: a StatefulSet of its name makes them")
            )
            continue
        size = sizes.get(pool.name)
        given = gives.get(pool.name, lending.NONE)
        here = PoolView(pool, kubernetes, everyone, now, policy, size, given)
        causes |= turns(pool, here.in_turn(), len(here.away | here.not_back), slurm, now, policy)
        if size is not None:
            causes |= {name: {SURPLUS: why} for name, why in size.going.items()}
            spare |= size.going.keys()
            named |= size.going.keys() if slurm.claims is None else set()
            actions += size.tells
        causes |= given.causes
        spare |= given.to.keys()
        actions += given.tells
        most[pool.label], missing[pool.label] = pool.most, here.missing
        actions += [*here.never_placed(slurm), *here.ended(slurm), *here.to_come()]
        if not_made := here.not_made(failed or {}):
            actions.append(Notice(pool.name, "pool", not_made))
        actions += here.note(failed=not_made)
    return Pools(causes, False, most, missing, tuple(actions), frozenset(spare), frozenset(named), fed)


def _before(worker: Worker) -> Causes:
    node = worker.slurm
    kinds = reasons.kinds(node.reason) & OF_POOL if node is not None and node.ours else frozenset[str]()
    return dict.fromkeys(kinds, "as its pool was to be")


class PoolView:
    """One pool, as it is."""

    def __init__(
        self,
        pool: WorkerPool,
        kubernetes: Kubernetes,
        everyone: list[Worker],
        now: float,
        policy: Policy,
        size: ElasticPlan | None = None,
        given: lending.Loans = lending.NONE,
    ) -> None:
        self.pool, self.kubernetes, self.now, self.policy = pool, kubernetes, now, policy
        self.size, self.given = size, given
        self.names = size.names if size else kubernetes.wanted.get(pool.name, {})
        self.workers = {one.name: one for one in everyone if one.pod.owner == pool.uid}
        self.absent = [name for name in self.names if name not in given.to and self._absent(name)]
        self.left = [pod for pod in kubernetes.pods.values() if self._left(pod)]
        self.missing = frozenset(name for name in self.absent if self._takes(self.names[name]))
        # Those of its label that it has not taken over yet among them.
        others = {one.uid for one in (kubernetes.pools or {}).values()} - {pool.uid}
        of_it = [one for one in everyone if one.pod.owner not in others and self._of_it(one.pod)]
        of_it = [one for one in of_it if one.name not in given.to]  # nobody misses them
        unwell = {one.name for one in of_it if one.pod.deleting or not one.pod.ready}
        self.away = self.missing | unwell
        mine = (one for one in self.workers.values() if not one.pod.deleting)
        self.stale = [stale for one in mine if (stale := self._stale(one))]
        to_go = {one.worker.name for one in self.stale}
        # Replaced and not undrained yet, or sent away by a person.
        self.not_back = frozenset(one.name for one in of_it if self._kept(one, one.name in to_go))

    def _of_it(self, pod: Pod) -> bool:
        return pod.owner == self.pool.uid or pod.pool == self.pool.label

    def _kept(self, worker: Worker, stale: bool) -> bool:
        if worker.slurm is None or worker.slurm.record.busy:
            return False
        return not stale if is_to_go(worker.slurm) else LEAVE in worker.pod.annotations

    def _absent(self, name: str) -> bool:
        here = self.kubernetes
        return name not in here.pods and name not in here.others and f"Pod/{name}" not in here.unread

    def _takes(self, node: str) -> bool:
        """A pod for a Node that is closed would wait there for its end; it comes when that is over."""
        return not node or well(self.kubernetes.nodes[node], self.policy, self.now)

    def _stale(self, worker: Worker) -> Stale | None:
        pod, pool = worker.pod, self.pool
        if pod.ended or pod.name in self.given.to:
            return None  # it goes for that
        if pod.name not in self.names:
            if self.size is not None:
                return Stale(worker, SURPLUS, self.size.going[pod.name])
            if pool.replicas is not None:
                return Stale(worker, "surplus", f"{pool.name} has {pool.replicas}")
            # Of a Node that cannot be read nobody knows whether it still matches.
            if any(key.startswith("Node/") for key in self.kubernetes.unread):
                return None
            return Stale(worker, "surplus", f"its node is none of {pool.name}'s")
        if not self._old(pod) or (worker.node and not well(worker.node, self.policy, self.now)):
            return None
        return Stale(worker, "update", f"template {pool.hash} of {pool.name}")

    def in_turn(self) -> Iterator[Stale]:
        """What an elastic pool has too many of nobody misses: it needs no turn."""
        return (one for one in self.stale if self.size is None or one.kind != SURPLUS)

    def never_placed(self, slurm: Slurm) -> Iterator[Evict]:
        """Nothing has ever run in such a pod; what its name's record tells is of the one before."""
        for one in self.stale:
            pod, node = one.worker.pod, one.worker.slurm
            if pod.node or not self.pool.most or pod.name in slurm.unread:
                continue
            idle = node is None or (node.drained and not node.record.busy and slurm.holding(pod.name) == ())
            if idle:
                yield Evict(pod.name, pod.uid, pod.version, one.why, node.seen if node else None)

    def ended(self, slurm: Slurm) -> Iterator[Evict | Notice]:
        mine = [one for one in self.workers.values() if not one.pod.deleting]
        yield from ended_pods.ended(self.pool.status.ended, self._is_to_be, mine, slurm, self.now)

    def _is_to_be(self, name: str) -> bool:
        """Or may come again: between two of an elastic pool's of one name there is none."""
        return name in self.names or self.pool.may_have(name)

    def to_come(self) -> Iterator[CreatePod | Adopt | Notice]:
        for name in self.absent:
            if name in self.missing:
                yield CreatePod(name, self.names[name], self.pool)
        for name, pod in self.kubernetes.pods.items():
            if name in self.workers:
                continue
            if pod in self.left:
                # What it counts as made of is noted first.
                if pod.template or self.pool.status.adopted:
                    yield Adopt(pod.name, pod.uid, pod.version, self.pool)
            elif name in self.names:
                yield Notice(name, "pool", f"is there, and not of {self.pool.name}'s making")

    def _left(self, pod: Pod) -> bool:
        """Nobody makes it any more; one that is too many is taken over too, for else it would stay for ever."""
        return left(self.pool, pod, self.kubernetes) and self.names.get(pod.name, "") in ("", pod.node)

    def not_made(self, failed: Mapping[Key, Refused]) -> str:
        """Why the first of those that are missing is: in the words of who refused it."""
        deeds = (
            (action_key(CreatePod(name, self.names[name], self.pool)) for name in sorted(self.missing))
            if failed
            else ()
        )
        return next((failed[one].text.partition("\n")[0] for one in deeds if one in failed), "")

    def note(self, refused: str = "", failed: str = "") -> Iterator[NotePool]:
        """`refused`: why it is no pool to the fleet. `failed`: why a pod of it could not be made."""
        pool = self.pool
        mine = [one.pod for one in self.workers.values() if not one.pod.deleting]
        updated = [pod for pod in mine if not self._old(pod)]
        taken = any(not pod.template for pod in [*mine, *self.left])
        left = refused or self._left_over()
        over = [
            f"{pod.name} has ended: {plain(pod.ended)}" for pod in sorted(mine, key=attrgetter("name")) if pod.ended
        ]
        over = [failed, *over] if failed else over
        unwell = sorted((self.away | {*self.absent}) & self.names.keys())
        status = PoolStatus(
            wanted=self.size.wanted if self.size else len(self.names.keys() - self.given.to.keys()),
            replicas=len(mine),
            ready=sum(pod.ready for pod in mine),
            updated=len(updated),
            away=len(self.away),
            template=pool.hash,
            generation=pool.generation,
            conditions=(
                self._stand(
                    "Ready", not unwell, "AllReady", "NotReady", "; ".join([f"not ready: {_few(unwell)}", *over[:1]])
                ),
                self._stand("Updated", not left, "AllUpdated", "Refused" if refused else "Updating", left),
                *self._fits(),
                *self._whole(),
            ),
            adopted=(pool.status.adopted or pool.hash) if taken else "",
            ended=ended_pods.counted(pool.status.ended, self._is_to_be, {pod.name: pod for pod in mine}, self.now),
        )
        if status != pool.status:
            yield NotePool(pool.name, pool.version, status)

    def _fits(self) -> Iterator[PoolCondition]:
        if self.size is not None and self.size.short is not None:
            word, why = self.size.short
            yield self._stand("Fits", not word, "Fits", word, why)
        elif self.size is not None:
            yield from (one for one in self.pool.status.conditions if one.type == "Fits")

    def _whole(self) -> Iterator[PoolCondition]:
        if self.given.may:
            yield self._stand("Whole", not self.given.to, "Whole", "Lends", self.given.words)

    def _left_over(self) -> str:
        surplus = sum(name not in self.names for name in self.workers)
        old = [one.name for one in self.workers.values() if one.name in self.names and self._old(one.pod)]
        said = [f"of an older template: {_few(sorted(old))}"] if old else []
        said += [f"too many: {surplus}"] if surplus else []
        return "; ".join([*said, *(["maxUnavailable is 0"] if said and not self.pool.most else [])])

    def _old(self, pod: Pod) -> bool:
        return (pod.template or self.pool.status.adopted or self.pool.hash) != self.pool.hash

    def _stand(self, type_: str, yes: bool, good: str, bad: str, message: str) -> PoolCondition:
        """The time of the last transition changes with the status alone."""
        wanted = PoolCondition(type_, str(yes), good if yes else bad, "" if yes else message[: crd_pools.SAID])
        before = next((one for one in self.pool.status.conditions if one.type == type_), None)
        return replace(wanted, since=before.since if before and before.status == wanted.status else int(self.now))


def _few(names: list[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return " ".join(names[:NAMED]) + more
