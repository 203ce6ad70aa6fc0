"""A program of MPI, compiled where jobs run."""

from __future__ import annotations

from tests.cluster.researcher import Researcher

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


def compile_sum(who: Researcher) -> None:
    """To ./sum in his home."""
    who("cat > sum.c", stdin=SUM)
    who("srun --mpi=none -N1 -n1 mpicc -O2 -Wall -Werror -o sum sum.c", timeout=300)


def met(output: str) -> tuple[list[str], list[str]]:
    """Ranks and nodes; which rank is on which node is Slurm's choice."""
    pairs = [line.split(" on ") for line in output.splitlines() if " on " in line]
    return sorted(rank for rank, _ in pairs), sorted(node for _, node in pairs)


ON_TWO_NODES = (["0 of 2", "1 of 2"], ["slurm-worker-0", "slurm-worker-1"])
