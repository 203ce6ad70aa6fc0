"""Nodes of Slurm whose pods are gone. One that is made again finds its record; one that is not, leaves none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from fleet import reasons
from fleet.decide.actions import Action, Remove
from fleet.decide.causes import LEND
from fleet.decide.drain import drain
from fleet.policy import Policy
from fleet.world.slurm import Slurm, SlurmNode
from fleet.world.snapshot import Snapshot, Unknown

WHY: Mapping[str, str] = {"gone": "its pod is gone"}


def awake(world: Snapshot) -> Iterator[SlurmNode]:
    """All of them but those of elastic pools that went, and those whose machines are lent: they are no loss, and their
    records show what may be had."""
    here = world.kubernetes
    for node in world.orphans():
        if isinstance(here, Unknown) or not (asleep(node) and (here.elastic(node.name) or lent(node))):
            yield node
        elif over(node) and here.made(node.name) is False:
            yield node  # beyond max


def lent(node: SlurmNode) -> bool:
    """Drained by us for its machine's sake, which others have, and not made again meanwhile."""
    return node.ours and LEND in reasons.kinds(node.reason)


def asleep(node: SlurmNode) -> bool:
    """Kept from jobs by us for that, or by its pod itself when it ended, and by nobody else."""
    mine = node.ours and reasons.kinds(node.reason) <= {"surplus", "gone", "deadline", LEND}
    return (node.drained or node.down) and not node.record.busy and (mine or node.record.held_by_us)


def causes(absent: float, policy: Policy) -> Mapping[str, str]:
    """`absent`: seconds. A pod that is replaced is away for a moment."""
    return WHY if absent >= policy.gone_s else {}


def gone(node: SlurmNode, slurm: Slurm, found: Mapping[str, str], *, made: bool | None) -> Action | None:
    """`found`: the causes that count. Down only where its slurmd does not answer either: of a pod that is not there any
    more Kubernetes alone says so, and a list of pods may be wrong where a running job is right."""
    if made is False and over(node) and unclaimed(node, slurm):
        return Remove(node.name, node.seen)
    if not found:
        return None
    if node.ours:
        if node.down or node.record.responds:
            return None
        return drain(node, found, node.mark.times if node.mark else 1, frozenset(found), down=True)
    return None if node.drained or node.down else drain(node, found, 1, frozenset(found))


def over(node: SlurmNode) -> bool:
    """Down, and held by nobody but us, or for no reason but that its pod went: by its own init."""
    return node.down and not node.record.busy and (node.ours or node.record.held_by_us)


def unclaimed(node: SlurmNode, slurm: Slurm) -> bool:
    """Slurm ends a job that names a node without a record."""
    return slurm.claims is not None and node.name not in slurm.claims and slurm.holding(node.name) == ()
