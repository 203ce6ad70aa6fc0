"""The all-reduce program's handling of answers of CUDA and NCCL, which a CPU stand-in gives.

It is compiled in the login image, whose compiler is one of the things that image is for.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from testinfra.host import Host  # type: ignore[import-untyped]  # ships no types

from tests.container.conftest import docker

pytestmark = [pytest.mark.docker, pytest.mark.cluster]

ROOT = Path(__file__).resolve().parents[3]
WHERE = "/tmp/allreduce"
SMALL = "--min-bytes 64K --max-bytes 256K --iterations 2 --warmup 1"


@pytest.fixture(scope="module")
def compiled(idle: Callable[[str], Host]) -> Host:
    host = idle("login")
    host.check_output(f"mkdir -p {WHERE}")
    container = host.backend.name
    docker("cp", str(ROOT / "images/src/allreduce.c"), f"{container}:{WHERE}/")
    docker("cp", str(ROOT / "tests/container/standin_gpu.c"), f"{container}:{WHERE}/")
    flags = "-std=c17 -O2 -Wall -Wextra -Werror"
    host.check_output(f"gcc {flags} -fPIE -pie -o {WHERE}/allreduce {WHERE}/allreduce.c -ldl")
    host.check_output(f"gcc -O2 -shared -fPIC -o {WHERE}/libcudart.so.12 {WHERE}/standin_gpu.c")
    host.check_output(f"cp {WHERE}/libcudart.so.12 {WHERE}/libnccl.so.2")
    return host


def run(host: Host, arguments: str, libraries: str = WHERE, **environment: str) -> tuple[int, str, str]:
    setting = " ".join(f"{name}={value}" for name, value in environment.items())
    done = host.run(f"env LD_LIBRARY_PATH={libraries} {setting} {WHERE}/allreduce {arguments}")
    return done.rc, done.stdout, done.stderr


@pytest.mark.parametrize("gpus", [1, 2, 8])
def test_it_measures_every_size_and_checks_the_sums(compiled: Host, gpus: int) -> None:
    code, out, said = run(compiled, SMALL, GPUS=str(gpus))
    assert code == 0, said
    result = json.loads(out)
    assert len(result["gpus"]) == gpus and result["gpus"][0] == "0000:00:00.0"
    assert [row["bytes"] for row in result["results"]] == [65536, 131072, 262144]
    for row in result["results"]:
        assert row["wrong"] == 0 and row["algbw_gb_s"] > 0
        # What each link carries: 2(n-1)/n of the data. The figures are rounded to three digits.
        assert row["busbw_gb_s"] == pytest.approx(row["algbw_gb_s"] * 2 * (gpus - 1) / gpus, abs=0.002)


def test_fewer_gpus_than_there_are_may_be_asked_for(compiled: Host) -> None:
    code, out, _ = run(compiled, f"{SMALL} --gpus 2", GPUS="4")
    assert code == 0 and len(json.loads(out)["gpus"]) == 2


def test_a_wrong_sum_is_its_own_exit_code(compiled: Host) -> None:
    code, out, said = run(compiled, SMALL, GPUS="2", STANDIN="wrong")
    assert code == 5 and "3 values were wrong" in said
    assert [row["wrong"] for row in json.loads(out)["results"]] == [1, 1, 1]


def test_a_link_that_hangs_ends_at_the_timeout(compiled: Host) -> None:
    code, _, said = run(compiled, f"{SMALL} --timeout 1", GPUS="2", STANDIN="hang")
    assert code == 6 and "no answer within --timeout" in said


@pytest.mark.parametrize(
    ("error", "code", "reason"),
    [
        ("35", 3, "no NVIDIA driver here, or it is older"),
        ("100", 3, "the driver answers and sees none"),
        ("802", 1, "fabric manager has to run first"),
        ("803", 1, "of different releases"),
        ("3", 3, "CUDA error 3"),
    ],
)
def test_why_there_is_no_gpu_is_said(compiled: Host, error: str, code: int, reason: str) -> None:
    found, out, said = run(compiled, SMALL, GPUS="0", ERROR=error)
    assert (found, out) == (code, "") and reason in said


def test_too_few_gpus_is_no_gpu(compiled: Host) -> None:
    code, _, said = run(compiled, "--gpus 8", GPUS="7")
    assert code == 3 and "8 GPUs are asked for and 7 are here" in said


def test_a_missing_library_is_named(compiled: Host) -> None:
    code, _, said = run(compiled, SMALL, libraries="/nonexistent")
    assert code == 4 and "cannot open CUDA's runtime: libcudart.so" in said


@pytest.mark.parametrize(
    "arguments", ["--max-bytes 1X", "--gpus 0", "--iterations -1", "--min-bytes 2G", "more", "--unknown"]
)
def test_wrong_usage_is_refused_before_anything_runs(compiled: Host, arguments: str) -> None:
    code, out, said = run(compiled, arguments, GPUS="2")
    assert (code, out) == (2, "") and said
