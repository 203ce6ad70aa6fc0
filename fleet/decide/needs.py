"""What else Slurm must be asked for this world: its jobs are many, and mostly nobody needs to know them."""

from __future__ import annotations

from fleet.decide.leave import wants_to_leave
from fleet.world.world import Worker, World


def asks_for_jobs(world: World) -> bool:
    return any(_asks(worker) for worker in world.workers())


def _asks(worker: Worker) -> bool:
    """Its record does not tell of a job that is suspended."""
    node = worker.slurm
    if node is None or not node.drained:
        return False
    return wants_to_leave(worker) or not (worker.pod.free or worker.pod.deleting or node.record.busy)
