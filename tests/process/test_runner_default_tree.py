"""The scripts that every image brings: a job's places before it, and nothing of it left after it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

from tests.process.runner_world import World, alive, make
from tests.waiting import until

pytestmark = pytest.mark.root

ROOT = Path(__file__).resolve().parents[2]
# Nobody else's: whatever runs under it on this machine is a test's.
USER = 61235


class Job:
    def __init__(self, world: World) -> None:
        self.world = world
        self.work = world.root / "work"
        self.logs = world.root / "logs"
        self.shm = world.root / "shm"
        self.shm.mkdir()
        shutil.rmtree(world.tree)
        shutil.copytree(ROOT / "scripts", world.tree)
        # The checks of this machine are not what is tested here.
        shutil.rmtree(world.tree / "health.d")
        self.environment = {
            "SLURM_JOB_UID": str(USER),
            "SLURM_JOB_GID": str(USER),
            "MINIVM_JOB_WORK": str(self.work),
            "MINIVM_JOB_LOGS": str(self.logs),
            "MINIVM_SHM": str(self.shm),
            "MINIVM_DCGM_JOBS": str(world.root / "dcgm"),
            "MINIVM_SYSFS": str(world.root / "sys"),
        }

    def run(self, kind: str, **extra: str) -> str:
        code, out, err = self.world.run(kind, **{**self.environment, **extra})
        assert code == 0, err
        record = self.world.records()[-1]
        assert record["result"] == "ok", record
        return out


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(make(tmp_path))


@pytest.fixture
def sleeper() -> Iterator[list[subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []
    yield started
    for process in started:
        process.kill()
        process.wait()


def sleep(started: list[subprocess.Popen[bytes]], uid: int, name: str = "sleep", **environment: str) -> int:
    """A process of somebody's, under any name."""
    argv = ["bash", "-c", f"exec -a {name!r} sleep 600"]
    process = subprocess.Popen(
        argv,
        env={"PATH": os.environ["PATH"], **environment},
        user=uid,
        group=uid,
        extra_groups=[],
        start_new_session=True,
    )
    started.append(process)
    # `exec -a` has happened when the name is there.
    command_line = Path(f"/proc/{process.pid}/cmdline")
    until(lambda: command_line.read_bytes().startswith(name.encode()), f"it is called {name}")
    return process.pid


