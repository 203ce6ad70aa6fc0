"""What an operator does to the release, and what becomes of the jobs meanwhile."""

from __future__ import annotations

import pytest

from tests.kubernetes.world import Release
from tests.waiting import until

pytestmark = pytest.mark.timeout(900)


def test_a_deleted_worker_gives_its_job_back(release: Release) -> None:
    """What can end in time ends; what cannot is requeued."""
    short = release.submit("alice", "-w", f"{release.name}-worker-0", script="sleep 5")
    long = release.submit("alice", "-w", f"{release.name}-worker-0", script="sleep 600")
    release.wait_for(long, "RUNNING")
    release.wait_for(short, "RUNNING", "COMPLETED")
    old = release.pods()["worker-0"]["metadata"]["uid"]
    release.kubectl("delete", "pod", f"{release.name}-worker-0", "--wait=false")
    until(lambda: release.is_new("worker-0", old), "another pod of the name is there", within=120, seen=release.why)
    print(f"a new pod is there to ready: {release.wait_ready():.1f} s")
    release.wait_for(short, "COMPLETED")
    release.wait_requeued(long)
    assert release.restarts(short) == 0


def test_a_deleted_controller_costs_no_job(release: Release) -> None:
    runs = release.submit("alice", script="sleep 20")
    waits = release.submit("alice", f"-d afterok:{runs}", script="true")
    release.wait_for(runs, "RUNNING")
    release.kubectl("delete", "pod", f"{release.name}-controller-0")
    print(f"controller deleted to all ready: {release.wait_ready():.1f} s")
    release.wait_for(runs, "COMPLETED")
    release.wait_for(waits, "COMPLETED")
    assert (release.restarts(runs), release.restarts(waits)) == (0, 0)
