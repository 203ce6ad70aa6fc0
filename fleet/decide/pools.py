"""Plan the pods of every WorkerPool: creations, adoptions, drains, evictions and the pool's status.

The flow of `plan_pools`, which `decide` calls once in each pass:

1. `refusals` finds pools that claim an older pool's pods. The fleet leaves a pool unchanged while it is refused, while
   a StatefulSet has its name, and while the pools or the StatefulSets are unknown.
2. `plan_elastic` (autoscale.py) and `plan_loans` (lending.py) plan for all pools, since pools share idle machines.
3. `PoolView` compares one pool's target with its pods and their Slurm nodes.
4. A pod that is outdated (`plan_turns`, rollout.py), surplus or lent gets a cause for a drain. Eviction follows in
   decide.py once its jobs have ended.
5. Missing pods are created and pods that ended by themselves are replaced (`replace_ended`).
6. `PoolView.write_status` reports the result, with the counts of ended pods (`count_ended`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from operator import attrgetter

from fleet import crd
from fleet.decide import lending
from fleet.decide.actions import (
    Action,
    Adopt,
    ChangeKey,
    CreatePod,
    Evict,
    NotePool,
    Notice,
    RefusedChange,
    backoff,
    change_key,
    first_of,
)
from fleet.decide.autoscale import ElasticPlan, is_ownerless, plan_elastic
from fleet.decide.causes import LEAVE, OF_POOL, TEXTS, Causes, is_leaving, takes_new_pods
from fleet.decide.rollout import Stale, plan_turns
from fleet.policy import Policy
from fleet.world.kubernetes import KubePod, KubernetesView
from fleet.world.slurm import SlurmView, plain_text
from fleet.world.snapshot import Worker
from fleet.world.worker_pool import EndedPod, PoolCondition, PoolStatus, WorkerPool

UNTOUCHED = "the fleet touches none of its pods"


@dataclass(frozen=True, slots=True)
class PoolsPlan:
    """The plan for all pools in one pass."""

    causes: Mapping[str, Causes] = field(default_factory=dict)
    # Pools are not known now: existing drains stay, and no pod is evicted, since missing pods cannot be counted.
    pools_unknown: bool = False
    # By the label of a pool's pods: how many of them may be away, and which are missing.
    most_away: Mapping[str, int] = field(default_factory=dict)
    missing: Mapping[str, frozenset[str]] = field(default_factory=dict)
    actions: tuple[Action, ...] = ()
    # Pods that their shrinking or lending pool does not miss.
    spare: frozenset[str] = frozenset()
    # Pods that must not go now: it is not known which jobs name them.
    maybe_claimed: frozenset[str] = frozenset()
    idle_nodes_since: Mapping[str, float] = field(default_factory=dict)

    def has_room(self, worker: Worker, away: int, policy: Policy) -> bool:
        """Return whether one more pod of the pool may be away. `away`: its other pods that exist and are not well."""
        label = worker.pod.pool
        if worker.name in self.spare or (label in self.most_away and not worker.pod.ready):
            return True  # spare, or missing already
        return away + len(self.missing.get(label, ())) < self.most_away.get(label, policy.away)


@dataclass(slots=True)
class _PlanBuilder:
    """Collect the plans of single pools."""

    causes: dict[str, Causes] = field(default_factory=dict)
    most_away: dict[str, int] = field(default_factory=dict)
    missing: dict[str, frozenset[str]] = field(default_factory=dict)
    actions: list[Action] = field(default_factory=list)
    spare: set[str] = field(default_factory=set)
    maybe_claimed: set[str] = field(default_factory=set)

    def report_mistake(self, pool: WorkerPool) -> None:
        if pool.mistake:
            text = f"{pool.mistake}: its last good spec applies until you correct it"
            self.actions.append(Notice(pool.name, "pool", text))

    def refuse(self, view: PoolView, refusal: str) -> None:
        """Report a pool that claims pods of an older pool, and change no pod for it."""
        self.actions += [Notice(view.pool.name, "pool", refusal), *view.write_status(refusal)]

    def leave_to_set(self, pool: WorkerPool) -> None:
        """Leave the pods to a StatefulSet of the pool's name."""
        self.actions.append(Notice(pool.name, "pool", f"{UNTOUCHED} while a StatefulSet of its name makes them"))

    def add_elastic(self, plan: ElasticPlan, slurm: SlurmView) -> None:
        """Add the pods by which an elastic pool shrinks."""
        self.causes |= {name: {"surplus": reason} for name, reason in plan.going.items()}
        self.spare |= plan.going.keys()
        self.maybe_claimed |= plan.going.keys() if slurm.claims is None else set()
        self.actions += plan.notices

    def add_loans(self, loans: lending.Loans) -> None:
        self.causes |= loans.causes
        self.spare |= loans.guests_of.keys()
        self.actions += loans.notices

    def add_pods(self, view: PoolView, slurm: SlurmView, failed: Mapping[ChangeKey, RefusedChange]) -> None:
        """Add the changes of the pool's pods, and its status."""
        pool = view.pool
        self.most_away[pool.label], self.missing[pool.label] = pool.max_unavailable, view.missing
        self.actions += [*view.evict_never_placed(slurm), *view.replace_ended(slurm), *view.create_and_adopt()]
        failure = view.creation_failure(failed)
        if failure:
            self.actions.append(Notice(pool.name, "pool", failure))
        self.actions += view.write_status(failure=failure)

    def finish(self, idle_nodes_since: Mapping[str, float]) -> PoolsPlan:
        return PoolsPlan(
            self.causes,
            pools_unknown=False,
            most_away=self.most_away,
            missing=self.missing,
            actions=tuple(self.actions),
            spare=frozenset(self.spare),
            maybe_claimed=frozenset(self.maybe_claimed),
            idle_nodes_since=idle_nodes_since,
        )


