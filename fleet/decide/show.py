"""What Slurm says of a node, shown in Kubernetes: on its pod, and on its Node, which by policy is cordoned too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fleet.decide.actions import Action, Cordon, HideOnNode, ShowOnNode, ShowOnPod, Uncordon
from fleet.policy import STATE, Policy
from fleet.words import LIFTED
from fleet.world.kubernetes import Condition, Node
from fleet.world.slurm import SlurmNode
from fleet.world.world import Worker

MOST = 1024
# Reasons of the condition: of a Node with several workers the last of these is its own.
WORST = ("TakesJobs", "NotResponding", "Draining", "Drained", "Down")


def condition(node: SlurmNode) -> Condition:
    """Whether it takes jobs. Not whether it has some: that changes with every job, and each change is a write."""
    if node.drained:
        status, reason = "False", "Draining" if node.record.busy else "Drained"
    elif node.down:
        status, reason = "False", "Down"
    elif not node.record.responds:
        status, reason = "Unknown", "NotResponding"
    else:
        return Condition(STATE, "True", "TakesJobs", "")
    # Slurm keeps the reason of a drain that is lifted.
    return Condition(STATE, status, reason, "" if node.reason == LIFTED else node.reason[:MOST])


def on_pod(worker: Worker) -> Action | None:
    if worker.slurm is None or worker.pod.deleting:
        return None
    wanted, found = condition(worker.slurm), worker.pod.conditions.get(STATE)
    return None if same(wanted, found) else ShowOnPod(worker.pod.name, worker.pod.uid, since(wanted, found))


def summary(type_: str, workers: Sequence[Worker], whose: str) -> Condition | None:
    """Of all workers of a Node, and whose they are; None: what Slurm says of one of them is not known."""
    found = [(worker.name, condition(worker.slurm)) for worker in workers if worker.slurm is not None]
    if len(found) < len(workers):
        return None
    worst = max((one for _, one in found), key=lambda one: WORST.index(one.reason))
    said = "; ".join(f"{name}: {one.reason} {one.message}".rstrip() for name, one in found if one.status != "True")
    return Condition(type_, worst.status, worst.reason, (f"{whose}: {said}" if said else whose)[:MOST])


def beside(node: Node, workers: Sequence[Worker], policy: Policy, whose: str) -> Action | None:
    """The same on the Node, for those who look there: a repair that waits until its machine is drained."""
    if not policy.shows or not workers:
        return None
    wanted, found = summary(policy.shows, workers, whose), node.conditions.get(policy.shows)
    if wanted is None or same(wanted, found):
        return None
    return ShowOnNode(node.name, node.uid, since(wanted, found))


def no_longer(node: Node, policy: Policy, whose: str) -> Action | None:
    """No worker of ours is on it; another cluster's may be, of which its own fleet tells."""
    found = node.conditions.get(policy.shows)
    mine = found is not None and (found.message == whose or found.message.startswith(f"{whose}: "))
    return HideOnNode(node.name, node.uid, policy.shows) if mine else None


def same(wanted: Condition, found: Condition | None) -> bool:
    said = (wanted.status, wanted.reason, wanted.message)
    return found is not None and (found.status, found.reason, found.message) == said


def since(wanted: Condition, found: Condition | None) -> Condition:
    """The time of the last transition changes with the status alone; 0: now."""
    return replace(wanted, since=found.since if found and found.status == wanted.status else 0.0)


def on_node(node: Node, workers: Sequence[Worker], policy: Policy, goal: str = "") -> Action | None:
    """`workers`: all that are on it. `goal`: of its machine, where it is not to be up, whatever Slurm says."""
    if goal:
        return None if node.cordoned else Cordon(node.name, node.uid, node.version, f"goal {goal}"[:MOST])
    if any(worker.slurm is None for worker in workers):
        return None  # what Slurm says of one of them is not known
    held = next((one for one in workers if one.slurm and one.slurm.drained and not one.slurm.ours), None)
    if held and held.slurm and policy.cordon and not node.cordoned:
        return Cordon(node.name, node.uid, node.version, f"{held.name}: {held.slurm.reason}"[:MOST])
    if node.ours and (not held or not policy.cordon):
        return Uncordon(node.name, node.uid, node.version)
    return None
