"""What is remembered from one look to the next. All of it may be lost at any moment: what must outlive us stands in
Slurm and Kubernetes, beside what it is about."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fleet.topology.place import Moved
from fleet.words import Mark


@dataclass(frozen=True, slots=True)
class Lost:
    since: float
    times: int = 0  # that its pod was replaced


@dataclass(frozen=True, slots=True)
class Told:
    texts: frozenset[str] = frozenset()
    since: float = 0.0  # when the first of so many new ones was told
    times: int = 0


@dataclass(frozen=True, slots=True)
class Memory:
    # What was told, by (about, kind): the same is not told twice.
    told: Mapping[tuple[str, str], Told] = field(default_factory=dict)
    # Since when a node of Slurm has no pod.
    absent: Mapping[str, float] = field(default_factory=dict)
    # Pods that Slurm does not know.
    lost: Mapping[str, Lost] = field(default_factory=dict)
    # The marks of nodes whose comment somebody else uses.
    marks: Mapping[str, Mark] = field(default_factory=dict)
    # Where nodes are in Slurm's topology, and how often that has changed.
    moved: Mapping[str, Moved] = field(default_factory=dict)
