"""Causes of drains: the table of all kinds, and the causes that follow from a worker's Node and pod.

To add a cause, add its row to `KINDS`, and its condition to `find_causes` or `find_node_causes`, or to the module that
its row's comment names. The budget, the fast path, eviction and the down state follow from the row. A new setting goes
into fleet/policy.py; docs/fleet.md names each kind. tests/unit/fleet/test_fleet_causes.py finds what is missing.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass

from fleet.policy import Policy
from fleet.world.kubernetes import KubeNode, KubePod, is_true
from fleet.world.slurm import SlurmNode
from fleet.world.snapshot import Worker

# The causes of one worker's drain: a kind of `KINDS`, and the text for Slurm's reason.
Causes = Mapping[str, str]
# The annotation that requests a pod's departure; its value is the reason. Removing it withdraws the request.
LEAVE = "minivm.io/leave"
# The annotation of Slinky's operator that requests a drain of the pod's node, and its only value.
POD_CORDON, YES = "nodeset.slinky.slurm.net/pod-cordon", "true"


@dataclass(frozen=True, slots=True)
class CauseKind:
    """One kind of cause: the drain's reason in Slurm, and the fleet's reaction."""

    # Lower-case letters only: Slurm's reason of the drain begins with it.
    name: str
    # The policy's key; "": a person or a WorkerPool is the cause, which needs no setting.
    setting: str = ""
    # The reason's text; "": its author's words.
    text: str = ""
    # A sign of an unwell machine: the policy's `share` limits how many workers such signs drain at a time.
    limited: bool = False
    # Requested for this one machine: the fast path drains it, without waiting for the loop.
    on_fast_path: bool = False
    # The pod is evicted once its node is drained and idle.
    evicts: bool = False
    # The pod's WorkerPool requests the pod's departure.
    of_pool: bool = False
    # Follows from the goal of the pod's machine, or from a deep check that the machine still has to pass.
    of_goal: bool = False
    # The node is set down, so that its jobs run elsewhere.
    sets_down: bool = False
    # A node without a pod that is drained only for such causes keeps its record and waits for its next pod.
    may_sleep: bool = False


# An eviction quotes the first of its causes in this order.
KINDS = (
    # Causes of the Node.
    CauseKind("cordon", "cordonReasons", "node {} is cordoned", on_fast_path=True),
    CauseKind("maintenance", "taints", on_fast_path=True),
    CauseKind("going", "going", on_fast_path=True, evicts=True),
    CauseKind("condition", "conditions", limited=True),
    CauseKind("notready", "notReady", "node {} is not ready", limited=True),
    # Causes of the pod (drain.py).
    CauseKind("lost", "lost", "it is ready, and Slurm does not know it; to restart its slurmd did not help{}",
         limited=True, evicts=True),
    CauseKind("gone", "gone", "its pod is gone", limited=True, sets_down=True, may_sleep=True),
    # Causes of the machine: given up (fencing.py); a verdict, a person's goal, an owed deep check (remediation.py).
    # The next pod on a node drained for `proof` runs that check (health/broker/decide.py).
    CauseKind("dead", "fencing", "node {} is given up", sets_down=True),
    CauseKind("machine", "machines", limited=True, of_goal=True),
    CauseKind("goal", of_goal=True),
    CauseKind("proof", "machines", "a deep check is to pass", of_goal=True),
    # Causes of the pool (pools.py, autoscale.py, lending.py).
    CauseKind("surplus", evicts=True, of_pool=True, may_sleep=True),
    CauseKind("update", text="template {} of {}", evicts=True, of_pool=True),
    CauseKind("lend", "lend", "wanted by {}", evicts=True, of_pool=True, may_sleep=True),
    # A request to the pod in the words of Slinky's operator.
    CauseKind("podcordon", "slinky", "the pod has the annotation {}", on_fast_path=True),
    # A request to the pod, and the end of the time for the jobs of a pod that leaves.
    CauseKind("leave", text="the pod was asked to leave", on_fast_path=True, evicts=True),
    CauseKind("deadline", "leaveWithin", "its jobs had {:g} s", sets_down=True, may_sleep=True),
)  # fmt: skip
TEXTS = {kind.name: kind.text for kind in KINDS}
LIMITED = frozenset(kind.name for kind in KINDS if kind.limited)
ON_FAST_PATH = frozenset(kind.name for kind in KINDS if kind.on_fast_path)
EVICTING = frozenset(kind.name for kind in KINDS if kind.evicts)
OF_POOL = frozenset(kind.name for kind in KINDS if kind.of_pool)
OF_GOAL = frozenset(kind.name for kind in KINDS if kind.of_goal)
SETS_DOWN = frozenset(kind.name for kind in KINDS if kind.sets_down)
MAY_SLEEP = frozenset(kind.name for kind in KINDS if kind.may_sleep)


def is_leaving(node: SlurmNode) -> bool:
    """Return whether the fleet drained the node so that its pod leaves."""
    return bool(node.kinds & EVICTING)


def cause(kind: str, *values: object) -> dict[str, str]:
    """Return the cause of this kind with its text from the table."""
    return {kind: TEXTS[kind].format(*values)}


def find_causes(worker: Worker, policy: Policy, now: float) -> Causes:
    """Return the causes of a worker's Node and pod. `decide` adds those of goals, pools, fencing and lost pods."""
    causes_of_worker = dict(find_node_causes(worker.node, policy, now)) if worker.node else {}
    node = worker.slurm
    if worker.node and node and "notready" in node.kinds and silent_for(worker.node, now) >= 0:
        # Keep the drain while the Node is silent: a restarted fleet has not counted `not_ready_s` yet.
        causes_of_worker |= cause("notready", worker.node.name)
    if LEAVE in worker.pod.annotations:
        causes_of_worker |= (
            {"leave": worker.pod.annotations[LEAVE]} if worker.pod.annotations[LEAVE] else cause("leave")
        )
    if policy.slinky and worker.pod.annotations.get(POD_CORDON) == YES:
        causes_of_worker |= cause("podcordon", POD_CORDON)
    within, kinds = policy.leave_within_s, causes_of_worker.keys() & EVICTING
    if node is not None and within > 0 and is_past_deadline(worker.pod, node, kinds, within, now):
        causes_of_worker |= cause("deadline", within)
    return causes_of_worker


