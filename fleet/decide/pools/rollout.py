"""Explain how far the roll-out of a StatefulSet is. Kubernetes does it; the operator only says what it waits for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum

from fleet import reasons
from fleet.decide.actions import Notice
from fleet.decide.causes import TO_GO, late
from fleet.decide.drain import MOST_TIMES
from fleet.policy import Policy
from fleet.world.kubernetes import Kubernetes
from fleet.world.slurm import Slurm, SlurmNode
from fleet.world.snapshot import Worker
from fleet.world.worker_pool import WorkerPool

# A pod that waits for its jobs for longer does not keep others from beginning to wait.
PATIENT_S = 600.0


class TurnState(IntEnum):
    AWAY = 0  # it is missed already
    HELD = 1  # drained for this, and idle
    IDLE = 2
    WAITS = 3  # drained for this, and busy
    BUSY = 4


@dataclass(frozen=True, slots=True)
class Stale:
    """One that is to go, and why."""

    worker: Worker
    kind: str
    why: str


def turns(
    pool: WorkerPool, stale: Iterable[Stale], away: int, slurm: Slurm, now: float, policy: Policy
) -> Mapping[str, Mapping[str, str]]:
    """The causes of those whose turn it is, and of those that others hold: it is told. `away`: so many are already."""
    found: dict[str, Mapping[str, str]] = {}
    if not pool.most:
        return found
    used, waiting = away, 0
    known = [one for one in stale if _known(one.worker, slurm, now, policy)]
    # Who is held for this keeps his place from who was held for something else that needed none.
    for one in sorted(known, key=lambda one: (turn(one.worker, slurm), not _for(one), one.worker.name)):
        node, said = one.worker.slurm, {one.kind: one.why}
        if node is not None and held_by_others(node, one.kind):
            found[one.worker.name] = said
            continue
        match turn(one.worker, slurm):
            case TurnState.HELD | TurnState.IDLE:
                if used >= pool.most:
                    continue
                used += 1
            case TurnState.WAITS:
                waiting += node is not None and now - node.since < PATIENT_S
            case TurnState.BUSY:
                if waiting + (used if pool.within_s == 0 else 0) >= pool.most:
                    continue
                waiting += 1
        if turn(one.worker, slurm) is not TurnState.AWAY and _over(one, pool, now) and used < pool.most:
            used += 1
            said["deadline"] = f"its jobs had {pool.within_s:g} s"
        found[one.worker.name] = said
    return found


def turn(worker: Worker, slurm: Slurm) -> TurnState:
    if worker.pod.deleting or worker.slurm is None:
        return TurnState.AWAY
    held = is_to_go(worker.slurm)
    # Its jobs run on whether or not it is ready.
    if worker.slurm.record.busy or slurm.holding(worker.name):
        return TurnState.WAITS if held else TurnState.BUSY
    if not worker.pod.ready:
        return TurnState.AWAY
    return TurnState.HELD if held else TurnState.IDLE


def is_to_go(node: SlurmNode) -> bool:
    """Drained for that, whoever wants it: for its pool or by itself."""
    return node.ours and bool(reasons.kinds(node.reason) & TO_GO)


def _for(one: Stale) -> bool:
    node = one.worker.slurm
    return node is not None and node.ours and one.kind in reasons.kinds(node.reason)


def _known(worker: Worker, slurm: Slurm, now: float, policy: Policy) -> bool:
    """One that Slurm does not know may be about to register, or is a matter of its own."""
    if worker.slurm is not None:
        return True
    return worker.name not in slurm.unread and not worker.pod.ready and now - worker.pod.created >= policy.lost_s


def held_by_others(node: SlurmNode, kind: str) -> bool:
    """Held by somebody else, or resumed by a person who has said it twice."""
    if node.ours:
        return False
    mark = node.mark
    return node.drained or node.down or (mark is not None and mark.times >= MOST_TIMES and kind in mark.kinds)


def _over(one: Stale, pool: WorkerPool, now: float) -> bool:
    node = one.worker.slurm
    if pool.within_s is None or node is None or not node.runs:
        return False
    return late(one.worker.pod, node, {one.kind}, pool.within_s, now)


def rollouts(workers: Iterable[Worker], kubernetes: Kubernetes) -> Iterator[Notice]:
    """Say for each StatefulSet with pods of an older template which pod is next, and what keeps it."""
    by_set: dict[str, list[Worker]] = {}
    for worker in workers:
        name, _, number = worker.name.rpartition("-")
        if number.isascii() and number.isdigit():
            by_set.setdefault(name, []).append(worker)
    for name, known in sorted((kubernetes.sets or {}).items()):
        pods = sorted(by_set.get(name, ()), key=lambda worker: -int(worker.name.rpartition("-")[2]))
        old = [worker for worker in pods if worker.pod.revision not in ("", known.revision)]
        if not known.revision or not old:
            continue
        done = len(pods) - len(old)
        far = f"rolls: {done} of {known.replicas} pods have the new template"
        yield Notice(name, "roll", f"{far}; {_waits_for(pods, old[0])}")


def _waits_for(pods: list[Worker], following: Worker) -> str:
    """A StatefulSet replaces its pods from the highest number down, and each one after the previous one is ready."""
    if following.pod.deleting:
        return f"{following.name} stops: {_jobs(following)}"
    unready = next((worker.name for worker in pods if not worker.pod.ready), "")
    if unready == following.name:
        return f"{following.name} is next, and is not ready"
    return f"{following.name} is next, once {unready} is ready" if unready else f"{following.name} is next"


def _jobs(worker: Worker) -> str:
    if worker.slurm is None:
        return "slurmctld does not know its node"
    return "it waits for its jobs" if worker.slurm.record.busy else "its node is idle"
