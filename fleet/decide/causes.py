"""Why a worker should take no new jobs, by kind: what its Node says, and what its pod says."""

from __future__ import annotations

from collections.abc import Mapping, Set

from fleet import reasons
from fleet.policy import Policy
from fleet.world.kubernetes import Node, Pod
from fleet.world.slurm import SlurmNode
from fleet.world.snapshot import Worker

# A pod that is to go: the value says why. Taken away again, it is withdrawn.
LEAVE = "minivm.io/leave"
# What machines say by themselves; the rest is a person's or a program's word about this one machine.
BY_MACHINES = frozenset({"condition", "notready", "gone", "lost", "machine"})
# Its machine is wanted by pods of others, to which its pool lends it.
LEND = "lend"
# For these the pod goes, too.
OF_POOL = frozenset({"update", "surplus", LEND})
TO_GO = frozenset({"leave", "going", "lost"}) | OF_POOL


def causes(worker: Worker, policy: Policy, now: float) -> Mapping[str, str]:
    found = dict(of_node(worker.node, policy, now)) if worker.node else {}
    before = reasons.kinds(worker.slurm.reason) if worker.slurm and worker.slurm.ours else frozenset[str]()
    if worker.node and "notready" in before and silent_for(worker.node, now) >= 0:
        # A fleet that was started anew begins to count anew, and lifts nothing for that.
        found["notready"] = f"node {worker.node.name} is not ready"
    if LEAVE in worker.pod.annotations:
        found["leave"] = worker.pod.annotations[LEAVE] or "the pod is to go"
    within, kinds = policy.leave_within_s, found.keys() & TO_GO
    if worker.slurm is not None and within > 0 and late(worker.pod, worker.slurm, kinds, within, now):
        found["deadline"] = f"its jobs had {within:g} s"
    return found


def late(pod: Pod, node: SlurmNode, kinds: Set[str], within: float, now: float) -> bool:
    """Whether the jobs of one that is to go for these causes have had their time: since we drained it for that."""
    before = reasons.kinds(node.reason) if node.ours else frozenset[str]()
    if not before & kinds or pod.created >= node.since:
        return False  # not drained for it, or another pod since
    # That it is over is another reason, of another time.
    return "deadline" in before or now - node.since >= within


def of_node(node: Node, policy: Policy, now: float) -> Mapping[str, str]:
    found = {}
    # A cordon of ours follows Slurm; as a cause it would hold itself up.
    if node.cordoned and not node.ours:
        said = next((node.annotations[key] for key in policy.reasons if node.annotations.get(key)), "")
        found["cordon"] = said or f"node {node.name} is cordoned"
    taints = {taint.key: taint.value for taint in node.taints}
    for kind, keys in (("going", policy.going), ("maintenance", policy.taints)):
        if key := next((key for key in keys if key in taints), ""):
            found[kind] = f"{key} {taints[key]}".strip()
    raised = [node.conditions[type_] for type_ in policy.conditions if type_ in node.conditions]
    if one := next((condition for condition in raised if condition.status == "True"), None):
        found["condition"] = f"{one.type}: {one.message or one.reason}"
    if silent_for(node, now) >= policy.not_ready_s:
        found["notready"] = f"node {node.name} is not ready"
    return found


def silent_for(node: Node, now: float) -> float:
    """Seconds since its kubelet was last well; -1 while it is, or where Kubernetes says nothing of it."""
    ready = node.conditions.get("Ready")
    if ready is None or ready.status == "True":
        return -1.0
    return max(0.0, now - ready.since)


def well(node: Node, policy: Policy, now: float) -> bool:
    """A pod that is made for it can be placed there."""
    return not (node.cordoned or node.fenced or silent_for(node, now) >= 0 or of_node(node, policy, now))
