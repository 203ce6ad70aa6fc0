"""How much may happen at a time: what machines say by themselves must not empty the fleet."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from fleet import words
from fleet.decide.causes import BY_MACHINES
from fleet.policy import Policy
from fleet.world.slurm import SlurmNode
from fleet.world.world import Worker

Causes = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Budget:
    """Workers that machines' own signs hold or would hold, and how many of them there may be."""

    against: frozenset[str]
    most: int

    @property
    def paused(self) -> bool:
        """Too many at once is no fault of each: none is drained anew, not even up to the limit."""
        return len(self.against) > self.most


def budget(nodes: Mapping[str, tuple[SlurmNode | None, Causes]], policy: Policy) -> Budget:
    """Of workers, and of nodes whose pods are gone."""
    against = frozenset(name for name, (node, causes) in nodes.items() if _counts(node, causes))
    return Budget(against, max(1, int(len(nodes) * policy.share)))


def _counts(node: SlurmNode | None, causes: Causes) -> bool:
    if node is None:
        return bool(causes.keys() & BY_MACHINES)
    if node.ours:
        # Also one whose cause is gone and that is not undrained yet: it takes no jobs.
        return bool((causes.keys() | words.kinds(node.reason)) & BY_MACHINES)
    return bool(causes.keys() & BY_MACHINES) and not (node.drained or node.down)


def admitted(node: SlurmNode | None, causes: Causes, budget: Budget) -> Causes:
    """The causes that count. What a worker is drained for already goes on to count, also in a pause."""
    if not budget.paused:
        return causes
    before = words.kinds(node.reason) if node and node.ours else frozenset[str]()
    return {kind: said for kind, said in causes.items() if kind not in BY_MACHINES or kind in before}


def away(workers: Iterable[Worker]) -> dict[str, frozenset[str]]:
    """The pods that are going or not ready, by pool."""
    found: dict[str, frozenset[str]] = {}
    for worker in workers:
        if worker.pod.deleting or not worker.pod.ready:
            found[worker.pod.pool] = found.get(worker.pod.pool, frozenset()) | {worker.name}
    return found
