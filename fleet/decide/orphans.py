"""Nodes of Slurm without pods, and ready pods without a node of Slurm.

The former are drained, set down, and removed if their name will not come back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from fleet.decide.actions import Action, Change, Evict, Notice, Remove, RestartSlurmd
from fleet.decide.causes import MAY_SLEEP, cause
from fleet.decide.drain import drain
from fleet.decide.memory import LostPod
from fleet.policy import Policy
from fleet.world.kubernetes import RESTART, KubePod
from fleet.world.slurm import SlurmNode, SlurmView
from fleet.world.snapshot import FleetSnapshot, Unknown, Worker


def awake_orphans(snapshot: FleetSnapshot) -> Iterator[SlurmNode]:
    """Yield the orphans, except those that an elastic pool released and those whose machines are lent."""
    kubernetes = snapshot.kubernetes
    for node in snapshot.orphans():
        if isinstance(kubernetes, Unknown) or not (
            is_asleep(node) and (kubernetes.elastic(node.name) or is_lent(node))
        ):
            yield node
        elif is_removable(node) and kubernetes.made(node.name) is False:
            yield node  # beyond the pool's maximum


def is_lent(node: SlurmNode) -> bool:
    """Return whether the fleet drained it to lend its machine."""
    return "lend" in node.kinds


def is_asleep(node: SlurmNode) -> bool:
    """Return whether it is idle and held only because its pod went: by the fleet, or by the pod itself as it ended."""
    by_fleet = node.by_fleet and node.kinds <= MAY_SLEEP
    return (node.drained or node.down) and not node.record.busy and (by_fleet or node.record.held_by_us)


def orphan_causes(absent: float, policy: Policy) -> Mapping[str, str]:
    """`absent`: seconds without a pod. A pod that is replaced is away for a moment."""
    return cause("gone") if absent >= policy.gone_s else {}


def decide_orphan(node: SlurmNode, slurm: SlurmView, counted: Mapping[str, str], *, made: bool | None) -> Action | None:
    """Drain an orphan, set it down, or remove it. `counted`: the causes that count.

    Down only if slurmd does not answer either: a list of pods can be wrong, and a running job is evidence against it.
    """
    if made is False and is_removable(node) and is_unclaimed(node, slurm):
        return Remove(node.name, node.precondition)
    if not counted:
        return None
    if node.by_fleet:
        if node.down or node.record.responds:
            return None
        return drain(node, counted, node.mark.times if node.mark else 1, frozenset(counted), down=True)
    return None if node.drained or node.down else drain(node, counted, 1, frozenset(counted))


def is_removable(node: SlurmNode) -> bool:
    """Return whether it is down and idle, held by the fleet or by its pod's init as the pod ended."""
    return node.down and not node.record.busy and (node.by_fleet or node.record.held_by_us)


def is_unclaimed(node: SlurmNode, slurm: SlurmView) -> bool:
    """Return whether no job or reservation names it: Slurm ends a job that names a node without a record."""
    return slurm.claims is not None and node.name not in slurm.claims and slurm.holding(node.name) == ()


# Ready pods that Slurm does not know: their record was deleted, and a slurmd registers only once. The fleet first
# restarts slurmd, which then registers again. If that does not help it replaces the pod: nothing runs on it, since a
# record with jobs cannot be deleted. Both are repeated, each time after twice as long.
LONGEST_S = 3600.0
# Digits of a time; a longer annotation is a person's.
DIGITS = 12


def lost_causes(
    worker: Worker, slurm: SlurmView, lost: LostPod | None, now: float, policy: Policy
) -> Mapping[str, str]:
    """Return the cause to replace a pod. The pod carries the time of the restart, so a new leader continues."""
    requested_at = _asked_at(worker.pod)
    if not _is_unknown(worker, slurm) or requested_at is None or not _is_due(lost, now, policy):
        return {}
    if (
        0 <= now - requested_at < _patience_s(lost, policy)
    ):  # a time in the future comes from a wrong clock and is ignored
        return {}
    again = f" (replaced before: {lost.times})" if lost and lost.times else ""
    return cause("lost", again)


def restart_slurmd(
    worker: Worker, slurm: SlurmView, lost: LostPod | None, now: float, policy: Policy
) -> Iterator[Action]:
    pod, requested_at = worker.pod, _asked_at(worker.pod)
    if pod.deleting:
        return
    if worker.slurm is not None and requested_at is not None:
        yield RestartSlurmd(pod.name, pod.uid, pod.version, None, worker.slurm.precondition)
    elif _is_unknown(worker, slurm) and requested_at is not None:
        yield Notice(pod.name, "lost", "Slurm does not know it: its slurmd restarts, or else its pod goes")
    elif _is_unknown(worker, slurm) and _is_due(lost, now, policy):
        yield RestartSlurmd(pod.name, pod.uid, pod.version, str(int(now)), None)


def _is_unknown(worker: Worker, slurm: SlurmView) -> bool:
    return worker.slurm is None and worker.name not in slurm.unread


def _asked_at(pod: KubePod) -> int | None:
    """Return the time at which the fleet requested a restart of slurmd."""
    word = pod.annotations.get(RESTART, "")
    return int(word) if word.isascii() and word.isdigit() and len(word) <= DIGITS else None


def _patience_s(lost: LostPod | None, policy: Policy) -> float:
    return min(LONGEST_S, policy.lost_s * 2.0 ** min(lost.times if lost else 0, 60))


def _is_due(lost: LostPod | None, now: float, policy: Policy) -> bool:
    return lost is not None and now - lost.since >= _patience_s(lost, policy)


def remember_lost_pods(
    snapshot: FleetSnapshot, before: Mapping[str, LostPod], changes: Iterable[Change], now: float
) -> Mapping[str, LostPod]:
    """Remember the ready pods that Slurm does not know, and the replaced ones until it does."""
    if isinstance(snapshot.slurm, Unknown):
        return before
    replaced = {change.pod for change in changes if isinstance(change, Evict) and change.was is None}
    lost_pods = {}
    for worker in snapshot.workers():
        if not _is_unknown(worker, snapshot.slurm):
            continue
        lost = before.get(worker.name)
        if worker.name in replaced:
            lost_pods[worker.name] = LostPod(now, lost.times + 1 if lost else 1)
        elif lost is not None or worker.pod.ready:
            lost_pods[worker.name] = lost or LostPod(now)
    return lost_pods
