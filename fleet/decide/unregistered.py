"""A pod that is ready and that Slurm does not know: somebody has deleted its record, and its slurmd, which has
registered once, does not do so again.

Its slurmd is restarted first: it registers as it starts, and needs nothing else. Where that does not help the pod is
replaced, for nothing runs on it: a record with jobs cannot be deleted. Where that does not help either both are tried
again, each time after twice as long.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from fleet.decide.actions import Action, Change, Evict, Notice, RestartSlurmd
from fleet.decide.memory import Lost
from fleet.policy import Policy
from fleet.world.kubernetes import RESTART, Pod
from fleet.world.slurm import Slurm
from fleet.world.snapshot import Snapshot, Unknown, Worker

LONGEST_S = 3600.0
# Of a time; a person's word is none of ours.
DIGITS = 12


def causes(worker: Worker, slurm: Slurm, lost: Lost | None, now: float, policy: Policy) -> Mapping[str, str]:
    """Why it is replaced. When it was asked stands on the pod: another fleet goes on from there."""
    asked = _asked(worker.pod)
    if not _unknown(worker, slurm) or asked is None or not _long(lost, now, policy):
        return {}
    if 0 <= now - asked < _patience(lost, policy):  # of a time that is to come nobody knows whose clock it was
        return {}
    again = f" (replaced before: {lost.times})" if lost and lost.times else ""
    return {"lost": f"it is ready, and Slurm does not know it; to restart its slurmd did not help{again}"}


def restart(worker: Worker, slurm: Slurm, lost: Lost | None, now: float, policy: Policy) -> Iterator[Action]:
    pod, asked = worker.pod, _asked(worker.pod)
    if pod.deleting:
        return
    if worker.slurm is not None and asked is not None:
        yield RestartSlurmd(pod.name, pod.uid, pod.version, None, worker.slurm.seen)
    elif _unknown(worker, slurm) and asked is not None:
        yield Notice(pod.name, "lost", "Slurm does not know it: its slurmd restarts, or else its pod goes")
    elif _unknown(worker, slurm) and _long(lost, now, policy):
        yield RestartSlurmd(pod.name, pod.uid, pod.version, str(int(now)), None)


def _unknown(worker: Worker, slurm: Slurm) -> bool:
    return worker.slurm is None and worker.name not in slurm.unread


def _asked(pod: Pod) -> int | None:
    """When the fleet did."""
    word = pod.annotations.get(RESTART, "")
    return int(word) if word.isascii() and word.isdigit() and len(word) <= DIGITS else None


def _patience(lost: Lost | None, policy: Policy) -> float:
    return min(LONGEST_S, policy.lost_s * 2.0 ** min(lost.times if lost else 0, 60))


def _long(lost: Lost | None, now: float, policy: Policy) -> bool:
    return lost is not None and now - lost.since >= _patience(lost, policy)


def remembered(
    world: Snapshot, before: Mapping[str, Lost], changes: Iterable[Change], now: float
) -> Mapping[str, Lost]:
    """Of those that are ready, and of those that were replaced and are not known yet."""
    if isinstance(world.slurm, Unknown):
        return before
    replaced = {change.pod for change in changes if isinstance(change, Evict) and change.was is None}
    found = {}
    for worker in world.workers():
        if not _unknown(worker, world.slurm):
            continue
        lost = before.get(worker.name)
        if worker.name in replaced:
            found[worker.name] = Lost(now, lost.times + 1 if lost else 1)
        elif lost is not None or worker.pod.ready:
            found[worker.name] = lost or Lost(now)
    return found
