"""Whose turn it is to be replaced, or to go: of a pool no more than `maxUnavailable` at a time are away, or idle and
kept from jobs.

What is idle goes first. Of those with jobs as many are kept from new ones, so that they get idle; one whose jobs take
long keeps the others from that for a while only. One that gets idle when there is no room takes jobs again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum

from fleet import words
from fleet.decide.causes import TO_GO, late
from fleet.decide.hold import MOST_TIMES
from fleet.policy import Policy
from fleet.world.pool import WorkerPool
from fleet.world.slurm import Slurm, SlurmNode
from fleet.world.world import Worker

# A pod that waits for its jobs for longer does not keep others from beginning to wait.
PATIENT_S = 600.0


class Turn(IntEnum):
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
            case Turn.HELD | Turn.IDLE:
                if used >= pool.most:
                    continue
                used += 1
            case Turn.WAITS:
                waiting += node is not None and now - node.since < PATIENT_S
            case Turn.BUSY:
                if waiting + (used if pool.within_s == 0 else 0) >= pool.most:
                    continue
                waiting += 1
        if turn(one.worker, slurm) is not Turn.AWAY and _over(one, pool, now) and used < pool.most:
            used += 1
            said["deadline"] = f"its jobs had {pool.within_s:g} s"
        found[one.worker.name] = said
    return found


def turn(worker: Worker, slurm: Slurm) -> Turn:
    if worker.pod.deleting or worker.slurm is None:
        return Turn.AWAY
    held = is_to_go(worker.slurm)
    # Its jobs run on whether or not it is ready.
    if worker.slurm.record.busy or slurm.holding(worker.name):
        return Turn.WAITS if held else Turn.BUSY
    if not worker.pod.ready:
        return Turn.AWAY
    return Turn.HELD if held else Turn.IDLE


def is_to_go(node: SlurmNode) -> bool:
    """Drained for that, whoever wants it: for its pool or by itself."""
    return node.ours and bool(words.kinds(node.reason) & TO_GO)


def _for(one: Stale) -> bool:
    node = one.worker.slurm
    return node is not None and node.ours and one.kind in words.kinds(node.reason)


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
