"""Containers in jobs by enroot and pyxis: an image of a registry, in a pod that is not privileged."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from images.engine.docker import DockerEngine
from tests.cluster.conftest import IMAGES, NAME
from tests.cluster.mpi import compile_sum, met
from tests.cluster.researcher import Researcher, World
from tests.cluster.small import small_cluster
from tests.container.pyxis import build, push
from tests.slurm import has_pmix
from tests.support.cluster_registry import HERE, PORT, WORKER, registry_of
from tests.waiting import until

pytestmark = [pytest.mark.docker, pytest.mark.cluster]

SMALL = f"127.0.0.1:{PORT}#site/small:1"
JOBS = "/var/tmp/minivm/jobs"
PLUGIN = "/usr/lib/x86_64-linux-gnu/slurm-wlm/spank_pyxis.so"


class small_registry(registry_of):
    def fill(self) -> None:
        push(self.here, "site/small:1")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    build("worker-pyxis", "login-pyxis")
    values: dict[str, Any] = {"containers": {"enabled": True, "by": "pyxis", "enroot": "ENROOT_ALLOW_HTTP y\n"}}
    with small_cluster(
        DockerEngine().client, f"{NAME}-pyxis"[:21], tmp_path_factory.mktemp("pyxis"), values, 2
    ) as cluster:
        cluster.up(timeout=240)
        with small_registry(cluster, tmp_path_factory.mktemp("registry")):
            yield World(cluster)


@pytest.fixture
def alice(world: World) -> Researcher:
    world.wait_ready()
    return Researcher(world, "alice")


def test_srun_starts_a_program_of_an_image_as_its_user_and_nothing_is_left(alice: Researcher) -> None:
    line = 'cat /etc/debian_version; id -u; echo "$TMPDIR"; touch "$TMPDIR/mine"; cat /proc/self/status'
    out = alice.try_(f"srun {HERE} --container-image={SMALL} sh -c '{line}'", timeout=300)
    said = out.stdout.splitlines()
    assert said[:2] == ["small", "20001"], out
    # What the task prolog says reaches a task that is inside already when Slurm starts one.
    assert said[2].startswith(f"{JOBS}/"), out
    assert any(line.startswith("CapEff:") and int(line.split()[1], 16) == 0 for line in said), out
    assert alice.try_(f"srun {HERE} --container-image={SMALL} sh -c 'exit 7'", timeout=300).returncode == 7

    def left() -> str:
        return alice.world.cluster.exec(WORKER, ["sh", "-c", f"ls {JOBS} {JOBS}/.ended | grep -E '^[0-9]'"])[1]

    until(lambda: left() == "", "nothing of the jobs is left", seen=left)
    found = "find /home/alice /run/pyxis /tmp -name '*enroot*' -o -name '*.squashfs' -o -name 'pyxis_*'"
    assert not alice.world.run(WORKER, "sh", "-c", found)


def test_a_container_that_has_a_name_is_its_job_s_and_ends_with_it(alice: Researcher) -> None:
    first = f"srun -n2 -O --container-image={SMALL} --container-name=mine sh -c 'touch /$SLURM_PROCID; sleep 0'"
    script = f"{first}\nsrun -n1 --container-name=mine ls /0 /1\n"
    job = alice.submit("-n2", "-O", "-w", WORKER, "-o", "named.out", script=script)
    alice.wait_for(job, "COMPLETED")
    assert alice("cat named.out").split()[-2:] == ["/0", "/1"]
    later = alice.try_(f"srun {HERE} --container-name=mine ls /", timeout=300)
    assert later.returncode == 1 and 'a container with name "pyxis_mine" does not exist' in later.stderr, later


def test_what_cannot_be_had_ends_the_job_in_words_and_drains_nobody(alice: Researcher) -> None:
    refused = alice.try_(f"srun {HERE} --container-image=127.0.0.1:{PORT}#site/nothing:1 true", timeout=300)
    assert refused.returncode == 1 and "site/nothing/manifests/1 returned error code: 404" in refused.stderr, refused
    kept = {"idle", "allocated", "mixed", "completing"}
    until(lambda: set(alice.world.node_states().values()) <= kept, "no node is drained", seen=alice.world.node_states)


def test_ranks_on_two_nodes_meet_in_their_containers(alice: Researcher) -> None:
    """The image is a file on the shared home, as a site has it that starts on many nodes at once."""
    if not has_pmix(f"{IMAGES}/worker-pyxis:latest"):
        pytest.skip("this Slurm has no PMIx")
    compile_sum(alice)
    alice(f"srun -n1 {HERE} enroot import --output small.sqsh docker://{SMALL}", timeout=300)
    # The image has no MPI: it is lent the node's.
    line = "srun -N2 --ntasks-per-node=2 -O --mpi=pmix --container-image=/home/alice/small.sqsh"
    line += " --container-mounts=/usr:/usr:ro --container-mount-home --container-workdir=/home/alice"
    line += " sh -c 'test -e /opt/minivm || ./sum'"
    out = alice.try_(line, timeout=180)
    ranks, nodes = met(out.stdout)
    assert ranks == [f"{rank} of 4" for rank in range(4)] and nodes == [WORKER] * 2 + ["slurm-worker-1"] * 2, out


def test_slurm_s_own_door_is_still_there(alice: Researcher) -> None:
    until(
        lambda: (
            "users may have containers here" in alice.world.cluster.exec(WORKER, ["minivm", "why", "containers"])[1]
        ),
        "the pod has found out",
        seen=lambda: alice.world.cluster.exec(WORKER, ["minivm", "why", "containers"])[1],
    )
    out = alice.try_(f"srun {HERE} --container=/nothing true", timeout=300)
    assert out.returncode == 1 and "/nothing is no image" in out.stderr, out


def test_on_a_node_without_the_plug_in_no_job_starts_outside_of_its_container(alice: Researcher) -> None:
    """The last: the node is drained by it."""
    alice.world.run(WORKER, "mv", PLUGIN, "/root/")
    out = alice.try_(
        f"timeout 20 srun {HERE} --container-image={SMALL} sh -c 'echo inside; cat /etc/hostname'", timeout=60
    )
    assert out.returncode and "inside" not in out.stdout, out
