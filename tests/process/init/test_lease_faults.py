"""Random faults of two controllers under load: every job that was acknowledged is there once, under one number."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from tests.process.lease_faults import can_mount, run, sequence

pytestmark = pytest.mark.root

# The network of the active controller is cut twice; it wakes after its term; both leases die while the volume is full.
# `python -m bench lease` has all.
SEEDS = (13, 39, 185)


def test_a_seed_gives_one_sequence() -> None:
    assert sequence(3, hangs=True) == sequence(3, hangs=True) != sequence(4, hangs=True)
    assert {fault.kind for seed in range(50) for fault in sequence(seed, hangs=False)} >= {"freeze", "pod dies"}


def test_no_acknowledged_job_is_lost_or_doubled_and_no_number_is_given_twice() -> None:
    with ThreadPoolExecutor(len(SEEDS)) as pool:
        outcomes = list(pool.map(partial(run, hangs=can_mount()), SEEDS))
    assert [outcome.problems for outcome in outcomes] == [[], [], []]
    assert all(outcome.acknowledged for outcome in outcomes)
