"""Nodes of Slurm without pods: drained, set down, and removed if their name will not come back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from fleet.decide.actions import Action, Remove
from fleet.decide.causes import LEND
from fleet.decide.drain import drain
from fleet.policy import Policy
from fleet.world.slurm import SlurmNode, SlurmView
from fleet.world.snapshot import FleetSnapshot, Unknown

CAUSES: Mapping[str, str] = {"gone": "its pod is gone"}


def awake(snapshot: FleetSnapshot) -> Iterator[SlurmNode]:
    """Yield the orphans, without those that an elastic pool let go and those whose machines are lent."""
    kubernetes = snapshot.kubernetes
    for node in snapshot.orphans():
        if isinstance(kubernetes, Unknown) or not (asleep(node) and (kubernetes.elastic(node.name) or lent(node))):
            yield node
        elif removable(node) and kubernetes.made(node.name) is False:
            yield node  # beyond the pool's maximum


def lent(node: SlurmNode) -> bool:
    """Return whether the fleet drained it to lend its machine."""
    return LEND in node.kinds


def asleep(node: SlurmNode) -> bool:
    """Return whether it is idle and held only because its pod went: by the fleet, or by the pod itself as it ended."""
    by_fleet = node.by_fleet and node.kinds <= {"surplus", "gone", "deadline", LEND}
    return (node.drained or node.down) and not node.record.busy and (by_fleet or node.record.held_by_us)


def causes(absent: float, policy: Policy) -> Mapping[str, str]:
    """`absent`: seconds without a pod. A pod that is replaced is away for a moment."""
    return CAUSES if absent >= policy.gone_s else {}


def decide_orphan(node: SlurmNode, slurm: SlurmView, found: Mapping[str, str], *, made: bool | None) -> Action | None:
    """Drain an orphan, set it down, or remove it. `found`: the causes that count.

    Down only if slurmd does not answer either: a list of pods can be wrong, and a running job is evidence against it.
    """
    if made is False and removable(node) and is_unclaimed(node, slurm):
        return Remove(node.name, node.precondition)
    if not found:
        return None
    if node.by_fleet:
        if node.down or node.record.responds:
            return None
        return drain(node, found, node.mark.times if node.mark else 1, frozenset(found), down=True)
    return None if node.drained or node.down else drain(node, found, 1, frozenset(found))


def removable(node: SlurmNode) -> bool:
    """Return whether it is down and idle, held by the fleet or by its pod's init as the pod ended."""
    return node.down and not node.record.busy and (node.by_fleet or node.record.held_by_us)


def is_unclaimed(node: SlurmNode, slurm: SlurmView) -> bool:
    """Return whether no job or reservation names it: Slurm ends a job that names a node without a record."""
    return slurm.claims is not None and node.name not in slurm.claims and slurm.holding(node.name) == ()
