"""Plan every WorkerPool's pods: creations, adoptions, drains and the status.

`plan_pools` makes a `PoolView` for each pool: its target (`autoscale.py` for an elastic pool), its pods and their
Slurm nodes. A pool that shrinks, updates (`rollout.py`) or lends machines (`lending.py`) gives its pods causes for a
drain; eviction follows once their jobs have ended. Pods that ended by themselves are replaced. The fleet leaves a pool
unchanged while its object or its pods are unknown.
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
from fleet.decide.causes import LEAVE, OF_POOL, TEXTS, is_leaving, takes_new_pods
from fleet.decide.rollout import Stale, plan_turns
from fleet.policy import Policy
from fleet.world.kubernetes import KubePod, KubernetesView
from fleet.world.slurm import SlurmView, plain_text
from fleet.world.snapshot import Worker
from fleet.world.worker_pool import EndedPod, PoolCondition, PoolStatus, WorkerPool

# Ended pods, evicted by the kubelet or on a machine that was shut down: nothing restarts them, so they are replaced.
# If the next pod ends too, it is replaced after ever longer. The count is in the pool's status before the pod goes: if
# the fleet is killed between the two, the next leader counts it once.
FIRST_S, LONGEST_S = 30.0, 3600.0
# After this time without an end the count restarts.
WELL_S = 600.0


def pause(times: int) -> float:
    """Seconds from a pod's end to its replacement, by how often that name has ended."""
    return 0.0 if times < 2 else backoff(FIRST_S, times - 2, LONGEST_S)


def count_ended(
    before: Iterable[EndedPod], wanted: Callable[[str], bool], pods: Mapping[str, KubePod], now: float
) -> tuple[EndedPod, ...]:
    """Update the counts. `wanted`: whether a pod of that name should exist, or may when a job asks."""
    entries = {pod.name: pod for pod in before if wanted(pod.name) and not _is_past(pod, pods.get(pod.name), now)}

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


def _is_past(entry: EndedPod, pod: KubePod | None, now: float) -> bool:
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
        times = entry_of[pod.uid].times if wanted(pod.name) else 1
        reason, due = plain_text(pod.ended), not wanted(pod.name) or now >= entry_of[pod.uid].since + pause(times)
        if not _is_idle(worker, slurm):
            stays = "stays until slurmctld has lost its slurmd too and no job is there"
            yield Notice(pod.name, "ended", f"has ended ({reason}), and {stays}")
        elif due:
            node = worker.slurm
            yield Evict(*pod.identity, reason, node.precondition if node else None)
        else:
            yield Notice(
                pod.name, "ended", f"has ended {times} times ({reason}): replaced {pause(times):g} s after its end"
            )


def _is_idle(worker: Worker, slurm: SlurmView) -> bool:
    """Return whether nothing runs there and nothing will, by Slurm's state: a pod can write its own phase."""
    node = worker.slurm
    if node is None:
        return worker.name not in slurm.unread
    # A node that does not respond for a moment may still have its jobs.
    quiet = node.drained or not node.record.responds
    return node.down or (quiet and not node.record.busy and slurm.holding(worker.name) == ())


Causes = Mapping[str, str]
UNTOUCHED = "the fleet touches none of its pods"


