"""TaskEpilog says the limit and the option where the kernel ended processes at the job's memory limit, else nothing."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[3] / "images/src/runner/task_epilog"
MIB = 1 << 20
# Paths as the kernel shows them in a pod that shares the machine's cgroup namespace, and in one that has its own.
V1 = ("5:cpu,cpuacct:/pod/uid_1/job_7/step_0", "4:memory:{}/slurm_worker-0/uid_1000/job_7/step_0")
V2 = ("0::{}/system.slice/worker-0_slurmstepd.scope/job_7/step_0/slurm",)


def write(place: Path, **files: str) -> None:
    place.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (place / name.replace("__", ".")).write_text(f"{text}\n")


def v1(root: Path, *, kills: int, full: int, limit: str) -> None:
    job = root / "memory/slurm_worker-0/uid_1000/job_7"
    write(job, memory__limit_in_bytes=limit, memory__failcnt=str(full))
    write(job / "step_0", memory__oom_control="oom_kill_disable 0\nunder_oom 0\noom_kill 0", memory__failcnt="0")
    write(job / "step_0/task_0", memory__oom_control=f"under_oom 0\noom_kill {kills}")
    # Of another step.
    write(job / "step_1", memory__oom_control="oom_kill 3", memory__failcnt="3")


def v2(root: Path, *, kills: int, full: int, limit: str) -> None:
    job = root / "system.slice/worker-0_slurmstepd.scope/job_7"
    write(job, memory__max=limit, memory__events=f"low 0\nmax 9\noom {full}\noom_kill 3\noom_group_kill 0")
    write(job / "step_0", memory__events=f"low 0\nmax 0\noom 0\noom_kill {kills}")


def told(root: Path, lines: tuple[str, ...], above: str = "", **environment: str) -> str:
    own = root / "cgroup"
    own.write_text("".join(f"{line.format(above)}\n" for line in ("9:freezer:/x", *lines)))
    done = subprocess.run(
        ["sh", PROGRAM],
        env={"MINIVM_CGROUPS": str(root), "MINIVM_OWN_CGROUP": str(own), **environment},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (0, "")
    return done.stderr


@pytest.mark.parametrize(("make", "lines"), [(v1, V1), (v2, V2)])
@pytest.mark.parametrize("above", ["", "/kubepods/slurm-worker-0/own"])
def test_the_limit_and_the_option_are_named(tmp_path: Path, make: object, lines: tuple[str, ...], above: str) -> None:
    assert callable(make)
    make(tmp_path, kills=1, full=2, limit=str(200 * MIB))
    line = told(tmp_path, lines, above)
    assert "limit of 200 MiB" in line and line.endswith("submit with a larger --mem\n")
    assert told(tmp_path, lines, above, SLURM_LOCALID="1") == "", "one task of the node says it"


@pytest.mark.parametrize(("make", "lines", "name"), [(v1, V1, "memory.limit_in_bytes"), (v2, V2, "memory.max")])
@pytest.mark.parametrize("limit", [str(200 * MIB), "max"])
def test_a_step_with_less_memory_than_its_job_is_told_of_its_own_limit(
    tmp_path: Path, make: object, lines: tuple[str, ...], name: str, limit: str
) -> None:
    assert callable(make)
    make(tmp_path, kills=1, full=2, limit=limit)
    (step,) = tmp_path.glob("*/*/**/job_7/step_0")
    (step / name).write_text(f"{20 * MIB}\n")
    line = told(tmp_path, lines)
    assert "the step reached its memory limit of 20 MiB" in line and line.endswith("srun with a larger --mem\n")
    (step / name).write_text(f"{200 * MIB}\n" if limit != "max" else "max\n")
    assert "step" not in told(tmp_path, lines)


@pytest.mark.parametrize(("make", "lines"), [(v1, V1), (v2, V2)])
@pytest.mark.parametrize(
    ("kills", "full", "limit"),
    [(0, 2, str(200 * MIB)), (1, 0, str(200 * MIB)), (1, 2, "max"), (0, 0, str(200 * MIB))],
)
def test_nothing_is_said_of_a_step_that_the_limit_has_not_ended(
    tmp_path: Path, make: object, lines: tuple[str, ...], kills: int, full: int, limit: str
) -> None:
    assert callable(make)
    make(tmp_path, kills=kills, full=full, limit=limit)
    assert told(tmp_path, lines) == ""


def test_nothing_is_said_without_cgroups(tmp_path: Path) -> None:
    assert told(tmp_path, ()) == told(tmp_path, V1) == told(tmp_path, V2) == ""
