"""A pod that is to go, goes when it is drained and nothing runs on it: not a moment earlier."""

from __future__ import annotations

from fleet.decide.actions import Action, Evict, Tell
from fleet.decide.causes import LEAVE
from fleet.world.slurm import Slurm
from fleet.world.world import Worker


def wants_to_leave(worker: Worker) -> bool:
    return LEAVE in worker.pod.annotations and not worker.pod.deleting


def leave(worker: Worker, slurm: Slurm, room: bool) -> Action | None:
    """`room`: whether one more pod of its pool may be away."""
    if not wants_to_leave(worker):
        return None
    name, node = worker.name, worker.slurm
    if node is None:
        return Tell(name, "leave", "is to go, and Slurm does not know it: nobody can say whether it is idle")
    if not node.drained:
        return None  # the drain comes first
    jobs = slurm.holding(name)
    if jobs is None:
        return Tell(name, "leave", "is to go, and which jobs hold it is not known")
    if jobs:
        return Tell(name, "leave", f"is to go, and waits for jobs {' '.join(jobs[:8])}")
    if node.record.busy:
        return Tell(name, "leave", "is to go, and waits until it is idle")
    if not worker.pod.free:
        return None  # its label comes first
    if not room:
        return Tell(name, "leave", "is to go, and waits for the other pods of its pool that are away")
    why = worker.pod.annotations[LEAVE]
    return Evict(worker.pod.name, worker.pod.uid, worker.pod.version, why or "drained and idle", node.seen)
