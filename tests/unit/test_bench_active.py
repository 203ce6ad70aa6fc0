"""Simulated sweeps of `bench active`: every fault of every rail is told, none besides, within the fleet's share."""

from __future__ import annotations

import math
import random

import pytest

from bench.active import SimulatedFabric, break_some, placed


@pytest.mark.parametrize("seed", range(8))
def test_bad_links_and_a_bad_leaf_of_rails_are_found_within_the_share(seed: int) -> None:
    dice = random.Random(seed)
    machines, links = placed(dice.choice([128, 256]), 16), dice.randint(0, 3)
    fabric = SimulatedFabric(machines, 4, break_some(machines, 4, links, dice))
    fabric.sweep()
    assert fabric.reported() == fabric.faults
    assert fabric.busiest <= fabric.settings.share * len(machines)
    for check in fabric.checks:
        assert fabric.further(check) <= 2 * (links + 1) * math.log2(len(machines)) + 4


def test_a_healthy_fabric_is_swept_once_and_blames_nothing() -> None:
    fabric = SimulatedFabric(placed(64, 16), 8, frozenset())
    fabric.sweep()
    assert not fabric.reported()
    assert fabric.tests == dict.fromkeys(fabric.checks, 32)
