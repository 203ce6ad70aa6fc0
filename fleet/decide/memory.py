"""What is remembered from one look to the next. All of it may be lost at any moment: what must outlive us stands in
Slurm and Kubernetes, beside what it is about."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from fleet.decide.actions import Change, CreatePod, Key, action_key
from fleet.decide.topology import PlaceHistory
from fleet.reasons import Mark

# What is refused is tried again at the latest after this.
LONGEST_S = 30.0
# From so many at a time on nobody counts.
FASTEST = 32


@dataclass(frozen=True, slots=True)
class Lost:
    since: float
    times: int = 0  # that its pod was replaced


@dataclass(frozen=True, slots=True)
class NoticeHistory:
    texts: frozenset[str] = frozenset()
    since: float = 0.0  # when the first of so many new ones was told
    times: int = 0


@dataclass(frozen=True, slots=True)
class Refused:
    """A change that could not be made: how often, in which words, and before when it is not tried again."""

    times: int
    text: str
    until: float


@dataclass(frozen=True, slots=True)
class Memory:
    # What was told, by (about, kind): the same is not told twice.
    told: Mapping[tuple[str, str], NoticeHistory] = field(default_factory=dict)
    # Since when a node of Slurm has no pod.
    absent: Mapping[str, float] = field(default_factory=dict)
    # Pods that Slurm does not know.
    lost: Mapping[str, Lost] = field(default_factory=dict)
    # The marks of nodes whose comment somebody else uses.
    marks: Mapping[str, Mark] = field(default_factory=dict)
    # Where nodes are in Slurm's topology, and how often that has changed.
    moved: Mapping[str, PlaceHistory] = field(default_factory=dict)
    # What could not be made, of what is still due.
    refused: Mapping[Key, Refused] = field(default_factory=dict)
    # Since when a job that waits has had as many idle nodes as it asks for.
    fed: Mapping[str, float] = field(default_factory=dict)
    # How many of a pool's pods are made in a look, since one of them was refused.
    paces: Mapping[str, int] = field(default_factory=dict)
    # When slurmctld answered last, by the fleet's clock; 0: it answers.
    slurm_silent_since: float = 0.0

    def tried(self, changes: Iterable[Change], refused: Mapping[Key, str], now: float) -> Memory:
        """`refused`: those of the changes that could not be made, and why."""
        tried = tuple(changes)
        deeds = {action_key(change) for change in tried}
        found = {name: one for name, one in self.refused.items() if name not in deeds}
        for name, text in refused.items():
            times = self.refused[name].times if name in self.refused else 0
            found[name] = Refused(times + 1, text, now + min(LONGEST_S, 2.0 ** min(times, 10)))
        return replace(self, refused=found, paces=self._paces(tried, refused))

    def _paces(self, tried: Iterable[Change], refused: Mapping[Key, str]) -> Mapping[str, int]:
        """What refuses one of them, a quota, is likely to refuse the next one too: one by one, and where those come
        twice as many each time."""
        found = dict(self.paces)
        made = [one for one in tried if isinstance(one, CreatePod)]
        for name in {one.pool.name for one in made}:
            if any(one.pool.name == name and action_key(one) in refused for one in made):
                found[name] = 1
            elif name in found and found[name] < FASTEST:
                found[name] *= 2
            else:
                found.pop(name, None)
        return found