def plan_pools(
    workers: Iterable[Worker],
    kubernetes: KubernetesView,
    slurm: SlurmView,
    now: float,
    policy: Policy,
    idle_nodes_since: Mapping[str, float] | None = None,
    failed: Mapping[ChangeKey, RefusedChange] | None = None,
) -> PoolsPlan:
    """Plan all pools.

    `idle_nodes_since`: since when jobs have had enough idle nodes. `failed`: changes that failed before.
    """
    workers, idle_nodes_since = list(workers), idle_nodes_since or {}
    if kubernetes.pools_unknown or (kubernetes.pools and kubernetes.sets is None):
        return _keep_existing(workers, kubernetes, idle_nodes_since)
    # Sorted by name: a write of its status changes a pool's position in the watch.
    live_pools = [pool for _, pool in sorted((kubernetes.pools or {}).items()) if not pool.deleting]
    refused, sets = find_refusals(kubernetes), kubernetes.sets or {}
    working = [pool for pool in live_pools if pool.name not in sets and pool.name not in refused]
    elastic_plans, idle_nodes_since = plan_elastic(working, workers, kubernetes, slurm, idle_nodes_since, now)
    loans_by_pool = lending.plan_loans(working, workers, kubernetes, slurm, now, policy)
    builder = _PlanBuilder()
    builder.actions += lending.report_unknown_lenders({pool.label for pool in live_pools}, policy)
    for pool in live_pools:
        builder.report_mistake(pool)
        if refusal := refused.get(pool.name):
            builder.refuse(PoolView(pool, kubernetes, workers, now, policy), refusal)
            continue
        if pool.name in sets:
            builder.leave_to_set(pool)
            continue
        plan, loans = elastic_plans.get(pool.name), loans_by_pool.get(pool.name, lending.NONE)
        view = PoolView(pool, kubernetes, workers, now, policy, plan, loans)
        builder.causes |= plan_turns(pool, view.stale_in_turn(), view.count_away(), slurm, now, policy)
        if plan is not None:
            builder.add_elastic(plan, slurm)
        builder.add_loans(loans)
        builder.add_pods(view, slurm, failed or {})
    return builder.finish(idle_nodes_since)


