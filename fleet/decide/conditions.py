"""States shown in Kubernetes: conditions of pods and Nodes (Slinky's too), cordons that follow Slurm, and outages."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from fleet import crd
from fleet.decide.actions import (
    Change,
    Cordon,
    HideOnNode,
    NotePool,
    Record,
    ShowOnNode,
    ShowOnPod,
    ShowStates,
    Uncordon,
)
from fleet.policy import STATE_CONDITION, Policy
from fleet.world.kubernetes import KubeCondition, KubeNode, KubePod, KubernetesView, is_true
from fleet.world.machine import MachineStatus, rfc3339
from fleet.world.pod_page import READY
from fleet.world.slurm import LIFTED, SlurmNode, SlurmView
from fleet.world.snapshot import Worker
from fleet.world.worker_pool import PoolStatus

MOST = 1024
# Reasons of the condition, from the best to the worst; a Node with several workers shows the worst.
WORST = ("TakesJobs", "NotResponding", "Draining", "Drained", "Down")
# A replaced controller pod answers within seconds: a shorter time would rewrite every object needlessly.
AFTER_S = 60.0
# The reason of the conditions, and the state of a Machine, during an outage.
UNKNOWN = "SlurmUnknown"


def condition(node: SlurmNode) -> KubeCondition:
    """Return whether a node takes jobs. Whether it has jobs is not shown: that would be a write for every job."""
    if node.drained:
        status, reason = "False", "Draining" if node.record.busy else "Drained"
    elif node.down:
        status, reason = "False", "Down"
    elif not node.record.responds:
        status, reason = "Unknown", "NotResponding"
    else:
        return KubeCondition(STATE_CONDITION, "True", "TakesJobs", "")
    # Slurm keeps the reason of a drain that was lifted.
    return KubeCondition(STATE_CONDITION, status, reason, "" if node.reason == LIFTED else node.reason[:MOST])


def show_on_pod(worker: Worker) -> Change | None:
    if worker.slurm is None or worker.pod.deleting:
        return None
    expected, shown = condition(worker.slurm), worker.pod.conditions.get(STATE_CONDITION)
    return (
        None if _is_same(expected, shown) else ShowOnPod(worker.pod.name, worker.pod.uid, _keep_since(expected, shown))
    )


# Durations in the reasons change all the time, and are not worth a write.
_DURATION = re.compile(r"\b[0-9]+ (?:ms|s|min|h)\b")


def show_pages(kubernetes: KubernetesView, pages: Mapping[str, tuple[KubeCondition, ...]]) -> Iterator[Change]:
    """Copy the conditions of the pods' pages into their status. A silent pod keeps its last conditions."""
    for pod in (*kubernetes.pods.values(), *kubernetes.others.values()):
        if pod.ended or (page := pages.get(pod.uid)) is None:
            continue
        for expected in page or _no_answer(pod):
            shown = pod.conditions.get(expected.type)
            if not _is_same(strip_durations(expected), shown and strip_durations(shown)):
                yield ShowOnPod(pod.name, pod.uid, _keep_since(expected, shown))


def _no_answer(pod: KubePod) -> tuple[KubeCondition, ...]:
    """Withdraw "ready" only where the kubelet's probe fails too: the fleet's own network may be cut."""
    shown, probed = pod.conditions.get(READY), pod.conditions.get("ContainersReady")
    if not is_true(shown) or probed is None or is_true(probed):
        return ()
    text = "the kubelet's probe fails, and the pod's page does not answer the fleet"
    return (KubeCondition(READY, "Unknown", "NoAnswer", text),)


def strip_durations(condition: KubeCondition) -> KubeCondition:
    """Return the condition without the durations in its message."""
    return replace(condition, message=_DURATION.sub("", condition.message))


def summarize(type_: str, workers: Sequence[Worker], fleet_mark: str) -> KubeCondition | None:
    """Return the condition of a Node with these workers and the fleet's mark; None: Slurm does not know all of them."""
    shown = [(worker.name, condition(worker.slurm)) for worker in workers if worker.slurm is not None]
    if len(shown) < len(workers):
        return None
    worst = max((state for _, state in shown), key=lambda state: WORST.index(state.reason))
    texts = (f"{name}: {state.reason} {state.message}".rstrip() for name, state in shown if state.status != "True")
    text = "; ".join(texts)
    return KubeCondition(type_, worst.status, worst.reason, (f"{fleet_mark}: {text}" if text else fleet_mark)[:MOST])


def show_on_node(node: KubeNode, workers: Sequence[Worker], policy: Policy, fleet_mark: str) -> Change | None:
    """Show the workers' state on their Node, for a repair that waits until its machine is drained."""
    if not policy.node_condition or not workers:
        return None
    expected, shown = summarize(policy.node_condition, workers, fleet_mark), node.conditions.get(policy.node_condition)
    if expected is None or _is_same(expected, shown):
        return None
    return ShowOnNode(node.name, node.uid, _keep_since(expected, shown))


