"""Drains of workers and of Slurm's nodes without pods, the budget that limits drains, and pods that Slurm lost.

The reconciler's fast path calls `find_urgent_drains`; `decide` calls the rest, in this order:

1. `count_budget` and `admit_causes`: while too many machines are unwell, no further worker is drained for such signs.
2. `decide_drain`: drain a worker with causes, or undrain it once they have ended.
3. `find_awake_orphans` and `decide_orphan`: drain, set down or remove a node whose pod is gone.
4. `restart_slurmd`, `find_lost_causes`, `remember_lost_pods`: restart, then replace, a ready pod that Slurm does not
   know.

The fleet never changes or lifts another author's drain. When a person lifts the fleet's drain while its cause remains,
the fleet drains once more, since the person may not have known of the cause. A second lift is respected.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass

from fleet.decide import causes as node_causes
from fleet.decide.actions import (
    Action,
    Change,
    ChangeKey,
    Drain,
    Evict,
    Forget,
    LostPod,
    Notice,
    Remove,
    RestartSlurmd,
    SeenVersions,
    Undrain,
    backoff,
    change_key,
)
from fleet.decide.causes import LIMITED, MAY_SLEEP, ON_FAST_PATH, SETS_DOWN, Causes, cause
from fleet.policy import Policy
from fleet.world import slurm
from fleet.world.kubernetes import RESTART, KubePod
from fleet.world.slurm import SlurmNode, SlurmView
from fleet.world.snapshot import FleetSnapshot, Unknown, Worker

MOST_DRAINS_PER_CAUSE = 2
DrainAction = Drain | Undrain | Forget | Notice | None


def find_urgent_drains(
    workers: Iterable[Worker], marks: Mapping[str, slurm.Mark], now: float, policy: Policy
) -> Iterator[Drain]:
    """Return the drains for the fast path: requested for one machine, and decided from Slurm's last known state.

    One cause of another kind leaves all of them to the loop, which knows the budget. The loop decides everything else
    that follows from the same causes.
    """
    for worker in workers:
        if worker.node is None or worker.slurm is None or worker.slurm.drained or worker.slurm.down:
            continue
        worker_causes = node_causes.find_causes(worker, policy, now)
        if worker_causes and worker_causes.keys() <= ON_FAST_PATH:
            action = decide_drain(worker, worker_causes, worker.slurm.mark or marks.get(worker.name))
            if isinstance(action, Drain):
                yield action


def decide_drain(worker: Worker, causes: Causes, mark: slurm.Mark | None) -> DrainAction:
    """Decide the drain of one worker. `mark`: Slurm's, or the remembered one if a person uses the node's comment."""
    if worker.slurm is None:
        return None
    return _hold(worker.slurm, causes, mark) if causes else _release(worker, worker.slurm)


def _hold(node: SlurmNode, causes: Causes, mark: slurm.Mark | None) -> DrainAction:
    """Drain a worker with causes, unless another author holds it or a person has lifted the drain twice."""
    if node.by_fleet:
        return _update_drain(node, causes, mark)
    kinds, reason = frozenset(causes), slurm.drain_reason(causes)
    if node.drained or node.down:
        state = "drained" if node.drained else "down"
        text = f"{state} by another actor ({node.reason or 'no reason'}) and stays so; also: {reason}"
        return Notice(node.name, "held", text)
    if mark is None or not kinds <= mark.kinds:
        return drain(node, causes, 1, kinds)
    if mark.times >= MOST_DRAINS_PER_CAUSE:
        text = f"resumed by a person {mark.times} times, so it takes jobs in spite of {reason}"
        return Notice(node.name, "lifted", text)
    return drain(node, causes, mark.times + 1, mark.kinds)


def _update_drain(node: SlurmNode, causes: Causes, mark: slurm.Mark | None) -> DrainAction:
    """Change the fleet's own drain if its kinds of causes have changed, or if jobs must end now."""
    if node.down:
        # The reason keeps the cause of the down state, by which the fleet knows later that it set the node down.
        causes = {**dict.fromkeys(node.kinds & SETS_DOWN, "and its jobs run elsewhere"), **causes}
    kinds, down = frozenset(causes), not node.down and must_end_jobs(node, causes)
    # Other texts for the same causes are not worth a new author and time in Slurm.
    if node.kinds - SETS_DOWN == kinds - SETS_DOWN and not down:
        return None
    return drain(node, causes, mark.times if mark else 1, kinds, down=down)


def must_end_jobs(node: SlurmNode, causes: Causes) -> bool:
    """Return whether to set the node down.

    A living slurmd registers again at once, so this is done while jobs run only.
    """
    return bool(causes.keys() & SETS_DOWN - {"deadline"}) or ("deadline" in causes and node.runs)


def drain(node: SlurmNode, causes: Causes, times: int, kinds: frozenset[str], *, down: bool = False) -> Drain:
    comment = slurm.mark_comment(slurm.Mark(times, kinds)) if slurm.is_free_comment(node.comment) else None
    return Drain(node.name, slurm.drain_reason(causes, times), comment, node.precondition, down)


