"""Explain how far the roll-out of a StatefulSet is. Kubernetes does it; the operator only says what it waits for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from fleet.decide.actions import Tell
from fleet.world.kubernetes import Kubernetes
from fleet.world.world import Worker


def rollouts(workers: Iterable[Worker], kubernetes: Kubernetes) -> Iterator[Tell]:
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
        yield Tell(name, "roll", f"{far}; {_waits_for(pods, old[0])}")


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
