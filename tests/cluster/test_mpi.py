"""A program of MPI over two nodes, on workers that compile: by mpirun, and by srun where this Slurm speaks PMIx."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from images.engine.docker import DockerEngine
from tests.cluster.conftest import IMAGES, NAME
from tests.cluster.mpi import ON_TWO_NODES, compile_sum, met
from tests.cluster.researcher import Researcher, World
from tests.cluster.small import small_cluster
from tests.slurm import built, has_pmix

pytestmark = [pytest.mark.docker, pytest.mark.cluster]

TWO = "-N2 --ntasks-per-node=1 --mem-per-cpu=200M"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Its workers are of the image worker-devel, which is built where it is named."""
    image = built(IMAGES, "worker-devel")
    tag = f"{NAME}-devel"
    client = DockerEngine().client
    client.images.get(image).tag(f"{IMAGES}/worker", tag)
    values = {"image": {"tags": {"worker": tag}}}
    try:
        with small_cluster(client, f"{NAME}-mpi"[:21], tmp_path_factory.mktemp("mpi"), values, 2) as cluster:
            cluster.up(timeout=240)
            yield World(cluster)
    finally:
        client.images.remove(f"{IMAGES}/worker:{tag}")


@pytest.fixture(scope="module")
def alice(world: World) -> Researcher:
    world.wait_ready()
    who = Researcher(world, "alice")
    compile_sum(who)
    return who


def test_mpirun_starts_it_on_both_nodes(alice: Researcher) -> None:
    assert "nvcc" in alice("srun -N1 -n1 --mpi=none ls /usr/local/cuda/bin", timeout=300).split()
    out = alice.try_(f"salloc -Q {TWO} mpirun ./sum", timeout=300)
    assert met(out.stdout) == ON_TWO_NODES, out


def test_srun_starts_it_where_slurm_speaks_pmix_and_says_so_elsewhere(alice: Researcher) -> None:
    out = alice.try_(f"srun {TWO} --mpi=pmix ./sum", timeout=300)
    if has_pmix(f"{IMAGES}/worker-devel:latest"):
        assert met(out.stdout) == ON_TWO_NODES, out
    else:
        assert out.returncode != 0 and "mpi/pmix" in out.stderr, out
