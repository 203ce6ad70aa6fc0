"""How much may happen at a time: what machines say by themselves must not empty the fleet."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Mapping
from dataclasses import dataclass

from fleet import reasons
from fleet.decide.actions import Change, Key, action_key
from fleet.decide.causes import BY_MACHINES
from fleet.policy import Policy
from fleet.world.slurm import SlurmNode
from fleet.world.snapshot import Worker

Causes = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Budget:
    """Workers that machines' own signs hold or would hold, and how many of them there may be."""

    against: frozenset[str]
    most: int
    # Whose machine or pod has fallen silent, and not for long enough yet to be held for that.
    soon: frozenset[str] = frozenset()

    @property
    def paused(self) -> bool:
        """Too many at once is no fault of each: none is drained anew, not even up to the limit. Who falls silent counts
        from then on: else of many that do one after the other the first ones are held before there are too many."""
        return len(self.against | self.soon) > self.most


def budget(nodes: Mapping[str, tuple[SlurmNode | None, Causes]], policy: Policy, silent: Iterable[str] = ()) -> Budget:
    """Of workers, and of nodes whose pods are gone. `silent`: of these, whoever is so just now, for however long."""
    against = frozenset(name for name, (node, causes) in nodes.items() if _counts(node, causes))
    soon = frozenset(name for name in silent if not _held(nodes[name][0]))
    return Budget(against, max(1, int(len(nodes) * policy.share)), soon)


def _counts(node: SlurmNode | None, causes: Causes) -> bool:
    if node is None:
        return bool(causes.keys() & BY_MACHINES)
    if node.ours:
        # Also one whose cause is gone and that is not undrained yet: it takes no jobs.
        return bool((causes.keys() | reasons.kinds(node.reason)) & BY_MACHINES)
    return bool(causes.keys() & BY_MACHINES) and not _held(node)


def _held(node: SlurmNode | None) -> bool:
    return node is not None and (node.drained or node.down)


def admitted(node: SlurmNode | None, causes: Causes, budget: Budget) -> Causes:
    """The causes that count. What a worker is drained for already goes on to count, also in a pause."""
    if not budget.paused:
        return causes
    before = reasons.kinds(node.reason) if node and node.ours else frozenset[str]()
    return {kind: said for kind, said in causes.items() if kind not in BY_MACHINES or kind in before}


def away(workers: Iterable[Worker]) -> dict[str, set[str]]:
    """The pods that are going or not ready, by pool."""
    found: dict[str, set[str]] = {}
    for worker in workers:
        if worker.pod.deleting or not worker.pod.ready:
            found.setdefault(worker.pod.pool, set()).add(worker.name)
    return found


def shared(changes: Collection[Change], refused: Container[Key], most: int) -> list[Change]:
    """The first ones, so many. Those that were refused before have half of that while others wait: of a thousand that a
    budget or a policy refuses some are due in each look, and what stands behind them would never be."""
    later = {action_key(one) for one in [one for one in changes if action_key(one) in refused][most // 2 :]}
    return sorted(changes, key=lambda one: action_key(one) in later)[:most]
