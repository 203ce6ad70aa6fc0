"""Group tests of active checks: every machine is tested, few tests find the culprit, no verdict is false.

The simulated fabric has leaf switches of several machines. A bad machine fails every test that includes it; a bad leaf
switch fails every test with a machine below it. Noise makes single tests fail once.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import dataclass, field

import pytest

from health.active.culprit import (
    Culprit,
    Diagnosis,
    GroupResult,
    GroupTest,
    Part,
    PlacedMachine,
    admit,
    diagnose,
    rounds,
    sweep,
)


def fleet(machines: int, per_leaf: int) -> list[PlacedMachine]:
    return [
        PlacedMachine(f"n{i:04}", ("/", f"row{i // per_leaf // 4}/", f"row{i // per_leaf // 4}/r{i // per_leaf:03}"))
        for i in range(machines)
    ]


@dataclass
class Fabric:
    machines: list[PlacedMachine]
    bad: set[str] = field(default_factory=set)
    leaf: str = ""
    # Numbers of tests that fail once for no reason.
    noise: set[int] = field(default_factory=set)
    ran: int = 0

    def passes(self, test: GroupTest) -> bool:
        self.ran += 1
        places = {machine.name: machine.leaf for machine in self.machines}
        sick = self.bad.intersection(test.machines) or self.leaf in {places[name] for name in test.machines}
        return not sick and self.ran not in self.noise

    def find(self, groups: tuple[GroupTest, ...]) -> tuple[Diagnosis, int]:
        """Run a sweep, and then what the diagnosis wants; return it and the number of further tests."""
        results = [GroupResult(group, self.passes(group)) for group in groups]
        for _ in range(100):
            diagnosis = diagnose(self.machines, groups, results)
            if not diagnosis.wanted:
                return diagnosis, self.ran - len(groups)
            results += [GroupResult(test, self.passes(test)) for test in diagnosis.wanted]
        raise AssertionError(f"no diagnosis after 100 turns: {diagnosis}")


@pytest.mark.parametrize("machines", [2, 3, 4, 5, 7, 8, 31, 64, 100])
def test_each_round_tests_every_machine_once_and_all_rounds_cross_the_spine(machines: int) -> None:
    nodes = fleet(machines, 4)
    leaf = {node.name: node.leaf for node in nodes}
    crossed = 0
    for number in range(rounds(machines)):
        groups = sweep(nodes, number)
        assert Counter(name for group in groups for name in group.suspects) == Counter(list(leaf))
        assert all(2 <= len(group.suspects) <= 3 and not group.partners for group in groups)
        crossed += any(len({leaf[name] for name in group.suspects}) > 1 for group in groups)
    if machines > 4:
        assert crossed
    inside = [group for group in sweep(nodes, 0) if len({leaf[name] for name in group.suspects}) == 1]
    assert len(inside) >= machines // 2 - 1


def test_one_machine_has_no_group() -> None:
    assert sweep(fleet(1, 4), 0) == ()


@pytest.mark.parametrize("seed", range(200))
def test_random_faults_are_found_with_few_tests_and_no_false_verdict(seed: int) -> None:
    dice = random.Random(seed)
    per_leaf = dice.choice([4, 8, 16])
    nodes = fleet(dice.choice([2, 4, 8, 12]) * per_leaf + dice.choice([0, 1, per_leaf // 2]), per_leaf)
    # A leaf with three bad machines or more can hardly be told from a bad leaf.
    bad: set[str] = set()
    for name in dice.sample([node.name for node in nodes], dice.randint(0, 5)):
        leaf = next(node.leaf for node in nodes if node.name == name)
        if sum(node.leaf == leaf and node.name in bad for node in nodes) < 2:
            bad.add(name)
    leaves = Counter(node.leaf for node in nodes)
    sick_leaf = dice.choice([leaf for leaf, size in leaves.items() if size >= 4]) if dice.random() < 0.4 else ""
    noise = {dice.randint(1, len(nodes)) for _ in range(dice.choice([0, 0, 1, 2]))}
    fabric = Fabric(nodes, bad, sick_leaf, noise)
    size = dice.choice([2, 2, 4, 8])
    names = [node.name for node in nodes]
    groups = sweep(nodes, dice.randrange(rounds(len(nodes))))
    if size > 2:
        # One short group would be too small; it joins the one before.
        cuts = list(range(0, len(names), size))
        cuts = cuts[:-1] if len(names) - cuts[-1] < 2 else cuts
        ends = [*cuts[1:], len(names)]
        groups = tuple(GroupTest(tuple(names[start:end])) for start, end in zip(cuts, ends, strict=True))
    diagnosis, further = fabric.find(groups)
    visible = {node.name for node in nodes if node.name in bad and node.leaf != sick_leaf}
    truth = {(Part.MACHINE, name) for name in visible} | ({(Part.LEAF, sick_leaf)} if sick_leaf else set())
    told = {(culprit.part, culprit.name) for culprit in diagnosis.culprits}
    assert told <= truth, "a false verdict"
    if sick_leaf and not diagnosis.undecided:
        # A machine that was tested only together with the bad leaf's machines waits for the next round.
        assert (Part.LEAF, sick_leaf) in told
    elif not diagnosis.undecided:
        assert told == truth
    faults = max(1, len(bad) + bool(sick_leaf) + len(noise))
    assert further <= 2 * faults * math.log2(len(nodes)) + 4


def test_one_bad_machine_of_a_pair_is_named_after_four_tests() -> None:
    nodes = fleet(8, 4)
    diagnosis, further = Fabric(nodes, {"n0002"}).find(sweep(nodes, 0))
    assert diagnosis == Diagnosis((Culprit(Part.MACHINE, "n0002", 2),), ())
    assert further <= 4


def test_a_large_group_is_bisected_without_known_partners() -> None:
    nodes = fleet(64, 16)
    diagnosis, further = Fabric(nodes, {"n0037"}).find((GroupTest(tuple(node.name for node in nodes)),))
    assert [culprit.name for culprit in diagnosis.culprits] == ["n0037"]
    assert further <= 2 * 6 + 4


def test_a_bad_leaf_is_named_and_none_of_its_machines() -> None:
    nodes = fleet(64, 16)
    leaf = nodes[20].leaf
    for number in range(rounds(64)):
        diagnosis, further = Fabric(nodes, leaf=leaf).find(sweep(nodes, number))
        assert diagnosis.culprits == (Culprit(Part.LEAF, leaf, 4),)
        assert further <= 2 * 6 + 4


def test_a_test_that_fails_once_is_no_verdict() -> None:
    nodes = fleet(16, 4)
    for number in range(1, 12):
        diagnosis, further = Fabric(nodes, noise={number}).find(sweep(nodes, 0))
        assert diagnosis.culprits == ()
        assert further <= 1
    for number in range(9, 14):
        diagnosis, _ = Fabric(nodes, {"n0005"}, noise={number}).find(sweep(nodes, 0))
        assert {culprit.name for culprit in diagnosis.culprits} == {"n0005"}


def test_without_a_good_machine_there_is_no_verdict() -> None:
    nodes = fleet(8, 8)
    diagnosis, _ = Fabric(nodes, {node.name for node in nodes}).find(sweep(nodes, 0))
    assert diagnosis.culprits == ()
    assert diagnosis.undecided


def test_a_lost_result_is_wanted_again() -> None:
    nodes = fleet(4, 4)
    groups = sweep(nodes, 0)
    assert diagnose(nodes, groups, ()).wanted == groups
    assert diagnose(nodes, groups, [GroupResult(groups[0], True)]).wanted == groups[1:]


def test_the_share_limits_the_fleet_and_each_leaf() -> None:
    nodes = fleet(32, 8)
    leaves = {node.name: node.leaf for node in nodes}
    started = admit(sweep(nodes, 0), (), leaves, 0.25)
    assert len(started) == 4
    assert max(Counter(leaves[name] for test in started for name in test.machines).values()) == 2
    busy = [name for test in started for name in test.machines]
    assert admit(sweep(nodes, 0), busy, leaves, 0.25) == ()
    assert len(admit(sweep(nodes, 0), busy[:2], leaves, 0.25)) == 3


def test_a_small_fleet_runs_one_test_at_a_time() -> None:
    nodes = fleet(4, 2)
    leaves = {node.name: node.leaf for node in nodes}
    groups = sweep(nodes, 0)
    assert admit(groups, (), leaves, 0.1) == groups[:1]
    assert admit(groups, groups[0].machines, leaves, 0.1) == ()
