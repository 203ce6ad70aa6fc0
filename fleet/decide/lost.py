"""A pod that is ready and that Slurm does not know: somebody has deleted its record, and its slurmd registers no more.

Nothing runs on it, for a record with jobs cannot be deleted; the pod is replaced, and the next one registers. Where
that does not help it is tried again, each time after twice as long.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from fleet.decide.actions import Change, Evict
from fleet.decide.memory import Lost
from fleet.policy import Policy
from fleet.world.world import Unknown, World

LONGEST_S = 3600.0


def causes(lost: Lost | None, now: float, policy: Policy) -> Mapping[str, str]:
    if lost is None or now - lost.since < min(LONGEST_S, policy.lost_s * 2.0 ** min(lost.times, 60)):
        return {}
    again = f" (replaced before: {lost.times})" if lost.times else ""
    return {"lost": f"it is ready, and Slurm does not know it{again}"}


def remembered(world: World, before: Mapping[str, Lost], changes: Iterable[Change], now: float) -> Mapping[str, Lost]:
    """Of those that are ready, and of those that were replaced and are not known yet."""
    if isinstance(world.slurm, Unknown):
        return before
    replaced = {change.pod for change in changes if isinstance(change, Evict) and change.was is None}
    found = {}
    for worker in world.workers():
        if worker.slurm is not None or worker.name in world.slurm.unread:
            continue
        lost = before.get(worker.name)
        if worker.name in replaced:
            found[worker.name] = Lost(now, lost.times + 1 if lost else 1)
        elif lost is not None or worker.pod.ready:
            found[worker.name] = lost or Lost(now)
    return found
