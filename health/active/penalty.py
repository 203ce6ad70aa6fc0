"""Let Slurm choose nodes under other switches first while a leaf switch is blamed: its nodes get a larger weight. Pure.

Off without `activeChecks.switchWeight`. The planner keeps each such node's weight from before in its memory, and saves
the memory before it changes a weight: killed in between, it neither forgets nor restores a wrong one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WeighedNode:
    name: str
    leaf: str
    weight: int


@dataclass(frozen=True, slots=True)
class Penalty:
    """The weight that a blamed node had before, and the one that the active checks set last.

    Slurm shows the latter at once, or a moment later.
    """

    before: int
    given: int


def plan_weights(
    penalties: Mapping[str, Penalty], nodes: Iterable[WeighedNode], leaves: Set[str], weight: int
) -> tuple[dict[str, Penalty], dict[str, int]]:
    """Return the penalties to remember, and the weights to set, by node: only those that differ from the present ones.

    `leaves` are the blamed switches. A weight that a person has set meanwhile is kept once the blame is over.
    """
    remembered: dict[str, Penalty] = {}
    changes: dict[str, int] = {}
    for node in nodes:
        penalty = penalties.get(node.name)
        if penalty is not None and node.weight not in (penalty.before, penalty.given, weight):
            penalty = None  # a person has set it
        if weight and node.leaf in leaves:
            if penalty is None:
                penalty = Penalty(node.weight, weight)
            elif node.weight == weight:
                penalty = Penalty(penalty.before, weight)
            remembered[node.name] = penalty
            if node.weight != weight:
                changes[node.name] = weight
        elif penalty is not None and node.weight != penalty.before:
            # Remembered until Slurm shows the former weight.
            remembered[node.name] = penalty
            changes[node.name] = penalty.before
    return remembered, changes
