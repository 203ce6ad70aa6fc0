"""What else Slurm must be asked for this world: its jobs are many, and mostly nobody needs to know them."""

from __future__ import annotations

from fleet import words
from fleet.decide.causes import LEAVE, TO_GO
from fleet.decide.gone import over
from fleet.decide.remedy import ACTED
from fleet.world.world import Unknown, Worker, World


def asks_for_jobs(world: World) -> bool:
    waits = _waits(world)
    return any(_asks(worker) or (worker.name in waits and _idles(worker)) for worker in world.workers())


def _waits(world: World) -> frozenset[str]:
    """Workers whose machines are to be treated as soon as nothing runs on them."""
    here = world.kubernetes
    machines = {} if isinstance(here, Unknown) else here.machines or {}
    found = (one.status for one in machines.values() if one.status.goal in ACTED)
    return frozenset(name for one in found if not (one.remedy and one.remedy.done) for name in one.worker.split())


def _idles(worker: Worker) -> bool:
    return worker.slurm is not None and worker.slurm.drained and not worker.slurm.record.busy


def asks_for_claims(world: World) -> bool:
    """Who names a node whose record is to go, or whose machine is asked for; and which jobs elastic pools may serve."""
    here = world.kubernetes
    if isinstance(here, Unknown):
        return False
    if any(one.waits for one in here.guests or ()):
        return True
    if any(pool.elastic for pool in (here.pools or {}).values()):
        return True
    return any(over(node) and here.made(node.name) is False for node in world.orphans())


def _asks(worker: Worker) -> bool:
    """Its record does not tell of a job that is suspended."""
    node = worker.slurm
    if node is None or not node.drained or worker.pod.deleting:
        return False
    leaves = bool(worker.pod.ended) or LEAVE in worker.pod.annotations or bool(words.kinds(node.reason) & TO_GO)
    return leaves or not (node.record.busy or worker.pod.free)