def _release(worker: Worker, node: SlurmNode) -> DrainAction:
    """Undrain a worker without causes once its pod is ready, or remove the mark of a drain that is lifted already."""
    pod, machine = worker.pod, worker.node
    if not node.by_fleet or machine is None:
        # A person lifted the drain or replaced it with another: only the mark is the fleet's.
        return Forget(node.name, node.precondition) if slurm.mark_in_comment(node.comment) else None
    was_set_down = node.down and bool(node.kinds & SETS_DOWN)  # by the fleet, and no reason of Slurm's came since
    if was_set_down:
        # A pod becomes ready when slurmctld has heard its slurmd at its address, so the record is this pod's. A younger
        # pod cannot become ready while the node is down, and a resumed node gets no job before its slurmd answers.
        may_return = pod.ready or 0 < node.since < pod.created
    else:
        may_return = pod.ready and node.record.responds and not node.down
    if not may_return:
        return Notice(node.name, "waits", f"is undrained once its pod is ready: {node.reason}")
    if pod.free:
        return None  # still labelled as evictable: the label goes first
    seen = SeenVersions(pod.name, machine.name, pod.version, machine.version)
    comment = "" if slurm.is_free_comment(node.comment) else None
    return Undrain(node.name, comment, node.precondition, seen, was_set_down)


@dataclass(frozen=True, slots=True)
class Budget:
    """Workers that are or would be drained for signs of their machines, and their maximum."""

    counted: frozenset[str]
    most: int
    # Workers whose machine or pod is silent, but not yet for long enough to be drained.
    silent: frozenset[str] = frozenset()

    @property
    def paused(self) -> bool:
        """Return whether so many machines are unwell that the cause is probably elsewhere: drain no further worker.

        Silent machines count at once; otherwise the first of many would be drained before the limit is reached.
        """
        return len(self.counted | self.silent) > self.most


def count_budget(
    nodes: Mapping[str, tuple[SlurmNode | None, Causes]], policy: Policy, silent: Iterable[str] = ()
) -> Budget:
    """Count workers and nodes without pods. `silent`: those that are silent now, for any time."""
    counted = frozenset(name for name, (node, causes) in nodes.items() if _counts(node, causes))
    newly_silent = frozenset(name for name in silent if not _is_held(nodes[name][0]))
    return Budget(counted, policy.most_unwell(len(nodes)), newly_silent)


def _counts(node: SlurmNode | None, causes: Causes) -> bool:
    if node is None:
        return bool(causes.keys() & LIMITED)
    if node.by_fleet:
        # A node whose cause has ended takes no jobs until the undrain.
        return bool((causes.keys() | node.kinds) & LIMITED)
    return bool(causes.keys() & LIMITED) and not _is_held(node)


def _is_held(node: SlurmNode | None) -> bool:
    return node is not None and (node.drained or node.down)


def admit_causes(node: SlurmNode | None, causes: Causes, budget: Budget) -> Causes:
    """Return the causes that count now: in a pause, a machine's signs only if its worker is drained for them."""
    if not budget.paused:
        return causes
    before = node.kinds if node else frozenset[str]()
    return {kind: text for kind, text in causes.items() if kind not in LIMITED or kind in before}


def find_away(workers: Iterable[Worker]) -> dict[str, set[str]]:
    """Return the pods that are being deleted or not ready, by pool."""
    pods_by_pool: dict[str, set[str]] = {}
    for worker in workers:
        if worker.pod.deleting or not worker.pod.ready:
            pods_by_pool.setdefault(worker.pod.pool, set()).add(worker.name)
    return pods_by_pool