def is_past_deadline(pod: KubePod, node: SlurmNode, kinds: Set[str], within: float, now: float) -> bool:
    """Return whether the jobs of a pod that leaves for these causes have used up their time since the fleet's drain."""
    if not node.kinds & kinds or pod.created >= node.since:
        return False  # not drained for these causes, or the pod is newer than the drain
    # The drain for the deadline has a time of its own.
    return "deadline" in node.kinds or now - node.since >= within


def find_node_causes(node: KubeNode, policy: Policy, now: float) -> Causes:
    """Return the causes of a Node."""
    node_causes: dict[str, str] = {}
    # The fleet's own cordon follows Slurm: counted as a cause, it would never be lifted.
    if node.cordoned and not node.cordoned_by_fleet:
        text = next((node.annotations[key] for key in policy.cordon_reasons if node.annotations.get(key)), "")
        node_causes |= {"cordon": text} if text else cause("cordon", node.name)
    taints = {taint.key: taint.value for taint in node.taints}
    for kind, keys in (("going", policy.going), ("maintenance", policy.taints)):
        if key := next((key for key in keys if key in taints), ""):
            node_causes[kind] = f"{key} {taints[key]}".strip()
    watched = (node.conditions[type_] for type_ in policy.conditions if type_ in node.conditions)
    if raised := next(filter(is_true, watched), None):
        node_causes["condition"] = f"{raised.type}: {raised.message or raised.reason}"
    if silent_for(node, now) >= policy.not_ready_s:
        node_causes |= cause("notready", node.name)
    return node_causes


def silent_for(node: KubeNode, now: float) -> float:
    """Seconds since the Node was last ready; -1 while it is ready, or without a Ready condition."""
    ready = node.conditions.get("Ready")
    if ready is None or is_true(ready):
        return -1.0
    return max(0.0, now - ready.since)


def takes_new_pods(node: KubeNode, policy: Policy, now: float) -> bool:
    """Return whether the Node may get a new pod of a pool: it is ready, not cordoned or given up, and has no cause."""
    return not (node.cordoned or node.fenced or silent_for(node, now) >= 0 or find_node_causes(node, policy, now))
