"""Roll-outs: which outdated pods of a WorkerPool go next, and how far the roll-out of a StatefulSet is.

At most `maxUnavailable` pods of a pool are away, or idle and kept from jobs. Idle pods go first. As many busy pods are
kept from new jobs, so that they become idle; a pod with long jobs blocks the next pod only for a while. A pod that
becomes idle while there is no room takes jobs again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum

from fleet.decide.actions import Notice
from fleet.decide.causes import cause, is_leaving, is_past_deadline
from fleet.decide.drain import MOST_DRAINS_PER_CAUSE
from fleet.policy import Policy
from fleet.world.kubernetes import KubernetesView
from fleet.world.slurm import SlurmNode, SlurmView
from fleet.world.snapshot import Worker
from fleet.world.worker_pool import WorkerPool

# When a pod has waited for its jobs for longer, the next pod begins to wait.
PATIENT_S = 600.0


class TurnState(IntEnum):
    AWAY = 0  # missing already
    HELD = 1  # drained to go, and idle
    IDLE = 2
    WAITS = 3  # drained to go, and busy
    BUSY = 4


@dataclass(frozen=True, slots=True)
class Stale:
    """A pod that should go, the kind of its cause, and the reason."""

    worker: Worker
    kind: str
    reason: str


def plan_turns(
    pool: WorkerPool, stale: Iterable[Stale], away: int, slurm: SlurmView, now: float, policy: Policy
) -> Mapping[str, Mapping[str, str]]:
    """Return the drain causes of pods whose turn it is, and of pods that a person holds, for the report.

    `away`: how many pods of the pool are away already.
    """
    causes_by_pod: dict[str, Mapping[str, str]] = {}
    if not pool.max_unavailable:
        return causes_by_pod
    used, waiting = away, 0
    for candidate in _sort_by_turn(stale, slurm, now, policy):
        node, causes = candidate.worker.slurm, {candidate.kind: candidate.reason}
        state = turn_state(candidate.worker, slurm)
        if node is not None and is_held_by_others(node, candidate.kind):
            causes_by_pod[candidate.worker.name] = causes
            continue
        match state:
            case TurnState.HELD | TurnState.IDLE:
                if used >= pool.max_unavailable:
                    continue
                used += 1
            case TurnState.WAITS:
                waiting += node is not None and now - node.since < PATIENT_S
            case TurnState.BUSY:
                if waiting + (used if pool.deadline_s == 0 else 0) >= pool.max_unavailable:
                    continue
                waiting += 1
        if state is not TurnState.AWAY and used < pool.max_unavailable and _is_past_deadline(candidate, pool, now):
            used += 1
            causes |= cause("deadline", pool.deadline_s)
        causes_by_pod[candidate.worker.name] = causes
    return causes_by_pod


def _sort_by_turn(stale: Iterable[Stale], slurm: SlurmView, now: float, policy: Policy) -> list[Stale]:
    """Order the pods whose state is known: idle ones first.

    A pod that is drained for this cause keeps its place before one that is drained for another.
    """
    known = [candidate for candidate in stale if _is_known(candidate.worker, slurm, now, policy)]
    return sorted(
        known,
        key=lambda candidate: (
            turn_state(candidate.worker, slurm),
            not _is_drained_for(candidate),
            candidate.worker.name,
        ),
    )


def turn_state(worker: Worker, slurm: SlurmView) -> TurnState:
    if worker.pod.deleting or worker.slurm is None:
        return TurnState.AWAY
    leaves = is_leaving(worker.slurm)
    # Jobs run on whether or not the pod is ready.
    if worker.slurm.record.busy or slurm.holding(worker.name):
        return TurnState.WAITS if leaves else TurnState.BUSY
    if not worker.pod.ready:
        return TurnState.AWAY
    return TurnState.HELD if leaves else TurnState.IDLE


def _is_drained_for(stale: Stale) -> bool:
    node = stale.worker.slurm
    return node is not None and stale.kind in node.kinds


def _is_known(worker: Worker, slurm: SlurmView, now: float, policy: Policy) -> bool:
    """Return whether the pod's state is certain: a pod that Slurm does not know may be about to register."""
    if worker.slurm is not None:
        return True
    return worker.name not in slurm.unread and not worker.pod.ready and now - worker.pod.created >= policy.lost_s


def is_held_by_others(node: SlurmNode, kind: str) -> bool:
    """Return whether another author holds it, or a person has resumed it twice despite this cause."""
    if node.by_fleet:
        return False
    mark = node.mark
    return (
        node.drained or node.down or (mark is not None and mark.times >= MOST_DRAINS_PER_CAUSE and kind in mark.kinds)
    )


def _is_past_deadline(stale: Stale, pool: WorkerPool, now: float) -> bool:
    node = stale.worker.slurm
    if pool.deadline_s is None or node is None or not node.runs:
        return False
    return is_past_deadline(stale.worker.pod, node, {stale.kind}, pool.deadline_s, now)


def report_rollouts(workers: Iterable[Worker], kubernetes: KubernetesView) -> Iterator[Notice]:
    """For each StatefulSet with pods of an older template, report the next pod and what it waits for."""
    by_set: dict[str, list[Worker]] = {}
    for worker in workers:
        name, _, number = worker.name.rpartition("-")
        if number.isascii() and number.isdigit():
            by_set.setdefault(name, []).append(worker)
    for name, stateful_set in sorted((kubernetes.sets or {}).items()):
        pods = sorted(by_set.get(name, ()), key=lambda worker: -int(worker.name.rpartition("-")[2]))
        old = [worker for worker in pods if worker.pod.revision not in ("", stateful_set.revision)]
        if not stateful_set.revision or not old:
            continue
        far = f"rolls: {len(pods) - len(old)} of {stateful_set.replicas} pods have the new template"
        yield Notice(name, "roll", f"{far}; {_waits_for(pods, old[0])}")


def _waits_for(pods: list[Worker], following: Worker) -> str:
    """Say what the next pod waits for: a StatefulSet replaces pods from the highest number down, one at a time."""
    if following.pod.deleting:
        return f"{following.name} stops: {_job_state(following)}"
    unready = next((worker.name for worker in pods if not worker.pod.ready), "")
    if unready == following.name:
        return f"{following.name} is next, and is not ready"
    return f"{following.name} is next, once {unready} is ready" if unready else f"{following.name} is next"


def _job_state(worker: Worker) -> str:
    if worker.slurm is None:
        return "slurmctld does not know its node"
    return "it waits for its jobs" if worker.slurm.record.busy else "its node is idle"
