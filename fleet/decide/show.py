"""What Slurm says of a node, shown in Kubernetes: a condition of its pod; by policy its Node is cordoned, and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fleet.decide.actions import Action, Cordon, ShowOnPod, Uncordon
from fleet.decide.causes import CORDONED
from fleet.policy import Policy
from fleet.world.kubernetes import Condition, Node
from fleet.world.slurm import SlurmNode
from fleet.world.world import Worker

TYPE = "minivm.io/SlurmState"
MOST = 1024


def condition(node: SlurmNode) -> Condition:
    """Whether it takes jobs. Not whether it has some: that changes with every job, and each change is a write."""
    if node.drained:
        status, reason = "False", "Draining" if node.record.busy else "Drained"
    elif node.down:
        status, reason = "False", "Down"
    elif not node.record.responds:
        status, reason = "Unknown", "NotResponding"
    else:
        return Condition(TYPE, "True", "TakesJobs", "")
    return Condition(TYPE, status, reason, node.reason[:MOST])


def on_pod(worker: Worker) -> Action | None:
    if worker.slurm is None or worker.pod.deleting:
        return None
    wanted, found = condition(worker.slurm), worker.pod.conditions.get(TYPE)
    if found and (found.status, found.reason, found.message) == (wanted.status, wanted.reason, wanted.message):
        return None
    # The time of the last transition changes with the status alone; 0: now.
    since = found.since if found and found.status == wanted.status else 0.0
    return ShowOnPod(worker.pod.name, worker.pod.uid, replace(wanted, since=since))


def on_node(node: Node, workers: Sequence[Worker], policy: Policy) -> Action | None:
    """`workers`: all that are on it."""
    ours = CORDONED in node.annotations
    if any(worker.slurm is None for worker in workers):
        return None  # what Slurm says of one of them is not known
    held = next((one for one in workers if one.slurm and one.slurm.drained and not one.slurm.ours), None)
    if held and held.slurm and policy.cordon and not node.cordoned:
        return Cordon(node.name, node.uid, node.version, f"{held.name}: {held.slurm.reason}"[:MOST])
    if ours and (not held or not policy.cordon):
        return Uncordon(node.name, node.uid, node.version)
    return None
