"""Ready pods that Slurm does not know: their record was deleted, and a slurmd registers only once.

The fleet first restarts slurmd, which then registers again. If that does not help it replaces the pod: nothing runs on
it, since a record with jobs cannot be deleted. Both are repeated, each time after twice as long.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from fleet.decide.actions import Action, Change, Evict, Notice, RestartSlurmd
from fleet.decide.memory import LostPod
from fleet.policy import Policy
from fleet.world.kubernetes import RESTART, KubePod
from fleet.world.slurm import SlurmView
from fleet.world.snapshot import FleetSnapshot, Unknown, Worker

LONGEST_S = 3600.0
# Digits of a time; a longer annotation is a person's.
DIGITS = 12


def causes(worker: Worker, slurm: SlurmView, lost: LostPod | None, now: float, policy: Policy) -> Mapping[str, str]:
    """Why the pod is replaced. The time of the restart is on the pod, so another leader continues from there."""
    asked = _asked_at(worker.pod)
    if not _is_unknown(worker, slurm) or asked is None or not _is_due(lost, now, policy):
        return {}
    if 0 <= now - asked < _patience_s(lost, policy):  # a time in the future comes from a wrong clock and is ignored
        return {}
    again = f" (replaced before: {lost.times})" if lost and lost.times else ""
    return {"lost": f"it is ready, and Slurm does not know it; to restart its slurmd did not help{again}"}


def restart(worker: Worker, slurm: SlurmView, lost: LostPod | None, now: float, policy: Policy) -> Iterator[Action]:
    pod, asked = worker.pod, _asked_at(worker.pod)
    if pod.deleting:
        return
    if worker.slurm is not None and asked is not None:
        yield RestartSlurmd(pod.name, pod.uid, pod.version, None, worker.slurm.precondition)
    elif _is_unknown(worker, slurm) and asked is not None:
        yield Notice(pod.name, "lost", "Slurm does not know it: its slurmd restarts, or else its pod goes")
    elif _is_unknown(worker, slurm) and _is_due(lost, now, policy):
        yield RestartSlurmd(pod.name, pod.uid, pod.version, str(int(now)), None)


def _is_unknown(worker: Worker, slurm: SlurmView) -> bool:
    return worker.slurm is None and worker.name not in slurm.unread


def _asked_at(pod: KubePod) -> int | None:
    """When the fleet asked for a restart of slurmd."""
    word = pod.annotations.get(RESTART, "")
    return int(word) if word.isascii() and word.isdigit() and len(word) <= DIGITS else None


def _patience_s(lost: LostPod | None, policy: Policy) -> float:
    return min(LONGEST_S, policy.lost_s * 2.0 ** min(lost.times if lost else 0, 60))


def _is_due(lost: LostPod | None, now: float, policy: Policy) -> bool:
    return lost is not None and now - lost.since >= _patience_s(lost, policy)


def remembered(
    snapshot: FleetSnapshot, before: Mapping[str, LostPod], changes: Iterable[Change], now: float
) -> Mapping[str, LostPod]:
    """Remember the ready pods that Slurm does not know, and the replaced ones until it does."""
    if isinstance(snapshot.slurm, Unknown):
        return before
    replaced = {change.pod for change in changes if isinstance(change, Evict) and change.was is None}
    found = {}
    for worker in snapshot.workers():
        if not _is_unknown(worker, snapshot.slurm):
            continue
        lost = before.get(worker.name)
        if worker.name in replaced:
            found[worker.name] = LostPod(now, lost.times + 1 if lost else 1)
        elif lost is not None or worker.pod.ready:
            found[worker.name] = lost or LostPod(now)
    return found
