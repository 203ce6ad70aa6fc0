"""Simulated sweeps of `bench active`: every fault of every rail is told, none besides, within the fleet's share."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest

from bench.active import SimulatedFabric, break_some, percentile, placed, print_delay


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


@pytest.mark.parametrize(("slowest", "code"), [(2.9, 0), (3.2, 1)])
def test_a_job_that_starts_too_late_fails_the_bench(
    slowest: float, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    busy, free = [1.5] * 98 + [slowest, slowest], [1.0, 1.0, 4.0]
    assert print_delay(busy, free, Counter({"cancelled": 100})) == code
    assert f"delay at p99: {slowest - 1:.2f} s, at most 2 s" in capsys.readouterr().out
    assert [percentile(range(1, 101), percent) for percent in (1, 50, 99, 100)] == [1, 50, 99, 100]
