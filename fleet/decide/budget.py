"""Limits on what happens at a time: signs of machines must not empty the fleet."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Mapping
from dataclasses import dataclass

from fleet.decide.actions import Change, Key, action_key
from fleet.decide.causes import LIMITED
from fleet.policy import Policy
from fleet.world.slurm import SlurmNode
from fleet.world.snapshot import Worker

Causes = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Budget:
    """The workers that are or would be drained for signs of their machines, and the most that may be."""

    against: frozenset[str]
    most: int
    # Workers whose machine or pod is silent, but not yet long enough to be drained for it.
    soon: frozenset[str] = frozenset()

    @property
    def paused(self) -> bool:
        """Return whether so many machines are unwell that the cause is probably elsewhere.

        Then no further worker is drained.

        Silent machines count at once; otherwise the first of many would be drained before the limit is seen.
        """
        return len(self.against | self.soon) > self.most


def budget(nodes: Mapping[str, tuple[SlurmNode | None, Causes]], policy: Policy, silent: Iterable[str] = ()) -> Budget:
    """Count workers and nodes without pods. `silent`: those that are silent now, for however long."""
    against = frozenset(name for name, (node, causes) in nodes.items() if _counts(node, causes))
    soon = frozenset(name for name in silent if not _is_held(nodes[name][0]))
    return Budget(against, max(1, int(len(nodes) * policy.share)), soon)


def _counts(node: SlurmNode | None, causes: Causes) -> bool:
    if node is None:
        return bool(causes.keys() & LIMITED)
    if node.by_fleet:
        # A node whose cause has gone takes no jobs until it is undrained.
        return bool((causes.keys() | node.kinds) & LIMITED)
    return bool(causes.keys() & LIMITED) and not _is_held(node)


def _is_held(node: SlurmNode | None) -> bool:
    return node is not None and (node.drained or node.down)


def admitted(node: SlurmNode | None, causes: Causes, budget: Budget) -> Causes:
    """Return the causes that count now.

    During a pause, machine signs count only if the worker is drained for them already.
    """
    if not budget.paused:
        return causes
    before = node.kinds if node else frozenset[str]()
    return {kind: text for kind, text in causes.items() if kind not in LIMITED or kind in before}


def away(workers: Iterable[Worker]) -> dict[str, set[str]]:
    """Return the pods that are being deleted or not ready, by pool."""
    found: dict[str, set[str]] = {}
    for worker in workers:
        if worker.pod.deleting or not worker.pod.ready:
            found.setdefault(worker.pod.pool, set()).add(worker.name)
    return found


def shared(changes: Collection[Change], refused: Container[Key], most: int) -> list[Change]:
    """Take the first `most` changes.

    Changes that were refused before get half of the places while others wait; otherwise a thousand refused changes
    would keep the rest from their turn.
    """
    retries = [change for change in changes if action_key(change) in refused]
    later = {action_key(change) for change in retries[most // 2 :]}
    return sorted(changes, key=lambda change: action_key(change) in later)[:most]
