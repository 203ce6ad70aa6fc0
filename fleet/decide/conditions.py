"""States shown in Kubernetes: conditions of pods and Nodes, cordons that follow Slurm, and outages."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from fleet import crd, crd_pools
from fleet.decide.actions import Change, Cordon, HideOnNode, NotePool, Record, ShowOnNode, ShowOnPod, Uncordon
from fleet.policy import STATE, Policy
from fleet.reasons import LIFTED
from fleet.world.kubernetes import KubeCondition, KubeNode, KubePod, KubernetesView
from fleet.world.machine import MachineStatus, rfc3339
from fleet.world.pod_page import READY
from fleet.world.slurm import SlurmNode
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
        return KubeCondition(STATE, "True", "TakesJobs", "")
    # Slurm keeps the reason of a drain that was lifted.
    return KubeCondition(STATE, status, reason, "" if node.reason == LIFTED else node.reason[:MOST])


def show_on_pod(worker: Worker) -> Change | None:
    if worker.slurm is None or worker.pod.deleting:
        return None
    expected, shown = condition(worker.slurm), worker.pod.conditions.get(STATE)
    return None if _same(expected, shown) else ShowOnPod(worker.pod.name, worker.pod.uid, _since(expected, shown))


# Durations in the reasons change all the time, and are not worth a write.
_DURATION = re.compile(r"\b[0-9]+ (?:ms|s|min|h)\b")


def show_pages(kubernetes: KubernetesView, pages: Mapping[str, tuple[KubeCondition, ...]]) -> Iterator[Change]:
    """Copy the conditions of the pods' pages into their status. A silent pod keeps its last conditions."""
    for pod in (*kubernetes.pods.values(), *kubernetes.others.values()):
        if pod.ended or (page := pages.get(pod.uid)) is None:
            continue
        for expected in page or _no_answer(pod):
            shown = pod.conditions.get(expected.type)
            if not _same(lasting(expected), shown and lasting(shown)):
                yield ShowOnPod(pod.name, pod.uid, _since(expected, shown))


def _no_answer(pod: KubePod) -> tuple[KubeCondition, ...]:
    """Withdraw "ready" only where the kubelet's probe fails too: the fleet's own network may be cut."""
    shown, probed = pod.conditions.get(READY), pod.conditions.get("ContainersReady")
    if shown is None or shown.status != "True" or probed is None or probed.status == "True":
        return ()
    text = "the kubelet's probe fails, and the pod's page does not answer the fleet"
    return (KubeCondition(READY, "Unknown", "NoAnswer", text),)


def lasting(condition: KubeCondition) -> KubeCondition:
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
    if not policy.shows or not workers:
        return None
    expected, shown = summarize(policy.shows, workers, fleet_mark), node.conditions.get(policy.shows)
    if expected is None or _same(expected, shown):
        return None
    return ShowOnNode(node.name, node.uid, _since(expected, shown))


def hide_on_node(node: KubeNode, policy: Policy, fleet_mark: str) -> Change | None:
    """Remove the condition of a Node without workers, if this fleet wrote it."""
    shown = node.conditions.get(policy.shows)
    mine = shown is not None and _is_mine(shown, fleet_mark)
    return HideOnNode(node.name, node.uid, policy.shows) if mine else None


def _is_mine(shown: KubeCondition, fleet_mark: str) -> bool:
    return shown.message == fleet_mark or shown.message.startswith(f"{fleet_mark}: ")


def _same(expected: KubeCondition, shown: KubeCondition | None) -> bool:
    texts = (expected.status, expected.reason, expected.message)
    return shown is not None and (shown.status, shown.reason, shown.message) == texts


def _since(expected: KubeCondition, shown: KubeCondition | None) -> KubeCondition:
    """Keep the time of the last transition while the status stays the same; 0: now."""
    return replace(expected, since=shown.since if shown and shown.status == expected.status else 0.0)


def follow_cordon(node: KubeNode, workers: Sequence[Worker], policy: Policy, goal: str = "") -> Change | None:
    """Cordon or uncordon a Node as its workers are drained in Slurm. `goal`: its machine's, if that is not up."""
    if goal:
        return None if node.cordoned else Cordon(node.name, node.uid, node.version, f"goal {goal}"[:MOST])
    if any(worker.slurm is None for worker in workers):
        return None  # the state of a worker is unknown
    nodes = ((worker.name, worker.slurm) for worker in workers if worker.slurm)
    held_by_person = next(((name, slurm) for name, slurm in nodes if slurm.drained and not slurm.by_fleet), None)
    if held_by_person and policy.cordon and not node.cordoned:
        return Cordon(node.name, node.uid, node.version, f"{held_by_person[0]}: {held_by_person[1].reason}"[:MOST])
    if node.cordoned_by_fleet and (not held_by_person or not policy.cordon):
        return Uncordon(node.name, node.uid, node.version)
    return None


def show_outage(kubernetes: KubernetesView, since: float, now: float, policy: Policy) -> Iterator[Change]:
    """Mark each shown state as unknown while slurmctld does not answer. `since`: the time of its last answer.

    Objects that show the outage already are left alone, so a restarted operator does not move the time in them.
    """
    if now - since < AFTER_S:
        return
    outage = f"slurmctld has not answered since {rfc3339(int(since))}"
    for pod in kubernetes.pods.values():
        shown = pod.conditions.get(STATE)
        if shown is not None and shown.reason != UNKNOWN and not pod.deleting:
            yield ShowOnPod(pod.name, pod.uid, _unknown(shown, outage))
    for node in kubernetes.nodes.values() if policy.shows else ():
        shown = node.conditions.get(policy.shows)
        # Another cluster's fleet may show its own workers on the same Node.
        if shown is not None and shown.reason != UNKNOWN and _is_mine(shown, kubernetes.fleet_mark):
            rest = shown.message.removeprefix(kubernetes.fleet_mark).removeprefix(": ")
            yield ShowOnNode(node.name, node.uid, _unknown(replace(shown, message=rest), outage, kubernetes.fleet_mark))
    for machine in (kubernetes.machines or {}).values():
        if machine.status.state in (*WORST, "Unregistered") and not machine.deleting:
            yield Record(machine.name, machine.version, _unknown_machine(machine.status, outage))
    for pool in (kubernetes.pools or {}).values():
        if not pool.deleting and not any(condition.reason == UNKNOWN for condition in pool.status.conditions):
            yield NotePool(pool.name, pool.version, _unknown_pool(pool.status, outage, int(now)))


def _unknown(shown: KubeCondition, outage: str, fleet_mark: str = "") -> KubeCondition:
    last = f"{shown.reason} {shown.message}".strip()
    message = f"{outage}; last known: {last}"
    return KubeCondition(shown.type, "Unknown", UNKNOWN, (f"{fleet_mark}: {message}" if fleet_mark else message)[:MOST])


def _unknown_machine(status: MachineStatus, outage: str) -> MachineStatus:
    explanation = f"{outage}; last known: {status.state}{f'; {status.why}' if status.why else ''}"
    return replace(status, state=UNKNOWN, why=explanation[: crd.TEXT])


def _unknown_pool(status: PoolStatus, outage: str, now: int) -> PoolStatus:
    """No worker takes a new job during the outage, and no roll-out goes on.

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
            message=texts[condition.type][: crd_pools.SAID],
            since=condition.since if condition.status == "False" else now,
        )
        if condition.type in texts
        else condition
        for condition in status.conditions
    )
    return replace(status, ready=0, conditions=conditions)
