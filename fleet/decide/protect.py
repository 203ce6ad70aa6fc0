"""Which pods others may evict: those that are drained and that nothing holds. Every other pod may have a job at any
moment, and is protected from its first one: without the label a pool's PodDisruptionBudget allows no eviction.

So nothing needs to be faster than a job's start. The label goes before the drain does, and a person who resumes a node
by himself has one look of the fleet in which its pod is still free.
"""

from __future__ import annotations

from collections.abc import Mapping

from fleet.decide.actions import Free, Protect
from fleet.decide.causes import OF_POOL
from fleet.world.slurm import Slurm, SlurmNode
from fleet.world.world import Worker


def protect(worker: Worker, slurm: Slurm, causes: Mapping[str, str]) -> Free | Protect | None:
    pod, node = worker.pod, worker.slurm
    if pod.deleting:
        return None
    if node is None and causes.keys() & {"lost", *OF_POOL}:
        return None if pod.free else Free(pod.name, pod.uid, pod.version, None)
    if node is None and pod.lost and worker.name not in slurm.unread:
        return None  # it still is; a fleet that was started anew begins to count anew, and takes nothing back
    if node is None or not idles(node, causes):
        return Protect(pod.name, pod.uid, pod.version) if pod.free else None
    jobs = slurm.holding(worker.name)
    if pod.free:
        return Protect(pod.name, pod.uid, pod.version) if jobs else None
    return Free(pod.name, pod.uid, pod.version, node.seen) if jobs == () else None


def idles(node: SlurmNode, causes: Mapping[str, str]) -> bool:
    """Drained, as far as its record says without its jobs; and it is not about to be undrained."""
    return node.drained and not node.record.busy and bool(causes or not node.ours)