def share_places(changes: Collection[Change], refused: Container[ChangeKey], most: int) -> list[Change]:
    """Take the first `most` changes.

    Retries of refused changes get at most half of the places while new changes wait; otherwise a thousand refused
    changes would block the rest.
    """
    retries = [change for change in changes if change_key(change) in refused]
    postponed = {change_key(change) for change in retries[most // 2 :]}
    return sorted(changes, key=lambda change: change_key(change) in postponed)[:most]


# Orphans are nodes of Slurm without pods. The fleet drains them, sets them down, and removes those whose name will not
# come back.


def find_awake_orphans(snapshot: FleetSnapshot) -> Iterator[SlurmNode]:
    """Yield the orphans, except those that an elastic pool released and those whose machines are lent."""
    kubernetes = snapshot.kubernetes
    for node in snapshot.orphans():
        if isinstance(kubernetes, Unknown):
            yield node
            continue
        may_stay = is_asleep(node) and (kubernetes.is_elastic_name(node.name) or is_lent(node))
        is_beyond_maximum = is_removable(node) and kubernetes.will_exist(node.name) is False
        if not may_stay or is_beyond_maximum:
            yield node


def is_lent(node: SlurmNode) -> bool:
    """Return whether the fleet drained it to lend its machine."""
    return "lend" in node.kinds


def is_asleep(node: SlurmNode) -> bool:
    """Return whether it is idle and held only because its pod went: by the fleet, or by the pod itself as it ended."""
    by_fleet = node.by_fleet and node.kinds <= MAY_SLEEP
    return (node.drained or node.down) and not node.record.busy and (by_fleet or node.record.held_by_us)


def orphan_causes(absent: float, policy: Policy) -> Causes:
    """Return the cause to drain an orphan. `absent`: seconds without a pod, since a replaced pod is away briefly."""
    return cause("gone") if absent >= policy.gone_s else {}


def decide_orphan(node: SlurmNode, slurm: SlurmView, counted: Causes, *, will_exist: bool | None) -> Action | None:
    """Drain an orphan, set it down, or remove it. `counted`: the causes that count.

    Down only if slurmd does not answer either: a list of pods can be wrong, and a running job is evidence against it.
    """
    if will_exist is False and is_removable(node) and is_unclaimed(node, slurm):
        return Remove(node.name, node.precondition)
    if not counted:
        return None
    if node.by_fleet:
        if node.down or node.record.responds:
            return None
        return drain(node, counted, node.mark.times if node.mark else 1, frozenset(counted), down=True)
    return None if node.drained or node.down else drain(node, counted, 1, frozenset(counted))


def is_removable(node: SlurmNode) -> bool:
    """Return whether it is down and idle, held by the fleet or by its pod's init as the pod ended."""
    return node.down and not node.record.busy and (node.by_fleet or node.record.held_by_us)


def is_unclaimed(node: SlurmNode, slurm: SlurmView) -> bool:
    """Return whether no job or reservation names it: Slurm ends a job that names a node without a record."""
    return slurm.claims is not None and node.name not in slurm.claims and slurm.holding(node.name) == ()


# Ready pods that Slurm does not know: their record was deleted, and a slurmd registers only once. The fleet first
# restarts slurmd, which then registers again. If that does not help it replaces the pod: nothing runs on it, since a
# record with jobs cannot be deleted. Both are repeated, each time after twice as long.
MOST_PATIENCE_S = 3600.0
# Digits of a time; a longer annotation is a person's.
MOST_DIGITS = 12


def find_lost_causes(worker: Worker, slurm: SlurmView, lost: LostPod | None, now: float, policy: Policy) -> Causes:
    """Return the cause to replace a pod. The pod carries the time of the restart, so a new leader continues."""
    requested_at = _restart_time(worker.pod)
    if not _is_unknown(worker, slurm) or requested_at is None or not _is_due(lost, now, policy):
        return {}
    # A time in the future comes from a wrong clock and is ignored.
    if 0 <= now - requested_at < _patience_s(lost, policy):
        return {}
    earlier = f" (replaced before: {lost.times})" if lost and lost.times else ""
    return cause("lost", earlier)


def restart_slurmd(
    worker: Worker, slurm: SlurmView, lost: LostPod | None, now: float, policy: Policy
) -> Iterator[Action]:
    """Request a restart of a lost pod's slurmd, or withdraw the request once Slurm knows the pod."""
    pod, requested_at = worker.pod, _restart_time(worker.pod)
    if pod.deleting:
        return
    if worker.slurm is not None and requested_at is not None:
        yield RestartSlurmd(*pod.identity, None, worker.slurm.precondition)
    elif _is_unknown(worker, slurm) and requested_at is not None:
        text = (
            "Slurm does not know it: the fleet asked its slurmd to restart, and replaces the pod if that does not help"
        )
        yield Notice(pod.name, "lost", text)
    elif _is_unknown(worker, slurm) and _is_due(lost, now, policy):
        yield RestartSlurmd(*pod.identity, str(int(now)), None)


def _is_unknown(worker: Worker, slurm: SlurmView) -> bool:
    return worker.slurm is None and worker.name not in slurm.unread


def _restart_time(pod: KubePod) -> int | None:
    """Return the time at which the fleet requested a restart of slurmd."""
    text = pod.annotations.get(RESTART, "")
    return int(text) if text.isascii() and text.isdigit() and len(text) <= MOST_DIGITS else None


def _patience_s(lost: LostPod | None, policy: Policy) -> float:
    return backoff(policy.lost_s, lost.times if lost else 0, MOST_PATIENCE_S)


def _is_due(lost: LostPod | None, now: float, policy: Policy) -> bool:
    return lost is not None and now - lost.since >= _patience_s(lost, policy)


def remember_lost_pods(
    snapshot: FleetSnapshot, before: Mapping[str, LostPod], changes: Iterable[Change], now: float
) -> Mapping[str, LostPod]:
    """Remember the ready pods that Slurm does not know, and the replaced ones until it does."""
    if isinstance(snapshot.slurm, Unknown):
        return before
    replaced = {change.pod for change in changes if isinstance(change, Evict) and change.precondition is None}
    lost_pods = {}
    for worker in snapshot.workers():
        if not _is_unknown(worker, snapshot.slurm):
            continue
        lost = before.get(worker.name)
        if worker.name in replaced:
            lost_pods[worker.name] = LostPod(now, lost.times + 1 if lost else 1)
        elif lost is not None or worker.pod.ready:
            lost_pods[worker.name] = lost or LostPod(now)
    return lost_pods
