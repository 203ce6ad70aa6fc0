"""slurmdbd and its database in a pod of their own: jobs run while it is away, and are accounted when it is back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from cluster import ClusterError
from cluster.local import LocalCluster
from images.engine.docker import DockerEngine
from tests.cluster.conftest import NAME
from tests.cluster.researcher import Researcher, World
from tests.cluster.small import small_cluster
from tests.waiting import until

pytestmark = [pytest.mark.docker, pytest.mark.cluster]

ACCOUNTING, CONTROLLER = "slurm-accounting-0", "slurm-controller-0"
VALUES: dict[str, Any] = {"accounting": {"mode": "pod"}}


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with small_cluster(DockerEngine().client, f"{NAME}-apart", tmp_path_factory.mktemp("apart"), VALUES) as cluster:
        cluster.up(timeout=240)
        yield cluster


def accounted(cluster: LocalCluster, job: str) -> str:
    return cluster.exec(CONTROLLER, ["sacct", "-n", "-X", "-P", "-j", job, "-o", "state"])[1].strip()


def test_jobs_are_accounted_in_the_pod(apart: LocalCluster) -> None:
    bob = Researcher(World(apart), "bob")
    job = bob.submit("-o", "/dev/null", script="true")
    bob.wait_for(job, "COMPLETED")
    until(lambda: accounted(apart, job) == "COMPLETED", "it is accounted", seen=lambda: accounted(apart, job))
    assert bob(f"sacct -n -X -P -o state -j {job}").strip() == "COMPLETED", "from a login pod too"
    plan = {role: apart.exec(role, ["minivm", "status"])[1] for role in (ACCOUNTING, CONTROLLER)}
    assert "mariadb" in plan[ACCOUNTING] and "mariadb" not in plan[CONTROLLER]
    assert "slurmctld" not in plan[ACCOUNTING].replace("slurm-controller", "")


def test_the_pod_is_not_ready_without_its_database_and_says_why(apart: LocalCluster) -> None:
    small = World(apart)
    small.run(ACCOUNTING, "minivm", "stop", "mariadb")
    until(lambda: not small.row(ACCOUNTING).ready, "it is not ready", seen=lambda: small.row(ACCOUNTING))
    assert "mariadb" in small.row(ACCOUNTING).why
    small.run(ACCOUNTING, "minivm", "start", "mariadb")
    small.wait_ready()


def test_the_controller_starts_and_schedules_while_the_pod_is_away(apart: LocalCluster) -> None:
    small = World(apart)
    bob = Researcher(small, "bob")
    asked = ["sacct", "-n", "-a", "-X", "-P", "-S", "2000-01-01", "-o", "jobid,state"]
    before = set(apart.exec(CONTROLLER, asked)[1].split())
    assert before
    container = apart.kubelet.list_pods()[ACCOUNTING].container
    apart.kubelet.api.stop(container, timeout=40)
    apart.delete(CONTROLLER)
    until(lambda: small.row(CONTROLLER).ready, "the controller is ready", seen=lambda: small.row(CONTROLLER))
    job = bob.submit("-o", "/dev/null", script="true")
    bob.wait_for(job, "COMPLETED")
    complaint = "slurmdbd does not answer; jobs continue"
    until(
        lambda: any(complaint in text for text in small.row(CONTROLLER).also),
        "the controller says so",
        seen=lambda: small.row(CONTROLLER),
    )
    apart.up(timeout=240)
    until(lambda: accounted(apart, job) == "COMPLETED", "it is accounted late", seen=lambda: accounted(apart, job))
    assert before <= set(apart.exec(CONTROLLER, asked)[1].split())


def test_up_refuses_another_mode_and_changes_nothing(apart: LocalCluster) -> None:
    before = {name: pod.container for name, pod in apart.kubelet.list_pods().items()}
    other = LocalCluster(apart.kubelet.client, replace(apart.options, overrides={}), root=apart.state.parent, log=print)
    with pytest.raises(ClusterError, match=r"change accounting\.mode from pod to embedded"):
        other.up(timeout=240)
    assert {name: pod.container for name, pod in apart.kubelet.list_pods().items()} == before