def hide_on_node(node: KubeNode, policy: Policy, fleet_mark: str) -> Change | None:
    """Remove the condition of a Node without workers, if this fleet wrote it."""
    shown = node.conditions.get(policy.node_condition)
    is_own = shown is not None and _is_own(shown, fleet_mark)
    return HideOnNode(node.name, node.uid, policy.node_condition) if is_own else None


def _is_own(shown: KubeCondition, fleet_mark: str) -> bool:
    return shown.message == fleet_mark or shown.message.startswith(f"{fleet_mark}: ")


def _is_same(expected: KubeCondition, shown: KubeCondition | None) -> bool:
    texts = (expected.status, expected.reason, expected.message)
    return shown is not None and (shown.status, shown.reason, shown.message) == texts


def _keep_since(expected: KubeCondition, shown: KubeCondition | None) -> KubeCondition:
    """Keep the time of the last transition while the status stays the same; 0: now."""
    return replace(expected, since=shown.since if shown and shown.status == expected.status else 0.0)


def follow_cordon(node: KubeNode, workers: Sequence[Worker], policy: Policy, goal: str = "") -> Change | None:
    """Cordon or uncordon a Node as its workers are drained in Slurm. `goal`: its machine's, if that is not up."""
    if goal:
        return None if node.cordoned else Cordon(*node.identity, f"goal {goal}"[:MOST])
    if any(worker.slurm is None for worker in workers):
        return None  # the state of a worker is unknown
    nodes = ((worker.name, worker.slurm) for worker in workers if worker.slurm)
    held_by_person = next(((name, slurm) for name, slurm in nodes if slurm.drained and not slurm.by_fleet), None)
    if held_by_person and policy.cordon and not node.cordoned:
        return Cordon(*node.identity, f"{held_by_person[0]}: {held_by_person[1].reason}"[:MOST])
    if node.cordoned_by_fleet and (not held_by_person or not policy.cordon):
        return Uncordon(*node.identity)
    return None


def show_outage(kubernetes: KubernetesView, since: float, now: float, policy: Policy) -> Iterator[Change]:
    """Mark each shown state as unknown while slurmctld does not answer. `since`: the time of its last answer.

    Objects that show the outage already are left alone, so a restarted operator does not move the time in them.
    """
    if now - since < AFTER_S:
        return
    outage = f"slurmctld has not answered since {rfc3339(int(since))}"
    for pod in kubernetes.pods.values():
        shown = pod.conditions.get(STATE_CONDITION)
        if shown is not None and shown.reason != UNKNOWN and not pod.deleting:
            yield ShowOnPod(pod.name, pod.uid, _mark_unknown(shown, outage))
    for node in kubernetes.nodes.values() if policy.node_condition else ():
        shown = node.conditions.get(policy.node_condition)
        # Another cluster's fleet may show its own workers on the same Node.
        if shown is not None and shown.reason != UNKNOWN and _is_own(shown, kubernetes.fleet_mark):
            rest = shown.message.removeprefix(kubernetes.fleet_mark).removeprefix(": ")
            yield ShowOnNode(
                node.name, node.uid, _mark_unknown(replace(shown, message=rest), outage, kubernetes.fleet_mark)
            )
    for machine in (kubernetes.machines or {}).values():
        if machine.status.state in (*WORST, "Unregistered") and not machine.deleting:
            yield Record(machine.name, machine.version, _mark_machine_unknown(machine.status, outage))
    for pool in (kubernetes.pools or {}).values():
        if not pool.deleting and not any(condition.reason == UNKNOWN for condition in pool.status.conditions):
            yield NotePool(pool.name, pool.version, _mark_pool_unknown(pool.status, outage, int(now)))


def _mark_unknown(shown: KubeCondition, outage: str, fleet_mark: str = "") -> KubeCondition:
    last = f"{shown.reason} {shown.message}".strip()
    message = f"{outage}; last known: {last}"
    return KubeCondition(shown.type, "Unknown", UNKNOWN, (f"{fleet_mark}: {message}" if fleet_mark else message)[:MOST])


def _mark_machine_unknown(status: MachineStatus, outage: str) -> MachineStatus:
    explanation = f"{outage}; last known: {status.state}{f'; {status.why}' if status.why else ''}"
    return replace(status, state=UNKNOWN, why=explanation[: crd.TEXT])


def _mark_pool_unknown(status: PoolStatus, outage: str, now: int) -> PoolStatus:
    """Return a pool's status during the outage: no worker takes a new job, and no roll-out goes on.

    The printed column shows the message of `Updated`, so both conditions carry it.
    """
    texts = {
        "Ready": f"{outage}; last known: {status.ready} of {status.wanted} ready",
        "Updated": f"paused: {outage}",
    }
    conditions = tuple(
        replace(
            condition,
            status="False",
            reason=UNKNOWN,
            message=texts[condition.type][: crd.MOST_MESSAGE],
            since=condition.since if condition.status == "False" else now,
        )
        if condition.type in texts
        else condition
        for condition in status.conditions
    )
    return replace(status, ready=0, conditions=conditions)