def deaf(started: list[subprocess.Popen[bytes]], on_term: str) -> tuple[subprocess.Popen[bytes], IO[bytes]]:
    """A process of job 42 that TERM does not end, and what it says."""
    process = subprocess.Popen(
        ["bash", "-c", f"trap '{on_term}' TERM; echo ready; while :; do sleep 600 & wait; done"],
        env={"PATH": os.environ["PATH"], "SLURM_JOB_ID": "42"},
        user=USER,
        group=USER,
        extra_groups=[],
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    started.append(process)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    return process, process.stdout


def test_a_job_has_its_own_places_and_only_its_logs_remain(job: Job) -> None:
    job.run("prolog")
    for place in (job.work / "42", job.logs / "42"):
        status = place.stat()
        assert (status.st_uid, status.st_gid, status.st_mode & 0o777) == (USER, USER, 0o700)
    (job.work / "42/file").touch()
    (job.logs / "42/nccl.host.1.log").touch()
    job.run("epilog")
    assert not (job.work / "42").exists()
    assert (job.logs / "42/nccl.host.1.log").exists()


@pytest.mark.parametrize("kind", ["owned", "link"])
def test_root_makes_nothing_below_a_directory_that_is_somebody_s(job: Job, kind: str) -> None:
    """Its owner could put a link in the way, and would be given whatever it leads to."""
    if kind == "owned":
        job.work.mkdir()
        os.chown(job.work, USER, USER)
    else:
        (job.world.root / "elsewhere").mkdir()
        job.work.symlink_to(job.world.root / "elsewhere")
    code, _, _ = job.world.run("prolog", **job.environment)
    assert code == 0, "a broken script stops no job"
    assert any("is not root's own directory" in str(entry) for entry in job.world.records()[-1]["scripts"])
    assert not (job.work / "42").exists()


def test_tasks_are_told_their_places(job: Job) -> None:
    job.run("prolog")
    out = job.run("task_prolog")
    assert f"export TMPDIR={job.work}/42\n" in out
    assert f"export TRITON_CACHE_DIR={job.work}/42/cache/triton\n" in out
    assert f"export NCCL_DEBUG_FILE={job.logs}/42/nccl.%h.%p.log\n" in out


def test_each_gpu_s_file_names_its_jobs(job: Job) -> None:
    folder = job.world.root / "dcgm"
    job.run("prolog", SLURM_JOB_GPUS="0,3")
    job.run("prolog", SLURM_JOB_GPUS="3", SLURM_JOB_ID="43")
    assert {path.name: path.read_text().split() for path in folder.iterdir()} == {"0": ["42"], "3": ["42", "43"]}
    job.run("epilog", SLURM_JOB_GPUS="0,3")
    assert {path.name: path.read_text().split() for path in folder.iterdir()} == {"3": ["43"]}


def port(root: Path, name: str, layer: str, state: str = "4: ACTIVE") -> None:
    folder = root / f"sys/class/infiniband/{name}/ports/1"
    folder.mkdir(parents=True)
    (folder / "link_layer").write_text(layer + "\n")
    (folder / "state").write_text(state + "\n")


def test_nccl_is_set_for_the_fabric_and_the_user_s_choice_wins(job: Job) -> None:
    assert "export NCCL_SOCKET_IFNAME=eth0\n" in job.run("task_prolog")
    port(job.world.root, "mlx5_0", "InfiniBand")
    port(job.world.root, "mlx5_1", "InfiniBand", "1: DOWN")
    port(job.world.root, "mlx5_2", "InfiniBand")
    out = job.run("task_prolog")
    assert "export NCCL_IB_HCA==mlx5_0,mlx5_2\n" in out
    assert "NCCL_SOCKET_IFNAME" not in out
    assert "NCCL_IB_HCA" not in job.run("task_prolog", NCCL_IB_HCA="mlx5_2")
    shutil.rmtree(job.world.root / "sys")
    port(job.world.root, "mlx5_0", "Ethernet")
    assert "export NCCL_IB_GID_INDEX=3\n" in job.run("task_prolog")


def test_what_a_job_leaves_is_ended_and_removed(job: Job, sleeper: list[subprocess.Popen[bytes]]) -> None:
    left = sleep(sleeper, USER)
    stubborn, _ = deaf(sleeper, "")
    other = sleep(sleeper, USER + 1)
    (job.shm / "psm_shm.1").touch()
    os.chown(job.shm / "psm_shm.1", USER, USER)
    (job.shm / "somebody.else").touch()
    job.run("epilog")
    assert not alive(left)
    assert not alive(stubborn.pid)
    assert alive(other)
    assert [path.name for path in job.shm.iterdir()] == ["somebody.else"]


def test_beside_another_job_only_what_carries_the_job_s_id_goes(
    job: Job, sleeper: list[subprocess.Popen[bytes]]
) -> None:
    sleep(sleeper, 0, "slurmstepd: [99.0]")
    ours = sleep(sleeper, USER, SLURM_JOB_ID="42")
    theirs = sleep(sleeper, USER, SLURM_JOB_ID="99")
    (job.shm / "shared").touch()
    os.chown(job.shm / "shared", USER, USER)
    job.run("epilog")
    assert not alive(ours)
    assert alive(theirs)
    assert (job.shm / "shared").exists()


def test_a_job_that_starts_while_the_last_one_is_cleaned_up_is_left_alone(
    job: Job, sleeper: list[subprocess.Popen[bytes]]
) -> None:
    """The next job is of the same user, and begins between the TERM and the KILL."""
    stubborn, said = deaf(sleeper, "echo told")
    epilog = job.world.start("epilog", **job.environment)
    assert said.readline() == b"told\n"
    sleep(sleeper, 0, "slurmstepd: [99.0]")
    theirs = sleep(sleeper, USER, SLURM_JOB_ID="99")
    (job.shm / "theirs").touch()
    os.chown(job.shm / "theirs", USER, USER)
    _, err = epilog.communicate(timeout=60)
    assert epilog.returncode == 0, err
    assert not alive(stubborn.pid)
    assert alive(theirs)
    assert (job.shm / "theirs").exists()


def test_system_v_memory_of_the_job_s_user_is_removed(job: Job) -> None:
    made = subprocess.run(
        ["ipcmk", "-M", "4096"], user=USER, group=USER, extra_groups=[], capture_output=True, text=True
    )
    assert made.returncode == 0, made.stderr
    number = made.stdout.split()[-1]
    assert any(row.split()[1] == number for row in Path("/proc/sysvipc/shm").read_text().splitlines()[1:])
    job.run("epilog")
    assert not any(row.split()[1] == number for row in Path("/proc/sysvipc/shm").read_text().splitlines()[1:])


def test_nothing_of_root_s_is_ever_cleaned_up(job: Job) -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], env={"SLURM_JOB_ID": "42"})
    try:
        job.run("epilog", SLURM_JOB_UID="0")
        assert process.poll() is None
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