def _keep_existing(
    workers: list[Worker], kubernetes: KubernetesView, idle_nodes_since: Mapping[str, float]
) -> PoolsPlan:
    """Keep the existing drains of pools while the pools or the StatefulSets, which may make the pods, are unknown."""
    text = f"{UNTOUCHED}, because it cannot list the StatefulSets, which may make them"
    notices = tuple(Notice(name, "pool", text) for name in kubernetes.pools or {})
    return PoolsPlan(
        {worker.name: _keep_causes(worker) for worker in workers},
        pools_unknown=True,
        actions=() if kubernetes.pools_unknown else notices,
        idle_nodes_since=idle_nodes_since,
    )


def _keep_causes(worker: Worker) -> Causes:
    kinds = worker.slurm.kinds & OF_POOL if worker.slurm else frozenset[str]()
    return dict.fromkeys(kinds, "requested by its pool before")


def find_refusals(kubernetes: KubernetesView) -> Mapping[str, str]:
    """Return the pools that claim pods of an older pool, and the reason. A deleting pool still has its pods."""
    labels: dict[str, str] = {}  # of the pools' pods, to the pool
    names: dict[str, str] = {}  # of the pods, to the pool
    refused: dict[str, str] = {}
    elastic: list[WorkerPool] = []
    for pool in sorted((kubernetes.pools or {}).values(), key=lambda pool: (pool.created, pool.uid)):
        pod_names = kubernetes.desired_pods.get(pool.name, {})
        if pool.label in labels:
            refused[pool.name] = f"{UNTOUCHED}: {labels[pool.label]}, older, has its label {pool.label}"
        elif shared := next((name for name in pod_names if name in names), "") or next(
            filter(pool.may_create, names), ""
        ):
            refused[pool.name] = f"{UNTOUCHED}: {names[shared]}, older, has {shared} too"
        elif other := next((older for older in elastic if any(map(older.may_create, pod_names))), None):
            refused[pool.name] = f"{UNTOUCHED}: {other.name}, older, may have one of their names"
        else:
            elastic += [pool] if pool.elastic else []
            labels[pool.label] = pool.name
            names |= dict.fromkeys(pod_names, pool.name)
    return refused


