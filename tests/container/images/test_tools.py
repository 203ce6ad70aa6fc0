"""Programs that users find wherever their work runs: on the login machine, and in a job on a worker."""

from __future__ import annotations

from collections.abc import Callable
from shlex import quote

import pytest
from testinfra.host import Host  # type: ignore[import-untyped]  # ships no types

pytestmark = [pytest.mark.docker, pytest.mark.cluster]

MPI = """
#include <mpi.h>
#include <stdio.h>
int main(int argc, char **argv) {
    int rank, size, sum;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    MPI_Allreduce(&rank, &sum, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
    if (rank == 0) printf("%d ranks, sum %d\\n", size, sum);
    return MPI_Finalize();
}
"""
FORTRAN = """
program p
  use mpi
  integer :: ierr, size
  call MPI_Init(ierr)
  call MPI_Comm_size(MPI_COMM_WORLD, size, ierr)
  print '(a,i0)', 'size ', size
  call MPI_Finalize(ierr)
end program
"""
# As Triton does at a kernel's first start: an extension module, compiled by whatever `cc` is and loaded.
LAUNCHER = """
#include <Python.h>
static PyObject *launch(PyObject *self, PyObject *args) { return PyLong_FromLong(42); }
static PyMethodDef methods[] = {{"launch", launch, METH_NOARGS, ""}, {0}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "launcher", 0, -1, methods};
PyMODINIT_FUNC PyInit_launcher(void) { return PyModule_Create(&module); }
"""


@pytest.fixture(params=["login", "worker"])
def machine(request: pytest.FixtureRequest, idle: Callable[[str], Host]) -> Host:
    return idle(request.param)


def test_a_virtual_environment_has_pip(machine: Host) -> None:
    machine.check_output("rm -rf /tmp/venv && python3 -m venv /tmp/venv")
    assert machine.check_output("/tmp/venv/bin/pip --version").startswith("pip ")
    machine.check_output("rm -rf /tmp/venv")


@pytest.mark.parametrize(
    ("compiler", "suffix", "source"),
    [
        ("gcc -fopenmp", "c", '#include <stdio.h>\nint main(void) { puts("works"); }'),
        ("g++ -std=c++20 -flto", "cc", '#include <iostream>\nint main() { std::cout << "works\\n"; }'),
        ("gfortran", "f90", "program p\nprint '(a)', 'works'\nend program"),
    ],
)
def test_compilers_compile(machine: Host, compiler: str, suffix: str, source: str) -> None:
    """Link-time optimisation and OpenMP still work after the removal of files beside the compilers to save space."""
    machine.check_output(f"printf '%s' {quote(source)} > /tmp/p.{suffix}")
    machine.check_output(f"{compiler} -O2 -o /tmp/p /tmp/p.{suffix}")
    assert machine.check_output("/tmp/p") == "works"


def test_a_python_extension_compiles(machine: Host) -> None:
    machine.check_output("printf '#include <Python.h>\\n' > /tmp/e.c")
    machine.check_output("gcc -shared -fPIC $(python3-config --includes) -o /tmp/e.so /tmp/e.c")


def test_a_kernel_launcher_compiles_and_loads_where_the_job_runs(machine: Host) -> None:
    machine.check_output(f"printf '%s' {quote(LAUNCHER)} > /tmp/launcher.c")
    machine.check_output("cc -O3 -shared -fPIC $(python3-config --includes) -o /tmp/launcher.so /tmp/launcher.c")
    said = machine.check_output("cd /tmp && python -c 'import launcher; print(launcher.launch())'")
    assert said == "42"


def test_an_mpi_program_compiles_and_passes_messages(machine: Host) -> None:
    machine.check_output(f"printf '%s' {quote(MPI)} > /tmp/m.c && mpicc -O2 -o /tmp/m /tmp/m.c")
    said = machine.check_output("mpirun --allow-run-as-root --oversubscribe -np 2 /tmp/m")
    assert "2 ranks, sum 1" in said


def test_an_mpi_program_in_fortran_compiles(machine: Host) -> None:
    machine.check_output(f"printf '%s' {quote(FORTRAN)} > /tmp/m.f90 && mpifort -O2 -o /tmp/mf /tmp/m.f90")
    assert "size 1" in machine.check_output("mpirun --allow-run-as-root -np 1 /tmp/mf")


@pytest.mark.parametrize(
    "program",
    ["git --version", "tmux -V", "vim --version", "nano --version", "rsync --version", "make --version", "jq --version",
     "curl --version", "wget --version", "tree --version", "htop --version", "strace --version", "zstd --version",
     "unzip -v", "file --version", "bzip2 --help", "bc --version", "python --version", "pip --version",
     "less --version", "mpicc --version", "mpic++ --version", "cc --version"],
)  # fmt: skip
def test_tools_run(machine: Host, program: str) -> None:
    machine.check_output(program)
