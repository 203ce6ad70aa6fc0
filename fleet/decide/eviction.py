"""Let pods go: which pods may be evicted, and when a pod that should leave is evicted: drained, and without a job."""

from __future__ import annotations

from collections.abc import Mapping

from fleet.decide.actions import Action, Evict, Free, Notice, Protect
from fleet.decide.causes import LEAVE, OF_POOL, TO_GO
from fleet.world.slurm import Slurm, SlurmNode
from fleet.world.snapshot import Worker

WHY = ("going", "lost", "surplus", "update", "lend")


def is_to_go(worker: Worker, causes: Mapping[str, str]) -> bool:
    return bool(causes.keys() & TO_GO) and not worker.pod.deleting


def protect(worker: Worker, slurm: Slurm, causes: Mapping[str, str]) -> Free | Protect | None:
    """Label a pod that may be evicted, or take the label away.

    A drained pod that no job holds may be evicted by anybody. Every other pod may get a job at any moment: without
    the label its pool's PodDisruptionBudget allows no eviction. The label goes before the drain does; after a person
    resumes a node, its pod stays evictable until the next pass.
    """
    pod, node = worker.pod, worker.slurm
    if pod.deleting:
        return None
    if node is None and causes.keys() & {"lost", *OF_POOL}:
        return None if pod.free else Free(pod.name, pod.uid, pod.version, None)
    if node is None and pod.lost and worker.name not in slurm.unread:
        return None  # it is still lost; a restarted operator counts anew, and takes nothing back
    if node is None or not _is_idle(node, causes):
        return Protect(pod.name, pod.uid, pod.version) if pod.free else None
    jobs = slurm.holding(worker.name)
    if pod.free:
        return Protect(pod.name, pod.uid, pod.version) if jobs else None
    return Free(pod.name, pod.uid, pod.version, node.precondition) if jobs == () else None


def _is_idle(node: SlurmNode, causes: Mapping[str, str]) -> bool:
    """Return whether the node is drained and idle by its record, and is not about to be undrained."""
    return node.drained and not node.record.busy and bool(causes or not node.by_fleet)


def leave(worker: Worker, slurm: Slurm, causes: Mapping[str, str], room: bool) -> Action | None:
    """Evict a pod that should leave, or say what it waits for. `room`: whether one more pod of its pool may be away."""
    if not is_to_go(worker, causes):
        return None
    name, node, pod = worker.name, worker.slurm, worker.pod
    for_pool = bool(causes.keys() & OF_POOL)
    if node is None:
        if "lost" not in causes and not for_pool:
            return Notice(name, "leave", "is to go, and Slurm does not know it: nobody can say whether it is idle")
    elif not node.drained or (not node.by_fleet and not causes.keys() & TO_GO - OF_POOL):
        return None  # the drain comes first; a pod that a person holds stays, if only its pool wants it to go
    elif not for_pool and (node.by_fleet or LEAVE not in pod.annotations) and pod.created >= node.since:
        # The pod is newer than the drain. Without a person's request for this very pod it is not evicted twice.
        return Notice(name, "leave", "has come back to where it is to go from, and is not evicted again")
    elif hindrance := _hindrance(node, slurm):
        return Notice(name, "leave", f"is to go, and {hindrance}")
    if not pod.free:
        return None  # its label comes first
    if not room:
        return Notice(name, "leave", "is to go, and waits for the other pods of its pool that are away")
    why = pod.annotations.get(LEAVE) or next((causes[kind] for kind in WHY if kind in causes), "drained and idle")
    return Evict(pod.name, pod.uid, pod.version, why, node.precondition if node else None)


def _hindrance(node: SlurmNode, slurm: Slurm) -> str:
    jobs = slurm.holding(node.name)
    if jobs is None:
        return "which jobs hold it is not known"
    if jobs:
        return f"waits for jobs {' '.join(jobs[:8])}"
    return "waits until it is idle" if node.record.busy else ""