class PoolView:
    """One pool with its pods: what is missing, away, outdated or surplus, and the changes that follow."""

    def __init__(
        self,
        pool: WorkerPool,
        kubernetes: KubernetesView,
        workers: list[Worker],
        now: float,
        policy: Policy,
        plan: ElasticPlan | None = None,
        loans: lending.Loans = lending.NONE,
    ) -> None:
        self.pool, self.kubernetes, self.now, self.policy = pool, kubernetes, now, policy
        self.plan, self.loans = plan, loans
        self.names = plan.names if plan else kubernetes.desired_pods.get(pool.name, {})
        self.workers = {worker.name: worker for worker in workers if worker.pod.owner == pool.uid}
        self.absent = [name for name in self.names if name not in loans.guests_of and self._is_absent(name)]
        self.ownerless = [pod for pod in kubernetes.pods.values() if self._may_adopt(pod)]
        self.missing = frozenset(name for name in self.absent if self._is_open(self.names[name]))
        # Also pods with its label that it has not adopted yet; without lent ones, which are not missing.
        other_pools = {other.uid for other in (kubernetes.pools or {}).values()} - {pool.uid}
        own = [
            worker
            for worker in workers
            if worker.pod.owner not in other_pools and self._is_own(worker.pod) and worker.name not in loans.guests_of
        ]
        unwell = {worker.name for worker in own if worker.pod.deleting or not worker.pod.ready}
        self.away = self.missing | unwell
        present = (worker for worker in self.workers.values() if not worker.pod.deleting)
        self.stale = [stale for worker in present if (stale := self._stale(worker))]
        stale_names = {stale.worker.name for stale in self.stale}
        # Replaced and not undrained yet, or sent away by a person.
        self.not_back = frozenset(
            worker.name for worker in own if self._is_not_back(worker, is_stale=worker.name in stale_names)
        )

    def count_away(self) -> int:
        """Count the pods that are missing, not ready, or idle and kept from jobs."""
        return len(self.away | self.not_back)

    def _is_own(self, pod: KubePod) -> bool:
        return pod.owner == self.pool.uid or pod.pool == self.pool.label

    def _is_not_back(self, worker: Worker, *, is_stale: bool) -> bool:
        if worker.slurm is None or worker.slurm.record.busy:
            return False
        return not is_stale if is_leaving(worker.slurm) else LEAVE in worker.pod.annotations

    def _is_absent(self, name: str) -> bool:
        kubernetes = self.kubernetes
        return name not in kubernetes.pods and name not in kubernetes.others and f"Pod/{name}" not in kubernetes.unread

    def _is_open(self, node: str) -> bool:
        """Return whether a pod can start there; a pod for a closed Node is created once the Node is open."""
        return not node or takes_new_pods(self.kubernetes.nodes[node], self.policy, self.now)

    def _stale(self, worker: Worker) -> Stale | None:
        pod, pool = worker.pod, self.pool
        if pod.ended or pod.name in self.loans.guests_of:
            return None  # it leaves for its end or its loan
        if pod.name in self.names:
            if not pool.is_outdated(pod.template) or (
                worker.node and not takes_new_pods(worker.node, self.policy, self.now)
            ):
                return None
            return Stale(worker, "update", TEXTS["update"].format(pool.hash, pool.name))
        if self.plan is not None:
            return Stale(worker, "surplus", self.plan.going[pod.name])
        if pool.replicas is not None:
            return Stale(worker, "surplus", f"{pool.name} has {pool.replicas}")
        # A Node that cannot be read may still match.
        if any(key.startswith("Node/") for key in self.kubernetes.unread):
            return None
        return Stale(worker, "surplus", f"its Node does not match {pool.name}")

    def stale_in_turn(self) -> Iterator[Stale]:
        """Return the pods that go in turn; the surplus of an elastic pool needs no turn."""
        return (stale for stale in self.stale if self.plan is None or stale.kind != "surplus")

    def evict_never_placed(self, slurm: SlurmView) -> Iterator[Evict]:
        """Evict outdated pods that were never scheduled; the record of that name belongs to the predecessor."""
        for stale in self.stale:
            pod, node = stale.worker.pod, stale.worker.slurm
            if pod.node or not self.pool.max_unavailable or pod.name in slurm.unread:
                continue
            if node is None or (node.drained and not node.record.busy and slurm.holding(pod.name) == ()):
                yield Evict(*pod.identity, stale.reason, node.precondition if node else None)

    def replace_ended(self, slurm: SlurmView) -> Iterator[Evict | Notice]:
        present = [worker for worker in self.workers.values() if not worker.pod.deleting]
        yield from replace_ended(self.pool.status.ended, self._is_wanted, present, slurm, self.now)

    def _is_wanted(self, name: str) -> bool:
        """Return whether a pod of that name should exist, or an elastic pool may create it again."""
        return name in self.names or self.pool.may_create(name)

    def create_and_adopt(self) -> Iterator[CreatePod | Adopt | Notice]:
        for name in self.absent:
            if name in self.missing:
                yield CreatePod(name, self.names[name], self.pool)
        for name, pod in self.kubernetes.pods.items():
            if name in self.workers:
                continue
            if pod in self.ownerless:
                # The status first records which template adopted pods count as made of.
                if pod.template or self.pool.status.adopted:
                    yield Adopt(*pod.identity, self.pool)
            elif name in self.names:
                maker = self.pool.name
                yield Notice(
                    name, "pool", f"exists, but {maker} did not make it; delete it, and {maker} creates its own"
                )

    def _may_adopt(self, pod: KubePod) -> bool:
        """Return whether the pool adopts it; also a pod too many, which would otherwise stay for ever."""
        return is_ownerless(self.pool, pod, self.kubernetes) and self.names.get(pod.name, "") in ("", pod.node)

    def creation_failure(self, failed: Mapping[ChangeKey, RefusedChange]) -> str:
        """Return the API server's reason why the first missing pod could not be created."""
        creations = (CreatePod(name, self.names[name], self.pool) for name in sorted(self.missing) if failed)
        keys = (change_key(creation) for creation in creations)
        return next((failed[key].text.partition("\n")[0] for key in keys if key in failed), "")

    def write_status(self, refusal: str = "", failure: str = "") -> Iterator[NotePool]:
        """Write the status if it changes. `refusal`: why the pool is ignored. `failure`: why a pod is missing."""
        pool = self.pool
        present = [worker.pod for worker in self.workers.values() if not worker.pod.deleting]
        adopted = any(not pod.template for pod in [*present, *self.ownerless])
        status = PoolStatus(
            wanted=self.plan.wanted if self.plan else len(self.names.keys() - self.loans.guests_of.keys()),
            replicas=len(present),
            ready=sum(pod.ready for pod in present),
            updated=sum(not pool.is_outdated(pod.template) for pod in present),
            away=len(self.away),
            template=pool.hash,
            generation=pool.generation,
            conditions=(
                self._ready_condition(present, failure),
                self._updated_condition(refusal),
                *self._fits_condition(),
                *self._whole_condition(),
            ),
            adopted=(pool.status.adopted or pool.hash) if adopted else "",
            ended=count_ended(pool.status.ended, self._is_wanted, {pod.name: pod for pod in present}, self.now),
            last_good=pool.spec_text if len(pool.spec_text) <= crd.MOST_LAST_GOOD else "",
        )
        # A definition of an older version drops lastGood: alone it would be written again and again.
        if replace(status, last_good=pool.status.last_good) != pool.status:
            yield NotePool(pool.name, pool.version, status)

    def _ready_condition(self, present: list[KubePod], failure: str) -> PoolCondition:
        ended = [pod for pod in sorted(present, key=attrgetter("name")) if pod.ended]
        reasons = [
            *([failure] if failure else []),
            *(f"{pod.name} has ended: {plain_text(pod.ended)}" for pod in ended),
        ]
        unwell = sorted((self.away | {*self.absent}) & self.names.keys())
        message = "; ".join([f"not ready: {first_of(unwell)}", *reasons[:1]])
        return self._condition("Ready", not unwell, "AllReady", "NotReady", message)

    def _updated_condition(self, refusal: str) -> PoolCondition:
        mistake = self.pool.mistake
        if mistake:
            reason, message = "Mistake", f"{mistake}: the last good spec applies until you correct it"
        elif refusal:
            reason, message = "Refused", refusal
        else:
            reason, message = "Updating", self._describe_outdated()
        return self._condition("Updated", not message, "AllUpdated", reason, message)

    def _fits_condition(self) -> Iterator[PoolCondition]:
        if self.plan is not None and self.plan.short is not None:
            reason, message = self.plan.short
            yield self._condition("Fits", not reason, "Fits", reason, message)
        elif self.plan is not None:
            yield from (condition for condition in self.pool.status.conditions if condition.type == "Fits")

    def _whole_condition(self) -> Iterator[PoolCondition]:
        if self.loans.lends:
            yield self._condition("Whole", not self.loans.guests_of, "Whole", "Lends", self.loans.text)

    def _describe_outdated(self) -> str:
        surplus = sum(name not in self.names for name in self.workers)
        old = [
            name
            for name, worker in self.workers.items()
            if name in self.names and self.pool.is_outdated(worker.pod.template)
        ]
        texts = [f"of an older template: {first_of(sorted(old))}"] if old else []
        texts += [f"too many: {surplus}"] if surplus else []
        return "; ".join([*texts, *(["maxUnavailable is 0"] if texts and not self.pool.max_unavailable else [])])

    def _condition(self, type_: str, yes: bool, good: str, bad: str, message: str) -> PoolCondition:
        """Build a condition; the time of the last transition changes with the status alone."""
        new_condition = PoolCondition(type_, str(yes), good if yes else bad, "" if yes else message[: crd.MOST_MESSAGE])
        before = next((condition for condition in self.pool.status.conditions if condition.type == type_), None)
        return replace(
            new_condition, since=before.since if before and before.status == new_condition.status else int(self.now)
        )


