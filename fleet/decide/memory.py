"""Memory between passes. Losing it is safe at any moment: durable facts are in Slurm and Kubernetes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from fleet.decide.actions import Change, CreatePod, Key, action_key
from fleet.reasons import Mark

# The longest time between retries of a refused change.
LONGEST_S = 30.0
# A pool with this many creations in one pass is no longer limited.
FASTEST = 32


@dataclass(frozen=True, slots=True)
class LostPod:
    """A pod that Slurm does not know: since when, and how often it was replaced."""

    since: float
    times: int = 0


@dataclass(frozen=True, slots=True)
class NoticeHistory:
    texts: frozenset[str] = frozenset()
    since: float = 0.0  # start of the minute in which new texts are counted
    times: int = 0


@dataclass(frozen=True, slots=True)
class RefusedChange:
    """A change that failed: how often, why, and when it may be tried again."""

    times: int
    text: str
    until: float


@dataclass(frozen=True, slots=True)
class PlaceHistory:
    """A node's place in Slurm's topology, and when it changed before."""

    place: str
    times: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class FleetMemory:
    # Notices by subject and kind: the same text is reported once.
    reported: Mapping[tuple[str, str], NoticeHistory] = field(default_factory=dict)
    # Since when a node of Slurm has no pod.
    absent: Mapping[str, float] = field(default_factory=dict)
    lost: Mapping[str, LostPod] = field(default_factory=dict)
    # Marks of nodes whose comment a person uses.
    marks: Mapping[str, Mark] = field(default_factory=dict)
    moved: Mapping[str, PlaceHistory] = field(default_factory=dict)
    # Failed changes that are still due.
    refused: Mapping[Key, RefusedChange] = field(default_factory=dict)
    # Since when a waiting job has had as many idle nodes as it asks for.
    fed: Mapping[str, float] = field(default_factory=dict)
    # How many pods of a pool are created in one pass, since one was refused.
    paces: Mapping[str, int] = field(default_factory=dict)
    # When slurmctld last answered, by the fleet's clock; 0: it answers.
    slurm_silent_since: float = 0.0

    def tried(self, changes: Iterable[Change], refused: Mapping[Key, str], now: float) -> FleetMemory:
        """Remember the outcome of a pass. `refused`: the changes that failed, and why."""
        tried = tuple(changes)
        keys = {action_key(change) for change in tried}
        refusals = {key: refusal for key, refusal in self.refused.items() if key not in keys}
        for key, text in refused.items():
            times = self.refused[key].times if key in self.refused else 0
            refusals[key] = RefusedChange(times + 1, text, now + min(LONGEST_S, 2.0 ** min(times, 10)))
        return replace(self, refused=refusals, paces=self._paces(tried, refused))

    def _paces(self, tried: Iterable[Change], refused: Mapping[Key, str]) -> Mapping[str, int]:
        """After a refusal create one pod at a time, since a quota refuses the next too; double after each success."""
        paces = dict(self.paces)
        created = [change for change in tried if isinstance(change, CreatePod)]
        for name in {change.pool.name for change in created}:
            if any(change.pool.name == name and action_key(change) in refused for change in created):
                paces[name] = 1
            elif name in paces and paces[name] < FASTEST:
                paces[name] *= 2
            else:
                paces.pop(name, None)
        return paces
