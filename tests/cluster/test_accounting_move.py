"""The records of accounting move to the accounting pod and back: none is lost, and no job ends."""

from __future__ import annotations

from collections.abc import Iterable
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
INTO_POD = {"accounting": {"mode": "pod", "from": "embedded"}}
BACK = {"accounting": {"mode": "embedded", "from": "pod"}}
ASKED = ["sacct", "-n", "-a", "-X", "-P", "-S", "2000-01-01", "-o", "jobid,user,state"]


class Cut(Exception):
    pass


def cut(cluster: LocalCluster, word: str, *, after: bool) -> None:
    """Let `up` end before or after the first command with this word, as a kill would end it."""
    run = cluster.kubelet.exec

    def exec_(container: str, command: Iterable[str], *, user: str = "") -> tuple[int, str]:
        command = list(command)
        is_last = any(word in part for part in command)
        if is_last and not after:
            raise Cut
        result = run(container, command, user=user)
        if is_last:
            raise Cut
        return result

    cluster.kubelet.exec = exec_  # type: ignore[method-assign]  # what cuts `up`
    try:
        with pytest.raises(Cut):
            cluster.up(timeout=240)
    finally:
        del cluster.kubelet.exec


def with_values(cluster: LocalCluster, values: dict[str, Any]) -> LocalCluster:
    options = replace(cluster.options, overrides=values)
    return LocalCluster(cluster.kubelet.client, options, root=cluster.state.parent, log=print)


def jobs(cluster: LocalCluster) -> list[str]:
    return cluster.exec(CONTROLLER, ASKED)[1].split()


def number(cluster: LocalCluster) -> str:
    return cluster.exec(CONTROLLER, ["cat", "/var/spool/slurmctld/clustername"])[1]


def run_job(cluster: LocalCluster) -> str:
    world = World(cluster)
    world.slurm("sinfo")  # on a busy machine a slurmctld that has just started may answer after the client has given up
    bob = Researcher(world, "bob")
    job = bob.submit("-o", "/dev/null", script="true")
    bob.wait_for(job, "COMPLETED")
    return f"{job}|bob|COMPLETED"


def wait_for_jobs(cluster: LocalCluster, wanted: list[str]) -> None:
    until(lambda: sorted(jobs(cluster)) == sorted(wanted), "all jobs are accounted", seen=lambda: jobs(cluster))


def test_records_move_to_the_pod_and_back_and_none_is_lost(tmp_path_factory: pytest.TempPathFactory) -> None:
    client = DockerEngine().client
    with small_cluster(client, f"{NAME}-move", tmp_path_factory.mktemp("move"), {}) as embedded:
        embedded.up(timeout=240)
        bob = Researcher(World(embedded), "bob")
        embedded.exec(CONTROLLER, ["sacctmgr", "-i", "add", "account", "physics"])
        wanted = [run_job(embedded)]
        runs = bob.submit("-o", "/dev/null", script="sleep 7777")
        bob.wait_for(runs, "RUNNING")
        wanted.append(f"{runs}|bob|RUNNING")
        wait_for_jobs(embedded, wanted)
        given = number(embedded)
        with pytest.raises(ClusterError, match=r"accounting\.from: embedded moves them"):
            with_values(embedded, {"accounting": {"mode": "pod"}}).up(timeout=240)

        # Given up before the records have arrived.
        apart, back = with_values(embedded, INTO_POD), with_values(embedded, BACK)
        cut(apart, "move-in", after=False)
        back.up(timeout=240)
        wanted.append(run_job(back))
        wait_for_jobs(back, wanted)

        # Cut when the old database is closed, then when the new one has all: the same `up` goes on.
        cut(apart, "move-out", after=True)
        wanted.append(run_job(embedded))
        cut(apart, "move-in", after=False)
        wanted.append(run_job(apart))
        (waiting,) = apart.state.glob("records-from-*")
        assert waiting.stat().st_mode & 0o777 == 0o600
        cut(apart, "move-in", after=True)
        apart.up(timeout=240)
        assert not list(apart.state.glob("records-from-*"))
        wanted.append(run_job(apart))
        wait_for_jobs(apart, wanted)
        assert number(apart) == given
        until(lambda: bob.try_(" ".join(ASKED)).stdout.split() == wanted, "a login pod sees them, too")
        assert "physics" in apart.exec(CONTROLLER, ["sacctmgr", "-n", "-P", "show", "account"])[1]
        assert "MISMATCH" not in apart.exec(CONTROLLER, ["minivm", "logs", "-n", "2000", "slurmctld"])[1]

        with pytest.raises(ClusterError, match=r"accounting\.from: pod moves them"):
            with_values(apart, {}).up(timeout=240)
        back.up(timeout=240)
        assert ACCOUNTING not in back.kubelet.list_pods()
        wanted.append(run_job(back))
        wait_for_jobs(back, wanted)
        assert number(back) == given
        assert f"{runs}|bob|RUNNING" in jobs(back), "the job ran on"
        numbers = [line.partition("|")[0] for line in wanted]
        assert sorted(set(numbers), key=int) == sorted(numbers, key=int), "no number was given twice"