# Ended pods, evicted by the kubelet or on a machine that was shut down: nothing restarts them, so they are replaced.
# If the next pod ends too, it is replaced after ever longer. The count is in the pool's status before the pod goes: if
# the fleet is killed between the two, the next leader counts it once.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 30.0, 3600.0
# After this time without an end the count restarts.
WELL_S = 600.0


def pause(times: int) -> float:
    """Seconds from a pod's end to its replacement, by how often that name has ended."""
    return 0.0 if times < 2 else backoff(FIRST_PAUSE_S, times - 2, LONGEST_PAUSE_S)


def count_ended(
    before: Iterable[EndedPod], wanted: Callable[[str], bool], pods: Mapping[str, KubePod], now: float
) -> tuple[EndedPod, ...]:
    """Update the counts. `wanted`: whether a pod of that name should exist, or may when a job asks."""
    entries = {
        entry.name: entry
        for entry in before
        if wanted(entry.name) and not _has_recovered(entry, pods.get(entry.name), now)
    }

    def is_new(name: str, pod: KubePod) -> bool:
        return bool(pod.ended) and wanted(name) and (entries[name].uid if name in entries else "") != pod.uid

    new = [pod for name, pod in pods.items() if is_new(name, pod)]
    # The number of counts is bounded: drop names whose pod is ready again.
    ready = sorted((entry.since, name) for name, entry in entries.items() if name in pods and pods[name].ready)
    for pod in sorted(new, key=lambda pod: pod.name):
        if pod.name not in entries and len(entries) >= crd.MOST_ENDED:
            if not ready:
                break
            del entries[ready.pop(0)[1]]
        times = entries[pod.name].times if pod.name in entries else 0
        entries[pod.name] = EndedPod(pod.name, pod.uid, times + 1, int(now), plain_text(pod.ended))
    return tuple(entries[name] for name in sorted(entries))


