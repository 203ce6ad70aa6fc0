"""Containers in jobs, by Slurm's own hand: an image of a registry, in a pod that is not privileged."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from images.engine.docker import DockerEngine
from tests.cluster.conftest import IMAGES, NAME
from tests.cluster.mpi import ON_TWO_NODES, compile_sum, met
from tests.cluster.researcher import Researcher, World
from tests.cluster.small import small_cluster
from tests.slurm import built, has_pmix
from tests.support.cluster_registry import DEBIAN, HERE, PORT, WORKER, registry_of
from tests.waiting import until

pytestmark = [pytest.mark.docker, pytest.mark.cluster]

REGISTRIES = f'[[registry]]\nlocation = "127.0.0.1:{PORT}"\ninsecure = true\n'


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    built(IMAGES, "worker-containers")
    values: dict[str, Any] = {"containers": {"enabled": True, "registries": REGISTRIES}}
    with small_cluster(
        DockerEngine().client, f"{NAME}-boxes"[:21], tmp_path_factory.mktemp("boxes"), values, 2
    ) as cluster:
        cluster.up(timeout=240)
        with registry_of(cluster, tmp_path_factory.mktemp("registry")):
            yield World(cluster)


@pytest.fixture
def alice(world: World) -> Researcher:
    world.wait_ready()
    return Researcher(world, "alice")


def test_a_pod_says_that_its_users_may_have_containers(world: World) -> None:
    until(
        lambda: "users may have containers here" in world.cluster.exec(WORKER, ["minivm", "why", "containers"])[1],
        "the pod has found out",
        seen=lambda: world.cluster.exec(WORKER, ["minivm", "why", "containers"])[1],
    )
    caps = world.run(WORKER, "grep", "CapBnd", "/proc/1/status").split()[1]
    assert not int(caps, 16) & (1 << 21), "CAP_SYS_ADMIN"


def test_srun_starts_a_program_of_an_image_as_its_user_and_nothing_is_left(alice: Researcher) -> None:
    line = "cat /etc/debian_version; id -un; id -u; pwd; ls /usr/bin/srun /etc/slurm; echo $SLURM_CONTAINER"
    out = alice.try_(f"srun {HERE} --container={DEBIAN} sh -c '{line}'", timeout=300)
    said = out.stdout.split()
    assert said[0].startswith("13") and said[1:4] == ["alice", "20001", "/home/alice"] and said[4:] == [DEBIAN], out
    assert alice.try_(f"srun {HERE} --container={DEBIAN} sh -c 'exit 7'", timeout=300).returncode == 7
    jobs = "/var/tmp/minivm/jobs"

    def left() -> str:
        # What one removal finds while another one works goes with a later job.
        alice.try_(f"srun {HERE} true")
        return alice.world.cluster.exec(
            WORKER, ["sh", "-c", f"ls {jobs} {jobs}/.ended /var/spool/slurmd 2>/dev/null | grep -E '^[0-9]|oci'"]
        )[1]

    until(lambda: left() == "", "nothing of the jobs is left", seen=left)
    states = alice.world.node_states
    until(lambda: set(states().values()) <= {"idle", "completing"}, "no node is drained", seen=states)


def test_tasks_share_one_image_and_a_cancelled_job_leaves_no_process(alice: Researcher) -> None:
    script = f"srun -n2 -O --container={DEBIAN} sh -c 'echo task $SLURM_PROCID >> ranks; exec sleep 1000'"
    job = alice.submit("-N1", "-n2", "-O", "-w", WORKER, script=script)
    # The image is fetched and unpacked first.
    until(
        lambda: alice.try_("sort ranks").stdout == "task 0\ntask 1\n",
        "both tasks run",
        within=240,
        seen=lambda: alice.try_(f"cat ranks slurm-{job}.out").stdout,
    )
    alice("scancel", job)
    alice.wait_for(job, "CANCELLED")

    def processes() -> str:
        return alice.world.cluster.exec(WORKER, ["pgrep", "-l", "-u", "alice"])[1]

    until(lambda: processes() == "", "no process of the job's is left", seen=processes)


def test_a_process_that_a_container_left_behind_goes_with_its_job(alice: Researcher) -> None:
    """And not the other job's of the same user on the same node."""
    other = alice.submit("-n1", "-w", WORKER, script="sleep 1000")

    def sleeping() -> str:
        return alice.world.cluster.exec(WORKER, ["ps", "-C", "sleep", "-o", "args="])[1]

    until(lambda: "sleep 1000" in sleeping(), "the other job runs", seen=sleeping)
    alice(f"srun -n1 {HERE} --container={DEBIAN} sh -c 'setsid sleep 4242 < /dev/null > /dev/null 2>&1 &'", timeout=300)
    until(lambda: "4242" not in sleeping(), "it is gone", seen=sleeping)
    assert "sleep 1000" in sleeping(), alice.world.slurm("scontrol", "show", "job", other)
    assert alice.state(other) == "RUNNING"
    alice("scancel", other)


def test_ranks_on_two_nodes_meet_in_their_containers(alice: Researcher) -> None:
    """The image is an archive on the shared home, as a site has it that starts on many nodes at once."""
    if not has_pmix(f"{IMAGES}/worker-containers:latest"):
        pytest.skip("this Slurm has no PMIx")
    compile_sum(alice)
    alice(f"srun -n1 {HERE} skopeo copy -q docker://{DEBIAN} docker-archive:/home/alice/debian.tar", timeout=300)
    line = "srun -N2 --ntasks-per-node=1 --mpi=pmix --container=/home/alice/debian.tar"
    # The image has no MPI: it is lent the node's.
    line = f"MINIVM_CONTAINER_MOUNTS=/usr:/usr:ro {line} sh -c 'test -e /opt/minivm || ./sum'"
    out = alice.try_(line, timeout=180)
    assert met(out.stdout) == ON_TWO_NODES, out


def test_a_batch_script_may_run_in_an_image(alice: Researcher) -> None:
    job = alice.submit(
        "-w", WORKER, "-o", "batch.out", f"--container={DEBIAN}", script="cat /etc/debian_version; exit 3"
    )
    alice.wait_for(job, "FAILED")
    assert alice("cat batch.out").startswith("13")


def test_what_cannot_be_had_ends_the_job_in_words_and_drains_nobody(alice: Researcher) -> None:
    refused = alice.try_(f"srun {HERE} --container=127.0.0.1:{PORT}/site/nothing:1 true", timeout=300)
    assert refused.returncode == 125 and "manifest unknown; the task was not started" in refused.stderr, refused
    # A name for a shell to trip over: Slurm would have written it into one.
    tricked = alice.try_("srun --container='x;touch /tmp/tricked;$(touch /tmp/tricked)' true", timeout=300)
    assert tricked.returncode == 125 and "was not started" in tricked.stderr, tricked
    assert alice.world.cluster.exec(WORKER, ["test", "-e", "/tmp/tricked"])[0] == 1
    kept = {"idle", "allocated", "mixed", "completing"}
    until(lambda: set(alice.world.node_states().values()) <= kept, "no node is drained", seen=alice.world.node_states)
