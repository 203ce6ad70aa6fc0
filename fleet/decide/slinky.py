"""Conditions and annotations of Slinky's operator, for programs that read them: NVSentinel's drainer and drain monitor.

They read the state of a pod's node in Slurm from conditions of the pod, one for each base state and flag. NVSentinel's
drainer deletes a pod that shows Drain and no busy state. So all conditions of a pod change in one patch and come from
one record of slurmctld, Drain ends before the fleet undrains, and what is not known counts as busy. Its drain monitor
takes the end of Drain for a machine that is well again, so an outage of slurmctld does not end it.
"""

from __future__ import annotations

from collections.abc import Iterator

from fleet.decide.actions import ShowStates
from fleet.policy import Policy
from fleet.reasons import LIFTED
from fleet.world.kubernetes import KubeCondition, KubePod, KubernetesView
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
BUSY = ("Allocated", "Mixed", "Completing")
DRAIN = f"{PREFIX}Drain"
# Programs treat a drain without this prefix as a fault of the machine, and start a repair.
OWN_REASON = "slurm-operator: "
MOST = 1024
# The annotation that requests a drain of the pod's node, and its only value.
POD_CORDON, YES = "nodeset.slinky.slurm.net/pod-cordon", "true"


def show_states(worker: Worker, slurm: SlurmView, policy: Policy, *, ends: bool = False) -> ShowStates | None:
    """Return the conditions that differ from the node's state in Slurm. They are removed when the policy is off.

    `ends`: the fleet is about to undrain the node.
    """
    pod = worker.pod
    if pod.deleting:
        return None
    shown = {type_: condition for type_, condition in pod.conditions.items() if type_.startswith(PREFIX)}
    if not policy.slinky:
        return ShowStates(pod.name, pod.uid, (), tuple(sorted(shown))) if shown else None
    if worker.slurm is None:
        return None
    jobs = slurm.holding(worker.name)
    # A pod with the label FREE has no jobs; do not request them again.
    is_held = bool(jobs) or (jobs is None and worker.slurm.drained and not pod.free)
    expected = _conditions(worker.slurm, is_held)
    if ends:
        expected.pop(DRAIN, None)
    changed = [condition for type_, condition in expected.items() if _differs(condition, shown.get(type_))]
    # Programs read a missing condition as False, so only states that were shown need one.
    ended = [type_ for type_, condition in shown.items() if type_ not in expected and condition.status == "True"]
    changed += [KubeCondition(type_, "False", "", "") for type_ in ended]
    return ShowStates(pod.name, pod.uid, tuple(changed), urgent=shows_drain(pod)) if changed else None


def shows_drain(pod: KubePod) -> bool:
    shown = pod.conditions.get(DRAIN)
    return shown is not None and shown.status == "True"


def show_busy(kubernetes: KubernetesView, policy: Policy) -> Iterator[ShowStates]:
    """Show each drained pod as busy while slurmctld does not answer: a person may have resumed its node."""
    for pod in kubernetes.pods.values() if policy.slinky else ():
        shown = (pod.conditions.get(f"{PREFIX}{state}") for state in BUSY)
        if (
            shows_drain(pod)
            and not pod.deleting
            and not any(condition and condition.status == "True" for condition in shown)
        ):
            busy = KubeCondition(f"{PREFIX}Mixed", "True", "", "slurmctld does not answer: jobs may run")
            yield ShowStates(pod.name, pod.uid, (busy,), urgent=True)


def _conditions(node: SlurmNode, is_held: bool) -> dict[str, KubeCondition]:
    flags = node.record.flags | (set() if node.record.responds else {"NOT_RESPONDING"})
    base = next((BASES[flag] for flag in BASES if flag in flags), "Unknown")
    # A suspended job has its node though its processors are free: the pod must not look free either.
    is_busy = base not in BUSY and (is_held or node.record.allocated > 0)
    states = [base] if not is_busy else ["Mixed"] if base == "Idle" else [base, "Mixed"]
    states += [FLAGS[flag] for flag in FLAGS if flag in flags]
    reason = "" if node.reason == LIFTED else node.reason
    text = f"{OWN_REASON if node.by_fleet else ''}{reason}"[:MOST]
    return {f"{PREFIX}{state}": KubeCondition(f"{PREFIX}{state}", "True", "", text) for state in states}


def _differs(expected: KubeCondition, shown: KubeCondition | None) -> bool:
    return shown is None or (shown.status, shown.message) != (expected.status, expected.message)


def is_cordoned(pod: KubePod) -> bool:
    return pod.annotations.get(POD_CORDON) == YES
