"""Plan group tests: pair all idle machines by topology, and keep within the share of the fleet. Pure functions.

A group test runs one check on several machines at once. Round r of a sweep pairs each machine with one at the distance
2^r in the order of the topology: the first rounds stay within a leaf switch, the last ones cross the spine. So about
log2(n) rounds use links of every level, and each round tests every machine once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PlacedMachine:
    """A machine and its switches, from the root to the leaf; no switch: the topology is not known."""

    name: str
    place: tuple[str, ...] = ()

    @property
    def leaf(self) -> str:
        return self.place[-1] if self.place else ""


@dataclass(frozen=True, slots=True)
class GroupTest:
    """Machines under test, and machines that are known to be good and only complete the group."""

    suspects: tuple[str, ...]
    partners: tuple[str, ...] = ()

    @property
    def machines(self) -> tuple[str, ...]:
        return (*self.suspects, *self.partners)


def rounds(machines: int) -> int:
    """Return the number of rounds after which pairs have crossed every level."""
    return max(1, (machines - 1).bit_length())


def sweep(machines: Iterable[PlacedMachine], number: int) -> tuple[GroupTest, ...]:
    """Return the pairs of one round; a machine without a counterpart joins a pair of its neighbours."""
    order = [machine.name for machine in sorted(machines, key=lambda machine: (machine.place, machine.name))]
    if len(order) < 2:
        return ()
    distance = 1 << (number % rounds(len(order)))
    pairs = [[order[i], order[i ^ distance]] for i in range(len(order)) if i < i ^ distance < len(order)]
    paired = {name for pair in pairs for name in pair}
    single = [name for name in order if name not in paired]
    pairs += [single[i : i + 2] for i in range(0, len(single) - 1, 2)]
    if len(single) % 2:
        pairs[-1].append(single[-1])
    return tuple(GroupTest(tuple(sorted(pair))) for pair in pairs)


def admit(
    tests: Sequence[GroupTest], busy: Iterable[str], leaves: Mapping[str, str], share: float
) -> tuple[GroupTest, ...]:
    """Return the tests that may start now, in order.

    `busy` are the machines that run an active check; `leaves` has the leaf switch of every machine of the fleet. The
    share limits the fleet and each leaf. One test may always run, and one on each leaf within the fleet's share: a
    small leaf's share is less than a pair.
    """
    running = set(busy)
    size = Counter(leaves.values())
    used = Counter(leaves.get(name, "") for name in running)
    admitted: list[GroupTest] = []
    for test in tests:
        if running.intersection(test.machines):
            continue
        added = Counter(leaves.get(name, "") for name in test.machines)
        fits = len(running) + len(test.machines) <= share * len(leaves) and all(
            not used[leaf] or used[leaf] + count <= share * size[leaf] for leaf, count in added.items()
        )
        if fits or not running:
            admitted.append(test)
            running.update(test.machines)
            used.update(added)
    return tuple(admitted)
