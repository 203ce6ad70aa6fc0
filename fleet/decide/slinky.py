"""The words of Slinky's operator, for programs that were written for it: NVSentinel's drainer and drain monitor.

They read the state of a pod's node in Slurm from conditions of the pod, one for each base state and flag. NVSentinel's
drainer deletes a pod that shows Drain and no busy state, so all conditions of a pod change in one patch, and all of
them come from one record of slurmctld. They stay as they are while slurmctld does not answer: no job starts then.
"""

from __future__ import annotations

from collections.abc import Mapping

from fleet.decide.actions import ShowStates
from fleet.policy import Policy
from fleet.reasons import LIFTED
from fleet.world.kubernetes import KubeCondition, KubePod
from fleet.world.slurm import SlurmNode, SlurmView
from fleet.world.snapshot import Worker

PREFIX = "SlurmNodeState"
# The node's base state; the first that it has counts.
BASES = {
    "ALLOCATED": "Allocated", "DOWN": "Down", "ERROR": "Error", "FUTURE": "Future", "IDLE": "Idle", "MIXED": "Mixed",
    "UNKNOWN": "Unknown",
}  # fmt: skip
FLAGS = {
    "COMPLETING": "Completing", "DRAIN": "Drain", "FAIL": "Fail", "INVALID": "Invalid", "INVALID_REG": "InvalidReg",
    "MAINTENANCE": "Maintenance", "NOT_RESPONDING": "NotResponding", "UNDRAIN": "Undrain",
}  # fmt: skip
# Programs take a drain whose reason does not begin so for a fault of the machine, and let it be repaired.
OWN_REASON = "slurm-operator: "
MOST = 1024
# The annotation of a pod whose node is to be drained, and its only value.
POD_CORDON, YES = "nodeset.slinky.slurm.net/pod-cordon", "true"


def show_states(worker: Worker, slurm: SlurmView, policy: Policy) -> ShowStates | None:
    """Return the conditions that differ from the node's state in Slurm. They are removed when the policy is off."""
    pod = worker.pod
    if pod.deleting:
        return None
    shown = {type_: each for type_, each in pod.conditions.items() if type_.startswith(PREFIX)}
    if not policy.slinky:
        return ShowStates(pod.name, pod.uid, (), tuple(sorted(shown))) if shown else None
    if worker.slurm is None:
        return None
    wanted = _conditions(worker.slurm, bool(slurm.holding(worker.name)))
    changed = [each for type_, each in wanted.items() if _differs(each, shown.get(type_))]
    # Programs read a missing condition as False, so a state that never was needs no condition.
    over = [type_ for type_, each in shown.items() if type_ not in wanted and each.status == "True"]
    changed += [KubeCondition(type_, "False", "", "") for type_ in over]
    return ShowStates(pod.name, pod.uid, tuple(changed)) if changed else None


def _conditions(node: SlurmNode, is_held: bool) -> Mapping[str, KubeCondition]:
    flags = node.record.flags | (set() if node.record.responds else {"NOT_RESPONDING"})
    base = next((BASES[flag] for flag in BASES if flag in flags), "Unknown")
    # A suspended job has its node though its processors are free: the pod must not look free either.
    if base == "Idle" and (is_held or node.record.allocated > 0):
        base = "Mixed"
    states = [base, *(FLAGS[flag] for flag in FLAGS if flag in flags)]
    reason = "" if node.reason == LIFTED else node.reason
    text = f"{OWN_REASON if node.by_fleet else ''}{reason}"[:MOST]
    return {f"{PREFIX}{state}": KubeCondition(f"{PREFIX}{state}", "True", "", text) for state in states}


def _differs(wanted: KubeCondition, shown: KubeCondition | None) -> bool:
    return shown is None or (shown.status, shown.message) != (wanted.status, wanted.message)


def is_cordoned(pod: KubePod) -> bool:
    return pod.annotations.get(POD_CORDON) == YES
