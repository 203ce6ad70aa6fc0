"""A worker's drain in Slurm, decided from its causes in Kubernetes, and the budget that limits drains at a time.

Never changes or lifts another author's drain.

When a person lifts the fleet's drain while its cause remains, the fleet drains once more, since the person may not have
known of the cause. A second lift is respected.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass

from fleet import reasons
from fleet.decide import causes as node_causes
from fleet.decide.actions import Change, Drain, Forget, Key, Notice, SeenVersions, Undrain, action_key
from fleet.decide.causes import LIMITED, ON_FAST_PATH, SETS_DOWN
from fleet.policy import Policy
from fleet.world.slurm import SlurmNode
from fleet.world.snapshot import Worker

MOST_DRAINS_PER_CAUSE = 2
DrainAction = Drain | Undrain | Forget | Notice | None


def urgent_drains(
    workers: Iterable[Worker], marks: Mapping[str, reasons.Mark], now: float, policy: Policy
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


def decide_drain(worker: Worker, causes: Mapping[str, str], mark: reasons.Mark | None) -> DrainAction:
    """Decide the drain of one worker. `mark`: Slurm's, or the remembered one if a person uses the node's comment."""
    if worker.slurm is None:
        return None
    return _hold(worker.slurm, causes, mark) if causes else _release(worker, worker.slurm)


def _hold(node: SlurmNode, causes: Mapping[str, str], mark: reasons.Mark | None) -> DrainAction:
    if node.by_fleet:
        if node.down:
            # The reason keeps the cause of the down state, by which the fleet knows later that it set the node down.
            causes = {**dict.fromkeys(node.kinds & SETS_DOWN, "and its jobs run elsewhere"), **causes}
        kinds, down = frozenset(causes), not node.down and must_end_jobs(node, causes)
        # Other texts for the same causes are not worth a new author and time in Slurm.
        if node.kinds - SETS_DOWN == kinds - SETS_DOWN and not down:
            return None
        return drain(node, causes, mark.times if mark else 1, kinds, down=down)
    kinds, reason = frozenset(causes), reasons.reason(causes)
    if node.drained or node.down:
        state = "drained" if node.drained else "down"
        return Notice(
            node.name, "held", f"{state} by another actor ({node.reason or 'no reason'}) and stays so; also: {reason}"
        )
    if mark is None or not kinds <= mark.kinds:
        return drain(node, causes, 1, kinds)
    if mark.times >= MOST_DRAINS_PER_CAUSE:
        return Notice(node.name, "lifted", f"resumed by a person {mark.times} times: takes jobs in spite of {reason}")
    return drain(node, causes, mark.times + 1, mark.kinds)


def must_end_jobs(node: SlurmNode, causes: Mapping[str, str]) -> bool:
    """Return whether to set the node down.

    A living slurmd registers again at once, so this is done while jobs run only.
    """
    return bool(causes.keys() & SETS_DOWN - {"deadline"}) or ("deadline" in causes and node.runs)


def drain(
    node: SlurmNode, causes: Mapping[str, str], times: int, kinds: frozenset[str], *, down: bool = False
) -> Drain:
    comment = reasons.comment(reasons.Mark(times, kinds)) if reasons.free(node.comment) else None
    return Drain(node.name, reasons.reason(causes, times), comment, node.precondition, down)


def _release(worker: Worker, node: SlurmNode) -> DrainAction:
    pod, machine = worker.pod, worker.node
    if node.by_fleet and machine is not None:
        was_set_down = node.down and bool(node.kinds & SETS_DOWN)  # by the fleet, and no reason of Slurm's came since
        # A pod becomes ready when slurmctld has heard its slurmd at its address, so the record is this pod's. A younger
        # pod cannot become ready while the node is down, and a resumed node gets no job before its slurmd answers.
        back = pod.ready or 0 < node.since < pod.created
        if not (back if was_set_down else pod.ready and node.record.responds and not node.down):
            return Notice(node.name, "waits", f"is undrained once its pod is ready: {node.reason}")
        if pod.free:
            return None  # still labelled as evictable: the label goes first
        at = SeenVersions(pod.name, machine.name, pod.version, machine.version)
        comment = "" if reasons.free(node.comment) else None
        return Undrain(node.name, comment, node.precondition, at, was_set_down)
    # A person lifted the drain or replaced it with another: only the mark is the fleet's.
    return Forget(node.name, node.precondition) if reasons.marked(node.comment) else None


Causes = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Budget:
    """Workers that are or would be drained for signs of their machines, and their maximum."""

    against: frozenset[str]
    most: int
    # Workers whose machine or pod is silent, but not yet for long enough to be drained.
    soon: frozenset[str] = frozenset()

    @property
    def paused(self) -> bool:
        """Return whether so many machines are unwell that the cause is probably elsewhere: drain no further worker.

        Silent machines count at once; otherwise the first of many would be drained before the limit is reached.
        """
        return len(self.against | self.soon) > self.most


def count_budget(
    nodes: Mapping[str, tuple[SlurmNode | None, Causes]], policy: Policy, silent: Iterable[str] = ()
) -> Budget:
    """Count workers and nodes without pods. `silent`: those that are silent now, for any time."""
    against = frozenset(name for name, (node, causes) in nodes.items() if _counts(node, causes))
    soon = frozenset(name for name in silent if not _is_held(nodes[name][0]))
    return Budget(against, max(1, int(len(nodes) * policy.share)), soon)


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
    """Return the causes that count now.

    During a pause, machine signs count only if the worker is drained for them already.
    """
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


def share_places(changes: Collection[Change], refused: Container[Key], most: int) -> list[Change]:
    """Take the first `most` changes.

    Retries of refused changes get at most half of the places while new changes wait; otherwise a thousand refused
    changes would block the rest.
    """
    retries = [change for change in changes if action_key(change) in refused]
    later = {action_key(change) for change in retries[most // 2 :]}
    return sorted(changes, key=lambda change: action_key(change) in later)[:most]
