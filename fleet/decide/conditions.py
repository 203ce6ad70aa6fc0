"""What Kubernetes shows while slurmctld does not answer: unknown, since when, and the last known state.

Without it `kubectl get machines,workerpools` repeats the state from before the outage for as long as the outage lasts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from fleet import crd, crd_pools
from fleet.decide.actions import Action, Change, Cordon, HideOnNode, NotePool, Record, ShowOnNode, ShowOnPod, Uncordon
from fleet.policy import STATE, Policy
from fleet.reasons import LIFTED
from fleet.world.kubernetes import Condition, Kubernetes, Node
from fleet.world.machine import MachineStatus, stamp
from fleet.world.slurm import SlurmNode
from fleet.world.snapshot import Worker
from fleet.world.worker_pool import PoolStatus

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


# A controller pod that is replaced answers again within seconds: a shorter time would rewrite every object for nothing.
AFTER_S = 60.0
# The reason of the conditions, and the state of a Machine.
UNKNOWN = "SlurmUnknown"


def show(kubernetes: Kubernetes, since: float, now: float, policy: Policy) -> Iterator[Change]:
    """Replace each state that Slurm no longer confirms. `since`: when slurmctld answered last.

    Objects that show the outage already are left alone, so a restarted operator does not move the time in them.
    """
    if now - since < AFTER_S:
        return
    outage = f"slurmctld has not answered since {stamp(int(since))}"
    for pod in kubernetes.pods.values():
        shown = pod.conditions.get(STATE)
        if shown is not None and shown.reason != UNKNOWN and not pod.deleting:
            yield ShowOnPod(pod.name, pod.uid, _unknown(shown, outage))
    for node in kubernetes.nodes.values() if policy.shows else ():
        shown = node.conditions.get(policy.shows)
        # Another cluster's operator may show its own workers on the same Node.
        if shown is not None and shown.reason != UNKNOWN and _is_ours(shown, kubernetes.whose):
            rest = shown.message.removeprefix(kubernetes.whose).removeprefix(": ")
            yield ShowOnNode(node.name, node.uid, _unknown(replace(shown, message=rest), outage, kubernetes.whose))
    for machine in (kubernetes.machines or {}).values():
        if machine.status.state in (*WORST, "Unregistered") and not machine.deleting:
            yield Record(machine.name, machine.version, _unknown_machine(machine.status, outage))
    for pool in (kubernetes.pools or {}).values():
        if not pool.deleting and not _shows_outage(pool.status):
            yield NotePool(pool.name, pool.version, _unknown_pool(pool.status, outage, int(now)))


def _is_ours(shown: Condition, whose: str) -> bool:
    return shown.message == whose or shown.message.startswith(f"{whose}: ")


def _unknown(shown: Condition, outage: str, whose: str = "") -> Condition:
    last = f"{shown.reason} {shown.message}".strip()
    message = f"{outage}; last known: {last}"
    return Condition(shown.type, "Unknown", UNKNOWN, (f"{whose}: {message}" if whose else message)[:MOST])


def _unknown_machine(status: MachineStatus, outage: str) -> MachineStatus:
    why = f"{outage}; last known: {status.state}{f'; {status.why}' if status.why else ''}"
    return replace(status, state=UNKNOWN, why=why[: crd.TEXT])


def _shows_outage(status: PoolStatus) -> bool:
    return any(condition.reason == UNKNOWN for condition in status.conditions)


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
