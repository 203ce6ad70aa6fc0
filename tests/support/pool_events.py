"""Random events of a pool."""

from __future__ import annotations

from collections.abc import Callable

from tests.fleet_pools_world import PoolWorlds

EVENTS: dict[str, Callable[[PoolWorlds, str, str], object]] = {
    "job": lambda w, name, node: w.starts(name),
    "other job": lambda w, name, node: w.starts(name, 8),
    "suspend": lambda w, name, node: w.slurm[name].suspended.update(w.slurm[name].jobs),
    "end": lambda w, name, node: w.jobs_end(name),
    "drains": lambda w, name, node: w.person_drains(name),
    "resumes": lambda w, name, node: w.person_resumes(name),
    "comments": lambda w, name, node: setattr(w.slurm[name], "comment", "Ann's"),
    "leave": lambda w, name, node: w.annotate(name, "minivm.io/leave", "x"),
    "stay": lambda w, name, node: w.annotate(name, "minivm.io/leave", None),
    "cordon": lambda w, name, node: w.cordon(node),
    "uncordon": lambda w, name, node: w.cordon(node, on=False),
    "not ready": lambda w, name, node: w.ready(node, False),
    "ready": lambda w, name, node: w.ready(node),
    "pod is not ready": lambda w, name, node: setattr(w.pods[name], "ready", False),
    "pod dies": lambda w, name, node: w.pod_goes(name),
    "pod ends": lambda w, name, node: w.ends(name),
    "pod is said to have ended": lambda w, name, node: w.ends(name, lie=True),
    "record goes": lambda w, name, node: None if w.slurm[name].jobs else w.slurm.pop(name),
}
