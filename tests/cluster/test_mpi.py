"""A program of MPI over two nodes: compiled where jobs run; by srun where this Slurm speaks PMIx, and by mpirun."""

from __future__ import annotations

import pytest

from tests.cluster.conftest import IMAGES
from tests.cluster.researcher import Researcher
from tests.slurm import has_pmix

pytestmark = [pytest.mark.docker, pytest.mark.cluster]

# Each rank's number goes around; who has another sum than everybody, or was not met, ends the program.
SUM = """
#include <mpi.h>
#include <stdio.h>
int main(int argc, char **argv) {
    int rank, size, sum = 0, length;
    char host[MPI_MAX_PROCESSOR_NAME];
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    MPI_Get_processor_name(host, &length);
    MPI_Allreduce(&rank, &sum, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
    if (sum != size * (size - 1) / 2) MPI_Abort(MPI_COMM_WORLD, 1);
    printf("%d of %d on %s\\n", rank, size, host);
    MPI_Finalize();
}
"""
EXPECTED = ["0 of 2 on slurm-worker-0", "1 of 2 on slurm-worker-1"]
TWO = "-N2 --ntasks-per-node=1 --mem-per-cpu=200M"


@pytest.fixture
def program(alice: Researcher) -> Researcher:
    alice("cat > sum.c", stdin=SUM)
    alice("srun --mpi=none -N1 -n1 mpicc -O2 -Wall -Werror -o sum sum.c", timeout=120)
    return alice


def test_mpirun_starts_it_on_both_nodes(program: Researcher) -> None:
    assert sorted(program(f"salloc -Q {TWO} mpirun ./sum", timeout=120).splitlines()) == EXPECTED


def test_srun_starts_it_where_slurm_speaks_pmix_and_says_so_elsewhere(program: Researcher) -> None:
    if has_pmix(f"{IMAGES}/worker:latest"):
        assert sorted(program(f"srun {TWO} --mpi=pmix ./sum", timeout=120).splitlines()) == EXPECTED
    else:
        refused = program.try_(f"srun {TWO} --mpi=pmix ./sum")
        assert refused.returncode != 0 and "mpi/pmix" in refused.stderr, refused
