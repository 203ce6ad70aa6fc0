"""Compiling in the worker image for compiling, without a GPU: the results run only as far as that goes.

The default build leaves this image out, so the tests build it here, a minute of work once.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import testinfra  # type: ignore[import-untyped]  # ships no types
from testinfra.host import Host  # type: ignore[import-untyped]  # ships no types

from tests.container.conftest import IMAGES, docker
from tests.slurm import built

pytestmark = [pytest.mark.docker, pytest.mark.cluster]

ROOT = Path(__file__).resolve().parents[3]
NVCC = "/usr/local/cuda/bin/nvcc"
KERNEL = """
#include <cuda_runtime.h>
#include <nccl.h>
#include <cstdio>
__global__ void add(float *sum, const float *other, int count) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) sum[i] += other[i];
}
int main() {
    int cuda = 0, nccl = 0;
    if (cudaRuntimeGetVersion(&cuda) || ncclGetVersion(&nccl)) return 1;
    add<<<1, 1>>>(nullptr, nullptr, 0);
    printf("%d %d\\n", cuda, nccl);
}
"""


@pytest.fixture(scope="module")
def devel() -> Iterator[Host]:
    command = (
        "run",
        "--detach",
        "--network",
        "none",
        "--entrypoint",
        "/bin/sleep",
        built(IMAGES, "worker-devel"),
        "infinity",
    )
    container = docker(*command)
    yield testinfra.get_host(f"docker://{container}")
    docker("rm", "--force", container)


def test_nvcc_compiles_a_kernel_for_every_generation_that_labs_buy(devel: Host) -> None:
    devel.check_output("mkdir -p /tmp/kernel")
    devel.check_output(f"cat > /tmp/kernel/add.cu <<'EOF'{KERNEL}EOF")
    generations = " ".join(f"-gencode arch=compute_{sm},code=sm_{sm}" for sm in (90, 100, 120))
    devel.check_output(
        f"{NVCC} {generations} --keep --keep-dir /tmp/kernel -o /tmp/kernel/add /tmp/kernel/add.cu -lnccl"
    )
    for sm in (90, 100, 120):
        # Machine code, and not only what a driver would have to translate: an ELF file for NVIDIA's machine, 190.
        head = devel.check_output(f"od -An -tx1 -N 20 /tmp/kernel/add.compute_{sm}.cubin").split()
        assert head[:4] == ["7f", "45", "4c", "46"] and head[18] == "be", (sm, head)
    # It runs as far as a machine without GPU lets it: both libraries are found and answer.
    cuda, nccl = map(int, devel.check_output("/tmp/kernel/add").split())
    assert cuda >= 13000 and nccl >= 23000


def test_nvcc_compiles_the_all_reduce_program(devel: Host) -> None:
    docker("cp", str(ROOT / "images/src/allreduce.c"), f"{devel.backend.name}:/tmp/allreduce.c")
    devel.check_output(f"{NVCC} -O2 -o /tmp/allreduce /tmp/allreduce.c -ldl -lm")
    assert json.loads(devel.check_output("/tmp/allreduce --libraries"))["cuda_runtime"] >= 13000


def test_pkg_config_finds_the_toolkit(devel: Host) -> None:
    said = devel.check_output("pkg-config --cflags --libs cudart nccl")
    assert "-I/usr/local/cuda-" in said and said.split()[-2:] == ["-lcudart", "-lnccl"]