def _has_recovered(entry: EndedPod, pod: KubePod | None, now: float) -> bool:
    """Return whether the pod has been well, or its name unused, for long enough."""
    return (pod is None or pod.ready) and now - entry.since >= WELL_S + pause(entry.times)


def replace_ended(
    noted: Iterable[EndedPod], wanted: Callable[[str], bool], workers: Iterable[Worker], slurm: SlurmView, now: float
) -> Iterator[Evict | Notice]:
    """Evict ended pods once their end is in the pool's status (`noted`) and their pause is over."""
    entry_of = {entry.uid: entry for entry in noted}
    for worker in workers:
        pod = worker.pod
        if not pod.ended or (wanted(pod.name) and pod.uid not in entry_of):
            continue
        entry = entry_of[pod.uid] if wanted(pod.name) else None  # a pod too many is not replaced, so it needs no pause
        reason = plain_text(pod.ended)
        if not _is_idle(worker, slurm):
            stays = "stays until slurmctld has lost its slurmd too and no job is there"
            yield Notice(pod.name, "ended", f"has ended ({reason}), and {stays}")
        elif entry is None or now >= entry.since + pause(entry.times):
            node = worker.slurm
            yield Evict(*pod.identity, reason, node.precondition if node else None)
        else:
            text = f"has ended {entry.times} times ({reason}): replaced {pause(entry.times):g} s after its end"
            yield Notice(pod.name, "ended", text)


def _is_idle(worker: Worker, slurm: SlurmView) -> bool:
    """Return whether nothing runs there and nothing will, by Slurm's state: a pod can write its own phase."""
    node = worker.slurm
    if node is None:
        return worker.name not in slurm.unread
    # A node that does not respond for a moment may still have its jobs.
    quiet = node.drained or not node.record.responds
    return node.down or (quiet and not node.record.busy and slurm.holding(worker.name) == ())
