"""What happens to Kubernetes' machines, and what the pods and Slurm make of it."""

from __future__ import annotations

import pytest

from tests.kubernetes import machine as power
from tests.kubernetes.lab import Lab
from tests.kubernetes.world import Release

pytestmark = pytest.mark.timeout(900)


def test_a_drained_machine_gives_its_pods_and_jobs_away(release: Release) -> None:
    job = release.submit("alice", "-w", f"{release.name}-worker-0", script="sleep 600")
    release.wait_for(job, "RUNNING")
    node = release.node_of("worker-0")
    release.shut()
    release.kubernetes("drain", node, "--ignore-daemonsets", "--delete-emptydir-data", "--timeout=240s")
    try:
        release.wait_ready()
        assert node not in {release.node_of(name) for name in release.pods()}
        release.wait_requeued(job)
    finally:
        release.kubernetes("uncordon", node)


@pytest.mark.parametrize("daemon", ["kubelet", "containerd"])
def test_a_machines_daemon_that_is_killed_and_comes_back_costs_nobody_anything(
    release: Release, lab: Lab, daemon: str
) -> None:
    job = release.submit("alice", "-w", f"{release.name}-worker-0", script="sleep 15")
    release.wait_for(job, "RUNNING")
    before = release.containers()
    node = lab.node(release.node_of("worker-0"))
    power.kill(node, daemon)
    if daemon == "kubelet":
        lab.start_kubelet(node)
    else:
        lab.start_containerd(node)
    release.wait_for(job, "COMPLETED")
    release.wait_ready()
    assert release.containers() == before and release.restarts(job) == 0
