"""The bench's site at a size for every day: a mass event between a real API server and a real slurmctld."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from bench.fleet import FleetProcess, Site, knows_both_sides, open_site
from tests.kubernetes import programs
from tests.waiting import until

pytestmark = [pytest.mark.docker, pytest.mark.cluster]

SIZE, MANY = 40, 12


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Site]:
    if not programs.built() and (why := programs.refusal()):
        pytest.skip(f"no Kubernetes: {why}")
    with open_site(tmp_path, SIZE) as found:
        yield found


def test_a_mass_event_is_a_pause_and_no_drains_and_a_cordon_counts_all_the_same(made: Site) -> None:
    made.policy.write_text(json.dumps({"notReady": 2}))
    fleet = FleetProcess(made)
    log = fleet.log.read_text
    try:
        until(partial(knows_both_sides, made, fleet), "both sides are known", seen=log)
        for number in range(MANY):
            made.silent.add(number)
            made.report_kubelet(number, ready=False)
        until(lambda: fleet.read_metric("stands", '{kind="pause"}'), "it pauses", seen=log)
        assert "more than 8 of 40 workers have unwell machines" in log()
        # What comes after it is decided by a look at all of them, by then silent for long enough.
        for number in (SIZE - 1, SIZE - 2):
            made.cordon(number)
            until(partial(made.is_drained, number), "a person's cordon is a drain", seen=log)
        until(lambda: fleet.count_changes("showonnode") >= 2, "and shown", seen=log)
        assert fleet.count_changes("drain") == 2, log()
        for number in range(MANY):
            made.report_kubelet(number, ready=True)
        until(lambda: not fleet.read_metric("stands", '{kind="pause"}'), "it is over", seen=log)
    finally:
        fleet.end()