@dataclass(frozen=True, slots=True)
class PoolsPlan:
    """The plan for all pools in one pass."""

    causes: Mapping[str, Causes] = field(default_factory=dict)
    # Pools are not known now: existing drains stay, and no pod is evicted, since missing pods cannot be counted.
    pools_unknown: bool = False
    # By the label of its pods: how many pods of a pool may be away, and which are missing.
    most: Mapping[str, int] = field(default_factory=dict)
    missing: Mapping[str, frozenset[str]] = field(default_factory=dict)
    actions: tuple[Action, ...] = ()
    # Pods that their shrinking or lending pool does not miss.
    spare: frozenset[str] = frozenset()
    # Pods that must not go now: it is not known which jobs name them.
    maybe_claimed: frozenset[str] = frozenset()
    idle_nodes_since: Mapping[str, float] = field(default_factory=dict)

    def room(self, worker: Worker, away: int, policy: Policy) -> bool:
        """Return whether one more pod of the pool may be away. `away`: its other pods that exist and are not well."""
        label = worker.pod.pool
        if worker.name in self.spare or (label in self.most and not worker.pod.ready):
            return True  # spare, or missing already
        return away + len(self.missing.get(label, ())) < self.most.get(label, policy.away)


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
        text = f"{UNTOUCHED}, because it cannot list the StatefulSets, which may make them"
        notices = tuple(Notice(name, "pool", text) for name in kubernetes.pools or {})
        before = {worker.name: _existing_causes(worker) for worker in workers}
        return PoolsPlan(
            before,
            pools_unknown=True,
            actions=() if kubernetes.pools_unknown else notices,
            idle_nodes_since=idle_nodes_since,
        )
    causes: dict[str, Causes] = {}
    most: dict[str, int] = {}
    missing: dict[str, frozenset[str]] = {}
    actions: list[Action] = []
    spare: set[str] = set()
    maybe_claimed: set[str] = set()
    # Sorted by name: a write of its status changes a pool's place in the watch's order.
    live_pools = [pool for _, pool in sorted((kubernetes.pools or {}).items()) if not pool.deleting]
    refused, sets = refusals(kubernetes), kubernetes.sets or {}
    working = [pool for pool in live_pools if pool.name not in sets and pool.name not in refused]
    plans, idle_nodes_since = plan_elastic(working, workers, kubernetes, slurm, idle_nodes_since, now)
    loans = lending.plan_loans(working, workers, kubernetes, slurm, now, policy)
    actions += lending.unknown_lenders({pool.label for pool in live_pools}, policy)
    for pool in live_pools:
        if pool.mistake:
            actions.append(
                Notice(pool.name, "pool", f"{pool.mistake}: its last good spec applies until you correct it")
            )
        if refusal := refused.get(pool.name):
            view = PoolView(pool, kubernetes, workers, now, policy)
            actions += [Notice(pool.name, "pool", refusal), *view.note(refusal)]
            continue
        if pool.name in sets:
            actions.append(Notice(pool.name, "pool", f"{UNTOUCHED} while a StatefulSet of its name makes them"))
            continue
        plan, loan = plans.get(pool.name), loans.get(pool.name, lending.NONE)
        view = PoolView(pool, kubernetes, workers, now, policy, plan, loan)
        causes |= plan_turns(pool, view.in_turn(), len(view.away | view.not_back), slurm, now, policy)
        if plan is not None:
            causes |= {name: {"surplus": refusal} for name, refusal in plan.going.items()}
            spare |= plan.going.keys()
            maybe_claimed |= plan.going.keys() if slurm.claims is None else set()
            actions += plan.notices
        causes |= loan.causes
        spare |= loan.guests_of.keys()
        actions += loan.notices
        most[pool.label], missing[pool.label] = pool.max_unavailable, view.missing
        actions += [*view.never_placed(slurm), *view.ended(slurm), *view.to_come()]
        if not_made := view.not_made(failed or {}):
            actions.append(Notice(pool.name, "pool", not_made))
        actions += view.note(failed=not_made)
    return PoolsPlan(
        causes, False, most, missing, tuple(actions), frozenset(spare), frozenset(maybe_claimed), idle_nodes_since
    )


def _existing_causes(worker: Worker) -> Causes:
    kinds = worker.slurm.kinds & OF_POOL if worker.slurm else frozenset[str]()
    return dict.fromkeys(kinds, "requested by its pool before")


