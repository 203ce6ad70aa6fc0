"""A job of four nodes, one with a slow link, is requeued and runs on four others, and its output says why."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from functools import partial

import pytest

from images.engine.docker import DockerEngine
from tests.cluster.conftest import NAME
from tests.cluster.researcher import Researcher, World, push
from tests.cluster.small import small_cluster
from tests.waiting import until

pytestmark = [pytest.mark.docker, pytest.mark.cluster]

SLOW = "slurm-worker-1"
# More than the slow link has, and less than what two loaded cores send between two pods, unlike the image's 100 MB/s.
LIMIT = """sed -i 's/"tcp_min_mbs": 100/"tcp_min_mbs": 25/' lib/thresholds/active.json"""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    if os.geteuid() or not all(map(shutil.which, ("tc", "nsenter"))):
        pytest.skip("to shape a pod's link takes root, tc and nsenter")
    root = tmp_path_factory.mktemp("preflight")
    values = {"activeChecks": {"preflight": {"enabled": True, "nodes": 4}}}
    with small_cluster(DockerEngine().client, f"{NAME}-preflight", root, values, workers=5) as cluster:
        cluster.up(timeout=240)
        made = World(cluster)
        commit = push(made, LIMIT)
        for number in range(5):
            pod = f"slurm-worker-{number}"
            made.run(pod, "gitsync", "now")
            current = partial(made.run, pod, "readlink", "/var/lib/minivm/scripts/current")
            until(lambda current=current: commit in current(), f"{pod} has the limit", seen=current)  # type: ignore[misc]
        # Slurm takes nodes of equal weight in the order of their registration: it shall take the slow one first.
        for number in (0, 2, 3, 4):
            made.slurm("scontrol", "update", f"nodename=slurm-worker-{number}", "weight=10")
        yield made


def shape(world: World, pod: str, *how: str) -> None:
    """Shape what the pod sends; the peers' acknowledgements of what it receives pass too."""
    pid = (world.cluster.kubelet.inspect(world.running(pod).container) or {})["State"]["Pid"]
    command = ["nsenter", "--net", f"--target={pid}", "tc", "qdisc", "replace", "dev", "eth0", "root", *how]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    if done.returncode:
        pytest.skip(f"this machine shapes no link: {done.stderr}")


def test_a_job_is_requeued_without_a_node_whose_link_is_slow(world: World) -> None:
    alice = Researcher(world, "alice")
    shape(world, SLOW, "tbf", "rate", "100mbit", "burst", "64k", "latency", "100ms")
    script = 'echo "attempt ${SLURM_RESTART_COUNT:-0} on $SLURM_JOB_NODELIST"; srun -l hostname'
    job = alice.submit("-N4", "--mem=100M", "-o", "preflight.out", script=script)

    def output() -> str:
        return alice.try_("cat", "preflight.out").stdout

    until(lambda: "minivm preflight: node" in output(), "the nodes are tested", within=240, seen=output)
    until(lambda: "ExcNodeList=slurm-worker-1 " in world.slurm("scontrol", "-o", "show", "job", job), "it is excluded",
          seen=lambda: world.slurm("scontrol", "show", "job", job) + output())  # fmt: skip
    # Slurm starts a requeued job after two minutes; the test asks for it at once.
    until(lambda: "BeginTime" in world.slurm("squeue", "-h", "-j", job, "-o", "%r"), "it waits for its begin time")
    world.slurm("scontrol", "update", f"jobid={job}", "starttime=now")
    until(lambda: alice.state(job) == "COMPLETED", "the job runs", within=330, seen=output)
    lines = output().splitlines()
    print("\n".join(lines))
    assert f"minivm preflight: node {SLOW}: tcp: problem" in lines[0]
    assert "asks slurmctld to requeue the job without" in lines[0]
    assert any(line.startswith("minivm preflight: 4 nodes passed") for line in lines)
    assert not [line for line in lines if line.startswith("attempt 0")], "nothing of the job ran on the bad node"
    assert {line.split()[-1] for line in lines if ": slurm-worker-" in line[:20]} == {
        f"slurm-worker-{number}" for number in (0, 2, 3, 4)
    }


def test_a_job_that_asks_for_it_by_a_constraint_is_tested_and_a_small_one_is_not(world: World) -> None:
    alice = Researcher(world, "alice")
    script = "#SBATCH --constraint=preflight\n\n# two\n#SBATCH --nodes=2\necho ran"
    asked = alice.submit("--mem=100M", "-o", "asked.out", script=script)
    alice.wait_for(asked, "COMPLETED")
    # A job that is brought back is submitted by this text: sbatch reads #SBATCH lines before the first command alone.
    kept = alice("scontrol", "write", "batch_script", asked, "-").splitlines()
    assert kept[:5] == ["#!/bin/bash", *script.splitlines()[:4]] and "minivm preflight" in kept[5], kept
    small = alice.submit("-N2", "--mem=100M", "-o", "small.out", script="echo ran")
    alice.wait_for(small, "COMPLETED")
    assert alice("cat", "small.out") == "ran\n"
    first, last = alice("cat", "asked.out").splitlines()
    assert first.startswith("minivm preflight: ")
    assert last == "ran"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--nodes=5",), "the job still runs here: only 4 other nodes of partition"),
        (("--nodes=4", "--no-requeue"), "it is not requeued and runs here: "),
    ],
)
def test_a_job_that_cannot_start_without_the_slow_node_runs_on_it(
    world: World, options: tuple[str, ...], reason: str
) -> None:
    alice = Researcher(world, "alice")
    job = alice.submit(*options, "--mem=100M", "-o", "stays.%j", script="srun hostname")
    until(lambda: alice.state(job) in {"COMPLETED", "FAILED"}, "the job ends", within=240,
          seen=lambda: world.slurm("scontrol", "show", "job", job))  # fmt: skip
    lines = alice("cat", f"stays.{job}").splitlines()
    print("\n".join(lines))
    assert alice.state(job) == "COMPLETED"
    assert f"minivm preflight: node {SLOW}: tcp: problem" in lines[0]
    assert any(reason in line for line in lines)
    assert SLOW in lines


def test_a_user_lifts_the_exclusion_of_a_waiting_job(world: World) -> None:
    alice = Researcher(world, "alice")
    job = alice.submit("--hold", f"--exclude={SLOW}", script="true")
    assert f"ExcNodeList={SLOW} " in alice("scontrol", "-o", "show", "job", job)
    alice("scontrol", "update", f"jobid={job}", "excnodelist=")
    assert "ExcNodeList=(null)" in alice("scontrol", "-o", "show", "job", job)
    alice("scancel", job)
