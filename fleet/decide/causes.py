"""Why the fleet drains a worker: the kind of a cause and its text for Slurm, from the worker's Node and pod."""

from __future__ import annotations

from collections.abc import Mapping, Set

from fleet.policy import Policy
from fleet.world.kubernetes import KubeNode, KubePod
from fleet.world.slurm import SlurmNode
from fleet.world.snapshot import Worker

# The annotation of a pod that should leave; its value says why. Removing it withdraws the request.
LEAVE = "minivm.io/leave"
# Causes whose drains the budget limits: signs of machines. A kind that is not here has no limit.
BUDGETED = frozenset({"condition", "notready", "gone", "lost", "machine"})
# Guest pods want the machine, which its pool lends.
LEND = "lend"
# Reasons of its pool for which the pod leaves.
OF_POOL = frozenset({"update", "surplus", LEND})
# All causes for which the pod is evicted once its node is drained and idle.
EVICTING = frozenset({"leave", "going", "lost"}) | OF_POOL


def causes(worker: Worker, policy: Policy, now: float) -> Mapping[str, str]:
    """Return the causes of a worker's Node and pod. Goals, pools, fencing and lost pods add theirs in `decide`."""
    found = dict(of_node(worker.node, policy, now)) if worker.node else {}
    node = worker.slurm
    if worker.node and node and "notready" in node.kinds and silent_for(worker.node, now) >= 0:
        # Keep the drain while the Node is silent: a restarted fleet has not counted `not_ready_s` yet.
        found["notready"] = f"node {worker.node.name} is not ready"
    if LEAVE in worker.pod.annotations:
        found["leave"] = worker.pod.annotations[LEAVE] or "the pod was asked to leave"
    within, kinds = policy.leave_within_s, found.keys() & EVICTING
    if node is not None and within > 0 and is_past_deadline(worker.pod, node, kinds, within, now):
        found["deadline"] = f"its jobs had {within:g} s"
    return found


def is_past_deadline(pod: KubePod, node: SlurmNode, kinds: Set[str], within: float, now: float) -> bool:
    """Return whether the jobs of a pod that leaves for these causes have used up their time since the fleet's drain."""
    if not node.kinds & kinds or pod.created >= node.since:
        return False  # not drained for these causes, or the pod is newer than the drain
    # The drain for the deadline has a time of its own.
    return "deadline" in node.kinds or now - node.since >= within


def of_node(node: KubeNode, policy: Policy, now: float) -> Mapping[str, str]:
    found = {}
    # The fleet's own cordon follows Slurm: counted as a cause, it would never be lifted.
    if node.cordoned and not node.cordoned_by_fleet:
        text = next((node.annotations[key] for key in policy.reasons if node.annotations.get(key)), "")
        found["cordon"] = text or f"node {node.name} is cordoned"
    taints = {taint.key: taint.value for taint in node.taints}
    for kind, keys in (("going", policy.going), ("maintenance", policy.taints)):
        if key := next((key for key in keys if key in taints), ""):
            found[kind] = f"{key} {taints[key]}".strip()
    known = (node.conditions[type_] for type_ in policy.conditions if type_ in node.conditions)
    if raised := next((condition for condition in known if condition.status == "True"), None):
        found["condition"] = f"{raised.type}: {raised.message or raised.reason}"
    if silent_for(node, now) >= policy.not_ready_s:
        found["notready"] = f"node {node.name} is not ready"
    return found


def silent_for(node: KubeNode, now: float) -> float:
    """Seconds since the Node was last ready; -1 while it is ready, or without a Ready condition."""
    ready = node.conditions.get("Ready")
    if ready is None or ready.status == "True":
        return -1.0
    return max(0.0, now - ready.since)


def takes_new_pods(node: KubeNode, policy: Policy, now: float) -> bool:
    """Return whether the Node may get a new pod of a pool: it is ready, not cordoned or given up, and has no cause."""
    return not (node.cordoned or node.fenced or silent_for(node, now) >= 0 or of_node(node, policy, now))
