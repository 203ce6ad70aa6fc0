"""What Kubernetes shows while slurmctld does not answer: unknown, since when, and the last known state.

Without it `kubectl get machines,workerpools` repeats the state from before the outage for as long as the outage lasts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fleet import crd, crd_pools
from fleet.decide.actions import Change, NotePool, Record, ShowOnNode, ShowOnPod
from fleet.decide.show import MOST, WORST
from fleet.policy import STATE, Policy
from fleet.world.kubernetes import Condition, Kubernetes
from fleet.world.machine import Status, stamp
from fleet.world.pool import PoolStatus

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


def _unknown_machine(status: Status, outage: str) -> Status:
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