# Conditions of Slinky's operator, for programs that read them: NVSentinel's drainer and its drain monitor.
#
# A pod has one condition for each base state and flag of its node in Slurm. NVSentinel's drainer deletes a pod that
# shows Drain and no busy state. So all conditions of a pod change in one patch and come from one record of slurmctld,
# Drain ends before the fleet undrains, and an unknown state counts as busy. Its drain monitor takes the end of Drain
# for a machine that is well again, so an outage of slurmctld does not end Drain.
SLINKY_PREFIX = "SlurmNodeState"
# The node's base state; the first that it has counts.
SLINKY_BASES = {
    "ALLOCATED": "Allocated", "DOWN": "Down", "ERROR": "Error", "FUTURE": "Future", "IDLE": "Idle", "MIXED": "Mixed",
    "UNKNOWN": "Unknown",
}  # fmt: skip
SLINKY_FLAGS = {
    "COMPLETING": "Completing", "DRAIN": "Drain", "FAIL": "Fail", "INVALID": "Invalid", "INVALID_REG": "InvalidReg",
    "MAINTENANCE": "Maintenance", "NOT_RESPONDING": "NotResponding", "UNDRAIN": "Undrain",
}  # fmt: skip
SLINKY_BUSY = ("Allocated", "Mixed", "Completing")
SLINKY_DRAIN = f"{SLINKY_PREFIX}Drain"
# Programs treat a drain without this prefix as a fault of the machine, and start a repair.
OWN_REASON = "slurm-operator: "


def show_slinky_states(worker: Worker, slurm: SlurmView, policy: Policy, *, ends: bool = False) -> ShowStates | None:
    """Return the conditions that differ from the node's state in Slurm. They are removed when the policy is off.

    `ends`: the fleet is about to undrain the node.
    """
    pod = worker.pod
    if pod.deleting:
        return None
    shown = {type_: condition for type_, condition in pod.conditions.items() if type_.startswith(SLINKY_PREFIX)}
    if not policy.slinky:
        return ShowStates(pod.name, pod.uid, (), tuple(sorted(shown))) if shown else None
    if worker.slurm is None:
        return None
    jobs = slurm.holding(worker.name)
    # A pod with the label FREE has no jobs; do not request them again.
    is_held = bool(jobs) or (jobs is None and worker.slurm.drained and not pod.free)
    expected = _build_slinky_conditions(worker.slurm, is_held)
    if ends:
        expected.pop(SLINKY_DRAIN, None)
    changed = [condition for type_, condition in expected.items() if not _is_same(condition, shown.get(type_))]
    # Programs read a missing condition as False, so only states that were shown need one.
    ended = [type_ for type_, condition in shown.items() if type_ not in expected and is_true(condition)]
    changed += [KubeCondition(type_, "False", "", "") for type_ in ended]
    return ShowStates(pod.name, pod.uid, tuple(changed), urgent=shows_slinky_drain(pod)) if changed else None


def shows_slinky_drain(pod: KubePod) -> bool:
    return is_true(pod.conditions.get(SLINKY_DRAIN))


def show_slinky_busy(kubernetes: KubernetesView, policy: Policy) -> Iterator[ShowStates]:
    """Show each drained pod as busy while slurmctld does not answer: a person may have resumed its node."""
    for pod in kubernetes.pods.values() if policy.slinky else ():
        shown = (pod.conditions.get(f"{SLINKY_PREFIX}{state}") for state in SLINKY_BUSY)
        if shows_slinky_drain(pod) and not pod.deleting and not any(map(is_true, shown)):
            busy = KubeCondition(f"{SLINKY_PREFIX}Mixed", "True", "", "slurmctld does not answer: jobs may run")
            yield ShowStates(pod.name, pod.uid, (busy,), urgent=True)


def _build_slinky_conditions(node: SlurmNode, is_held: bool) -> dict[str, KubeCondition]:
    flags = node.record.flags | (set() if node.record.responds else {"NOT_RESPONDING"})
    base = next((SLINKY_BASES[flag] for flag in SLINKY_BASES if flag in flags), "Unknown")
    # A suspended job has its node though its processors are free: the pod must not look free either.
    is_busy = base not in SLINKY_BUSY and (is_held or node.record.allocated > 0)
    states = [base] if not is_busy else ["Mixed"] if base == "Idle" else [base, "Mixed"]
    states += [SLINKY_FLAGS[flag] for flag in SLINKY_FLAGS if flag in flags]
    reason = "" if node.reason == LIFTED else node.reason
    text = f"{OWN_REASON if node.by_fleet else ''}{reason}"[:MOST]
    return {f"{SLINKY_PREFIX}{state}": KubeCondition(f"{SLINKY_PREFIX}{state}", "True", "", text) for state in states}