def refusals(kubernetes: KubernetesView) -> Mapping[str, str]:
    """Return the pools that claim pods of an older pool, and why. A deleting pool still has its pods."""
    labels: dict[str, str] = {}
    names: dict[str, str] = {}
    refused: dict[str, str] = {}
    elastic: list[WorkerPool] = []
    for pool in sorted((kubernetes.pools or {}).values(), key=lambda pool: (pool.created, pool.uid)):
        pod_names = kubernetes.desired_pods.get(pool.name, {})
        if pool.label in labels:
            refused[pool.name] = f"{UNTOUCHED}: {labels[pool.label]}, older, has its label {pool.label}"
        elif both := next((name for name in pod_names if name in names), "") or next(
            filter(pool.may_create, names), ""
        ):
            refused[pool.name] = f"{UNTOUCHED}: {names[both]}, older, has {both} too"
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
        others = {other.uid for other in (kubernetes.pools or {}).values()} - {pool.uid}
        own = [
            worker
            for worker in workers
            if worker.pod.owner not in others and self._is_own(worker.pod) and worker.name not in loans.guests_of
        ]
        unwell = {worker.name for worker in own if worker.pod.deleting or not worker.pod.ready}
        self.away = self.missing | unwell
        present = (worker for worker in self.workers.values() if not worker.pod.deleting)
        self.stale = [stale for worker in present if (stale := self._stale(worker))]
        to_go = {stale.worker.name for stale in self.stale}
        # Replaced and not undrained yet, or sent away by a person.
        self.not_back = frozenset(worker.name for worker in own if self._is_kept(worker, worker.name in to_go))

    def _is_own(self, pod: KubePod) -> bool:
        return pod.owner == self.pool.uid or pod.pool == self.pool.label

    def _is_kept(self, worker: Worker, stale: bool) -> bool:
        if worker.slurm is None or worker.slurm.record.busy:
            return False
        return not stale if is_leaving(worker.slurm) else LEAVE in worker.pod.annotations

    def _is_absent(self, name: str) -> bool:
        kubernetes = self.kubernetes
        return name not in kubernetes.pods and name not in kubernetes.others and f"Pod/{name}" not in kubernetes.unread

    def _is_open(self, node: str) -> bool:
        """Return whether a pod can start there; a pod for a closed Node is created once the Node is open."""
        return not node or takes_new_pods(self.kubernetes.nodes[node], self.policy, self.now)

    def _stale(self, worker: Worker) -> Stale | None:
        pod, pool = worker.pod, self.pool
        if pod.ended or pod.name in self.loans.guests_of:
            return None  # it leaves for that reason
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
        # Whether a Node that cannot be read still matches is not known.
        if any(key.startswith("Node/") for key in self.kubernetes.unread):
            return None
        return Stale(worker, "surplus", f"its Node does not match {pool.name}")

    def in_turn(self) -> Iterator[Stale]:
        """Return the pods that go in turn; the surplus of an elastic pool needs no turn."""
        return (stale for stale in self.stale if self.plan is None or stale.kind != "surplus")

    def never_placed(self, slurm: SlurmView) -> Iterator[Evict]:
        """Evict outdated pods that were never scheduled; the record of that name belongs to the predecessor."""
        for stale in self.stale:
            pod, node = stale.worker.pod, stale.worker.slurm
            if pod.node or not self.pool.max_unavailable or pod.name in slurm.unread:
                continue
            if node is None or (node.drained and not node.record.busy and slurm.holding(pod.name) == ()):
                yield Evict(*pod.identity, stale.why, node.precondition if node else None)

    def ended(self, slurm: SlurmView) -> Iterator[Evict | Notice]:
        present = [worker for worker in self.workers.values() if not worker.pod.deleting]
        yield from replace_ended(self.pool.status.ended, self._is_to_be, present, slurm, self.now)

    def _is_to_be(self, name: str) -> bool:
        """Return whether a pod of that name should exist, or an elastic pool may create it again."""
        return name in self.names or self.pool.may_create(name)

    def to_come(self) -> Iterator[CreatePod | Adopt | Notice]:
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
                yield Notice(
                    name,
                    "pool",
                    f"exists, but {self.pool.name} did not make it; delete it, and {self.pool.name} creates its own",
                )

    def _may_adopt(self, pod: KubePod) -> bool:
        """Return whether the pool adopts it; also a pod too many, which would otherwise stay for ever."""
        return is_ownerless(self.pool, pod, self.kubernetes) and self.names.get(pod.name, "") in ("", pod.node)

    def not_made(self, failed: Mapping[ChangeKey, RefusedChange]) -> str:
        """Return the API server's reason why the first missing pod could not be created."""
        creations = (CreatePod(name, self.names[name], self.pool) for name in sorted(self.missing) if failed)
        keys = (change_key(creation) for creation in creations)
        return next((failed[key].text.partition("\n")[0] for key in keys if key in failed), "")

    def note(self, refused: str = "", failed: str = "") -> Iterator[NotePool]:
        """Write the status if it changes. `refused`: why the fleet ignores the pool. `failed`: why a pod is missing."""
        pool = self.pool
        present = [worker.pod for worker in self.workers.values() if not worker.pod.deleting]
        adopted = any(not pod.template for pod in [*present, *self.ownerless])
        mistake = f"{pool.mistake}: the last good spec applies until you correct it" if pool.mistake else ""
        outdated = mistake or refused or self._outdated()
        behind = "Mistake" if mistake else "Refused" if refused else "Updating"
        ended = [pod for pod in sorted(present, key=attrgetter("name")) if pod.ended]
        causes = [*([failed] if failed else []), *(f"{pod.name} has ended: {plain_text(pod.ended)}" for pod in ended)]
        unwell = sorted((self.away | {*self.absent}) & self.names.keys())
        not_ready = "; ".join([f"not ready: {first_of(unwell)}", *causes[:1]])
        status = PoolStatus(
            wanted=self.plan.wanted if self.plan else len(self.names.keys() - self.loans.guests_of.keys()),
            replicas=len(present),
            ready=sum(pod.ready for pod in present),
            updated=sum(not pool.is_outdated(pod.template) for pod in present),
            away=len(self.away),
            template=pool.hash,
            generation=pool.generation,
            conditions=(
                self._condition("Ready", not unwell, "AllReady", "NotReady", not_ready),
                self._condition("Updated", not outdated, "AllUpdated", behind, outdated),
                *self._fits(),
                *self._whole(),
            ),
            adopted=(pool.status.adopted or pool.hash) if adopted else "",
            ended=count_ended(pool.status.ended, self._is_to_be, {pod.name: pod for pod in present}, self.now),
            last_good=pool.spec_text if len(pool.spec_text) <= crd.MOST_LAST_GOOD else "",
        )
        # A definition of an older version drops lastGood: alone it would be written again and again.
        if replace(status, last_good=pool.status.last_good) != pool.status:
            yield NotePool(pool.name, pool.version, status)

    def _fits(self) -> Iterator[PoolCondition]:
        if self.plan is not None and self.plan.short is not None:
            reason, message = self.plan.short
            yield self._condition("Fits", not reason, "Fits", reason, message)
        elif self.plan is not None:
            yield from (condition for condition in self.pool.status.conditions if condition.type == "Fits")

    def _whole(self) -> Iterator[PoolCondition]:
        if self.loans.lends:
            yield self._condition("Whole", not self.loans.guests_of, "Whole", "Lends", self.loans.text)

    def _outdated(self) -> str:
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
