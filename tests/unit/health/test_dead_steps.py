"""A job whose slurmstepd the kernel killed while files in /dev/shm hold its memory is cancelled with the reason."""

from __future__ import annotations

import contextlib
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from health.broker import broker as module
from health.broker import slurm_drains
from health.broker.slurm_drains import Dead, find_dead_jobs, find_full_limit
from health.broker.step import Now
from init.slurm.client import SlurmError
from tests.support.broker import Desk

NODE = "worker-7"
BATCH, EXTERN = slurm_drains.BATCH, slurm_drains.EXTERN
MIB = 1 << 20


class Steps:
    """The sockets of slurmstepds in a directory of slurmd's."""

    def __init__(self, spool: Path) -> None:
        self.spool = spool
        self.living: dict[str, socket.socket] = {}

    def start(self, job: int, step: str) -> None:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(self.spool / f"{NODE}_{job}.{step}"))
        listener.listen()
        self.living[f"{job}.{step}"] = listener

    def kill(self, job: int, step: str) -> None:
        """Close it without the removal of its file, as a death does."""
        self.living.pop(f"{job}.{step}").close()

    def found(self) -> dict[int, Dead]:
        return find_dead_jobs(self.spool, NODE)


@pytest.fixture
def steps(tmp_path: Path) -> Iterator[Steps]:
    made = Steps(tmp_path)
    yield made
    for listener in made.living.values():
        listener.close()


def test_a_job_is_dead_when_its_script_or_its_step_is(steps: Steps) -> None:
    for job, step in ((7, BATCH), (7, EXTERN), (8, "0"), (8, EXTERN), (9, BATCH), (9, "0"), (9, EXTERN)):
        steps.start(job, step)
    (steps.spool / f"{NODE}_10.{BATCH}").write_text("no socket")
    assert steps.found() == {}
    steps.kill(7, BATCH)
    steps.kill(8, "0")
    steps.kill(8, EXTERN)
    # The end of the script of job 9 is still reported, whatever has become of its step.
    steps.kill(9, "0")
    steps.kill(9, EXTERN)
    assert steps.found() == {7: Dead(7, alone=False), 8: Dead(8, alone=True)}
    steps.kill(9, BATCH)
    assert 9 in steps.found()


@pytest.mark.parametrize("place", ["\0/x/", "elsewhere/"])
def test_no_user_makes_a_dead_step_look_alive(steps: Steps, tmp_path: Path, place: str) -> None:
    steps.start(7, BATCH)
    steps.kill(7, BATCH)
    (tmp_path / "elsewhere").mkdir()
    with socket.socket(socket.AF_UNIX) as liar:
        liar.bind(f"{place}{NODE}_7.{BATCH}" if place.startswith("\0") else f"{tmp_path}/{place}{NODE}_7.{BATCH}")
        liar.listen()
        assert steps.found() == {7: Dead(7, alone=True)}


def test_a_dead_extern_step_alone_is_no_dead_job(steps: Steps) -> None:
    steps.start(7, EXTERN)
    steps.kill(7, EXTERN)
    assert steps.found() == {}


def test_no_job_is_dead_where_the_kernel_does_not_list_its_sockets(steps: Steps) -> None:
    steps.start(7, BATCH)
    assert find_dead_jobs(steps.spool, NODE, steps.spool / "absent") == {}
    assert find_dead_jobs(steps.spool / "absent", NODE) == {}


def cgroup(root: Path, version: int, used: int, limit: str, kills: int, job: int = 7) -> Path:
    if version == 1:
        place = root / f"memory/slurm_{NODE}/uid_1000/job_{job}"
        names = ("memory.usage_in_bytes", "memory.limit_in_bytes", "memory.oom_control")
    else:
        place = root / f"system.slice/{NODE}_slurmstepd.scope/job_{job}"
        names = ("memory.current", "memory.max", "memory.events")
    step = place / "step_batch"
    step.mkdir(parents=True, exist_ok=True)
    (place / names[0]).write_text(f"{used}\n")
    (place / names[1]).write_text(f"{limit}\n")
    (place / names[2]).write_text("oom_kill 0\n")
    (step / names[2]).write_text(f"under_oom 0\noom_kill {kills}\n")
    return step


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(
    ("used", "limit", "kills", "held"),
    [
        (190 * MIB, str(200 * MIB), 2, 200 * MIB),
        (190 * MIB, str(200 * MIB), 0, 0),  # slurmstepd died of something else: Slurm runs the job again
        (20 * MIB, str(200 * MIB), 2, 0),  # the pod's limit, and not the job's
        (190 * MIB, "max", 2, 0),
    ],
)
def test_memory_is_the_cause_where_the_job_is_still_full_after_kills(
    tmp_path: Path, version: int, used: int, limit: str, kills: int, held: int
) -> None:
    cgroup(tmp_path, version, used, limit, kills)
    assert find_full_limit(7, tmp_path) == held
    assert find_full_limit(71, tmp_path) == 0


def test_the_broker_cancels_such_a_job_once_and_ends_what_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk, now = Desk(tmp_path), 1000.0
    monkeypatch.setattr(module, "clock", lambda: Now(now, now))
    asked: list[tuple[int, str]] = []
    answers: list[bool | SlurmError] = [SlurmError("ask slurmctld", "no answer"), True]

    def cancel(job: int, text: str) -> bool:
        asked.append((job, text))
        answer = answers.pop(0)
        if isinstance(answer, SlurmError):
            raise answer
        return answer

    monkeypatch.setattr(desk.slurm, "cancel", cancel)
    with contextlib.ExitStack() as stack:
        steps = Steps(desk.places.spool)
        steps.start(7, BATCH)
        left = stack.enter_context(subprocess.Popen(["sleep", "600"]))
        stack.callback(left.kill)
        desk.broker.end_dead_jobs()
        steps.kill(7, BATCH)
        (cgroup(desk.places.cgroups, 1, 190 * MIB, str(200 * MIB), 2) / "cgroup.procs").write_text(f"{left.pid}\n")
        now += 6.0
        desk.broker.end_dead_jobs()
        assert asked == []
        now += slurm_drains.DEAD_S
        desk.broker.end_dead_jobs()
        assert len(asked) == 1 and left.poll() is None, "nothing is killed before slurmctld has answered"
        now += slurm_drains.DEAD_AGAIN_S
        desk.broker.end_dead_jobs()
        assert left.wait(timeout=60) == -9
        now += slurm_drains.DEAD_AGAIN_S
        desk.broker.end_dead_jobs()
    assert asked == [(7, slurm_drains.format_dead_reason(200 * MIB))] * 2
    assert "200 MiB" in asked[0][1] and "--mem" in asked[0][1]
