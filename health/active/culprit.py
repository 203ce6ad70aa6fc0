"""Plan group tests, and find the machine or leaf switch that makes them fail with few further tests. Pure functions.

`diagnose` derives everything from the results so far and returns the tests that it needs next. The caller adds their
results and calls it again, so a crash at any moment loses nothing, and a test whose result never comes is wanted again.

- A failed group is run again first: a test that fails once proves nothing.
- A leaf switch is suspected where every group that touches it fails. Up to four of its machines are tested with good
  partners under other switches; if all of them fail, the switch is the culprit.
- Any other failed group is bisected. If the first half passes, the fault is in the second half.
- A machine is the culprit after two failures with good partners, different ones where there are two.

`sweep` plans the groups, which run one check on several machines at once. Round r pairs each machine with one at the
distance 2^r in the order of the topology: the first rounds stay within a leaf switch, the last ones cross the spine. So
about log2(n) rounds use links of every level, and each round tests every machine once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum


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


# Machines of a leaf that must fail with partners elsewhere; a leaf with fewer than three is never suspected.
PROBES, LEAST = 4, 3
FAILURES = 2


class Part(StrEnum):
    MACHINE = "machine"
    LEAF = "leaf"


@dataclass(frozen=True, slots=True)
class GroupResult:
    test: GroupTest
    passed: bool


@dataclass(frozen=True, slots=True)
class Culprit:
    part: Part
    name: str
    # Further tests of this part, all of which failed.
    failures: int
    # Time of the verdict; 0: now.
    at: float = 0.0


@dataclass(frozen=True, slots=True)
class Diagnosis:
    culprits: tuple[Culprit, ...]
    # Tests to run next; none: the diagnosis is complete.
    wanted: tuple[GroupTest, ...]
    # Suspects for which no good partner exists.
    undecided: tuple[str, ...] = ()


def diagnose(
    machines: Iterable[PlacedMachine],
    groups: Sequence[GroupTest],
    results: Iterable[GroupResult],
    good: Collection[str] = (),
    idle: Collection[str] = (),
) -> Diagnosis:
    """Diagnose one sweep from its groups and all results, in the order in which they came.

    `good` are machines that passed shortly before the sweep; the idle ones are preferred as partners.
    """
    search = _Search(machines, groups, results, frozenset(good), frozenset(idle))
    search.run()
    culprits = sorted(search.culprits, key=lambda culprit: (culprit.part, culprit.name))
    return Diagnosis(tuple(culprits), tuple(search.wanted), tuple(sorted(search.undecided)))


class _Search:
    def __init__(
        self,
        machines: Iterable[PlacedMachine],
        groups: Sequence[GroupTest],
        results: Iterable[GroupResult],
        good: frozenset[str],
        idle: frozenset[str],
    ) -> None:
        self.leaf = {machine.name: machine.leaf for machine in machines}
        self.groups = groups
        self.results: dict[frozenset[str], list[GroupResult]] = {}
        self.idle = idle
        # Machines of the sweep prove themselves in it.
        self.good = set(good) - {name for group in groups for name in group.suspects}
        for result in results:
            self.results.setdefault(frozenset(result.test.suspects), []).append(result)
            if result.passed:
                self.good.update(result.test.machines)
        self.culprits: list[Culprit] = []
        self.wanted: list[GroupTest] = []
        self.undecided: set[str] = set()

    def run(self) -> None:
        untested = [group for group in self.groups if not self._list_results_of(group.suspects)]
        self.wanted += untested
        failed = [group for group in self.groups if self._has_only_failures(group.suspects)]
        # A switch is judged after the whole sweep: a group that still runs may clear it.
        explained = set() if untested else self._search_leaves(failed)
        for group in failed:
            if not explained.intersection(self.leaf[name] for name in group.suspects):
                self._search_group(group.suspects)
        self._doubt_machines()

    def _doubt_machines(self) -> None:
        """Withhold machines of a leaf without a good machine: the leaf itself may be the culprit."""
        for leaf in sorted({self.leaf[culprit.name] for culprit in self.culprits if culprit.part is Part.MACHINE}):
            swept = [name for group in self.groups for name in group.suspects if self.leaf[name] == leaf]
            if not leaf or len(swept) < LEAST or self.good.intersection(swept):
                continue
            swept.sort(key=lambda name: not self._list_results_of([name]))
            accused = [item for item in self.culprits if item.part is Part.MACHINE and self.leaf[item.name] == leaf]
            before = self.wanted
            self.wanted = [test for test in before if {self.leaf[name] for name in test.suspects} != {leaf}]
            if self._probe(leaf, swept[:PROBES]):
                self.culprits = [item for item in self.culprits if item not in accused]
            else:
                self.wanted = before

    def _list_results_of(self, suspects: Iterable[str]) -> list[GroupResult]:
        return self.results.get(frozenset(suspects), [])

    def _has_only_failures(self, suspects: Iterable[str]) -> bool:
        results = self._list_results_of(suspects)
        return bool(results) and not any(result.passed for result in results)

    def _search_leaves(self, failed: Sequence[GroupTest]) -> set[str]:
        """Return the leaves that explain their groups' failures, or may do so after the wanted tests."""
        explained = set()
        for leaf in sorted({self.leaf[name] for group in failed for name in group.suspects} - {""}):
            touching = [group for group in self.groups if leaf in {self.leaf[name] for name in group.suspects}]
            members = [name for group in touching for name in group.suspects if self.leaf[name] == leaf]
            if len(touching) < 2 or len(members) < LEAST or not all(group in failed for group in touching):
                continue
            if self._probe(leaf, members[:PROBES]):
                explained.add(leaf)
        return explained

    def _probe(self, leaf: str, members: Sequence[str]) -> bool:
        """Tell if the leaf is the culprit or still suspected; the first probe alone clears most leaves."""
        if any(result.passed for name in members for result in self._list_results_of([name])):
            return False
        missing = [name for name in members if not self._list_results_of([name])]
        if not missing:
            self.culprits.append(Culprit(Part.LEAF, leaf, len(members)))
            return True
        for name in missing if len(missing) < len(members) else missing[:1]:
            if not self._want_single(name, elsewhere=True):
                return False
        return True

    def _search_group(self, suspects: tuple[str, ...]) -> None:
        # A suspect that failed alone confirms its group's failure.
        confirmed = len(self._list_results_of(suspects)) >= FAILURES or any(
            self._has_only_failures([name]) for name in suspects
        )
        if confirmed:
            self._bisect(suspects)
        else:
            self.wanted.append(GroupTest(suspects))

    def _bisect(self, suspects: tuple[str, ...]) -> None:
        if len(suspects) == 1:
            self._judge_single(suspects[0])
            return
        first, second = suspects[: len(suspects) // 2], suspects[len(suspects) // 2 :]
        passed = self._half_passed(first)
        if passed:
            self._bisect(second)
            return
        self._search_half(first, passed)
        # Before the first half has failed, the second half may need no test.
        if passed is False:
            self._search_half(second, self._half_passed(second))

    def _search_half(self, half: tuple[str, ...], passed: bool | None) -> None:
        if passed is False:
            self._bisect(half)
        elif passed is None and len(half) == 1:
            self._want_single(half[0])
        elif passed is None:
            self.wanted.append(GroupTest(half))

    def _half_passed(self, half: tuple[str, ...]) -> bool | None:
        """Tell if the half passed; None: not tested yet."""
        if self.good.issuperset(half):
            return True
        if results := self._list_results_of(half):
            return any(result.passed for result in results)
        return None

    def _judge_single(self, name: str) -> None:
        results = self._list_results_of([name])
        if name in self.good:
            return
        if len(results) >= FAILURES:
            self.culprits.append(Culprit(Part.MACHINE, name, len(results)))
        else:
            self._want_single(name)

    def _want_single(self, name: str, *, elsewhere: bool = False) -> bool:
        """Want a test with a good partner: a new one if possible, in the same leaf first unless `elsewhere`."""
        before = {partner for result in self._list_results_of([name]) for partner in result.test.partners}
        busy = {machine for test in self.wanted for machine in test.machines}
        leaf = self.leaf[name]
        choice = [other for other in self.good if other != name and (not elsewhere or self.leaf.get(other) != leaf)]
        if not choice:
            self.undecided.add(name)
            return False

        def order(other: str) -> tuple[bool, bool, bool, bool, str]:
            return other in before, other not in self.idle, other in busy, self.leaf.get(other) != leaf, other

        partner = min(choice, key=order)
        self.wanted.append(GroupTest((name,), (partner,)))
        return True
