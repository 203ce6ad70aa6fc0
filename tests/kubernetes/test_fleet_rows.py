"""The fleet between a real API server and a real Slurm, continued: jobs on a pod that is to go have their time."""

from __future__ import annotations

import contextlib
import json
import urllib.error
from collections.abc import Iterator

import pytest

from tests.kubernetes.test_fleet import PODS, Both, both_sides, idle
from tests.waiting import until

pytestmark = [pytest.mark.docker, pytest.mark.cluster]


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    with both_sides(tmp_path_factory.mktemp("fleet"), "fleetrows") as found:
        yield found


def there(both: Both) -> bool:
    with contextlib.suppress(urllib.error.HTTPError):
        return "deletionTimestamp" not in both.api.ask("GET", f"{PODS}/w1")["metadata"]
    return False


def test_jobs_of_a_pod_that_is_to_go_have_their_time_and_are_requeued(both: Both) -> None:
    both.policy.write_text(json.dumps({"leaveWithin": 2}))
    more = ("--parsable", "-w", "w1", "--chdir=/tmp", "--wrap", "sleep 7777")
    job = both.controller.run("sbatch", *more, user="demo").strip()

    def state() -> str:
        return both.controller.run("squeue", "-h", "-j", job, "-o", "%t").strip()

    until(lambda: state() == "R", "the job runs")
    with both.running():
        both.api.merge(f"{PODS}/w1", {"metadata": {"annotations": {"minivm.io/leave": "new template"}}})
        wanted = "minivm: fleet: deadline+leave: its jobs had 2 s, new template"
        until(lambda: both.reason("w1") == wanted, "its time is over", seen=both.log)
        until(lambda: state() == "PD", "its job waits for the next", seen=both.log)
        until(lambda: not there(both), "then the pod goes", seen=both.log)
        both.controller.run("scancel", job)
        with contextlib.suppress(urllib.error.HTTPError):
            both.api.ask("DELETE", f"{PODS}/w1?gracePeriodSeconds=0")
        both.new_pod("w1")
        until(lambda: idle(both, "w1"), "and the next takes jobs", seen=both.log)
