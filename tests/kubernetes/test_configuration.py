"""A slurm.conf that changes under a running cluster: the kubelet's swap of a mounted ConfigMap."""

from __future__ import annotations

import time

import pytest

from tests.kubernetes.kubectl import condition_of
from tests.kubernetes.plan import PAUSE
from tests.kubernetes.world import Release
from tests.waiting import until

pytestmark = pytest.mark.timeout(900)


def test_a_changed_slurm_conf_is_live_and_no_pod_and_no_job_knows_of_it(release: Release) -> None:
    before = release.lives()
    job = release.submit("alice", script="sleep 600")
    release.wait_for(job, "RUNNING")
    begun = time.monotonic()
    release.upgrade(slurm={"partitions": {"night": {"pools": ["worker"], "options": {"MaxTime": "08:00:00"}}}})

    def live() -> bool:
        # slurmctld closes the connections that it has not answered when it hands over.
        return "MaxTime=08:00:00" in release.slurm("sh", "-c", "scontrol show partition || true")

    until(live, "the partition is there", within=180, seen=lambda: release.run("controller-0", "minivm", "status"))
    print(f"ConfigMap to live: {time.monotonic() - begun:.1f} s")
    # Login pods and workers have theirs from slurmctld.
    until(lambda: "night" in release.as_user("alice", "sinfo -h -o %P || true"), "the login pod has it")
    assert release.state(job) == "RUNNING"
    assert release.lives() == before
    release.slurm("scancel", job)


def test_a_pool_that_comes_and_goes_replaces_no_other_worker_and_no_login_pod(release: Release) -> None:
    """Jobs on the other pools run on. The controller's pod, which has no jobs, learns the new pool's names."""
    before = {name: life for name, life in release.lives().items() if name != "controller-0"}
    job = release.submit("alice", "-w", f"{release.name}-worker-0", "--no-requeue", script="sleep 600")
    release.wait_for(job, "RUNNING")
    release.upgrade(workers={"pools": {"later": {"replicas": 1}}})
    try:
        wait_settled(release)
        name = f"{release.name}-later-0"
        assert release.as_user("alice", f"srun -w {release.name}-worker-1,{name} hostname | wc -l") == "2"
        assert name in release.run("controller-0", "getent", "hosts", name)
    finally:
        del release.over["workers"]["pools"]["later"]
        release.upgrade()
    wait_settled(release)
    assert {name: life for name, life in release.lives().items() if name != "controller-0"} == before
    assert release.state(job) == "RUNNING"
    release.slurm("scancel", job)


def wait_settled(release: Release) -> None:
    """Wait until all pods are ready and of their template: a StatefulSet's controller replaces a pod seconds later."""

    def settled() -> bool:
        sets = release.get("statefulsets", "-l", f"app.kubernetes.io/instance={release.name}")["items"]
        return release.all_ready() and all(
            item["status"].get("observedGeneration") == item["metadata"]["generation"]
            and item["status"].get("currentRevision") == item["status"].get("updateRevision")
            and item["status"].get("readyReplicas") == item["spec"]["replicas"]
            for item in sets
        )

    until(settled, "every pod is ready, and no roll-out is under way", within=240, seen=release.why)


def test_a_slurm_conf_that_slurm_cannot_read_is_refused_and_told_and_the_cluster_runs_on(release: Release) -> None:
    before = release.lives()
    release.upgrade(slurm={"extraConfig": "SelectTipe=linear"})

    def told() -> dict[str, str]:
        found = condition_of(release.pods()["controller-0"], "minivm.io/Ready")
        return found if found.get("reason") == "Degraded" and "slurm.conf: refused" in found["message"] else {}

    found = until(told, "the pod's condition tells", within=180, seen=release.why)
    assert found["status"] == "True"
    assert "slurm.conf: refused, the last one stays" in found["message"] and "SelectTipe" in found["message"]
    job = release.submit("alice", script="true")
    release.wait_for(job, "COMPLETED")
    release.upgrade(slurm={"extraConfig": ""})
    until(lambda: not told(), "it is mended", within=180, seen=release.why)
    assert release.lives() == before


def test_a_sites_own_parts_run_beside_the_login_of_minivm(release: Release) -> None:
    if not release.kubernetes.lab:
        pytest.skip("the sidecar's image is the lab's own")
    parts = {
        "extraVolumes": [{"name": "own", "emptyDir": {}}],
        "extraVolumeMounts": [{"name": "own", "mountPath": "/scratch/own"}],
        "sidecars": [{"name": "beside", "image": PAUSE, "imagePullPolicy": "Never"}],
        "podLabels": {"team": "a"},
    }
    release.upgrade(login=parts)

    def containers() -> list[str]:
        """Name the ready containers of the login pod, which is away for a moment while it is replaced."""
        status = release.pods().get("login-0", {}).get("status", {})
        return sorted(item["name"] for item in status.get("containerStatuses", []) if item["ready"])

    until(lambda: containers() == ["beside", "login"], "both are ready", within=180, seen=release.why)
    assert release.pods()["login-0"]["metadata"]["labels"]["team"] == "a"
    release.run("login-0", "touch", "/scratch/own/file")
    release.shut()  # the way to the pod that was replaced
    said = release.as_user("alice", "sinfo -h -o %P && stat -c %F /scratch/own/file")
    assert "all" in said and "regular empty file" in said
    release.upgrade(login={"extraVolumes": [], "extraVolumeMounts": [], "sidecars": []})
    until(lambda: containers() == ["login"], "the login is alone again", within=180, seen=release.why)
    release.shut()
