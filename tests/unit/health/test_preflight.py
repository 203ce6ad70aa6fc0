"""`minivm preflight`: what it decides about a job's nodes, and what it tells its user."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from health.active import preflight
from health.active.groups import GroupTest
from health.active.preflight import MOST_RESTARTS, GroupOutcome, Outcome, examine, plain

NODES = ("a", "b", "c", "d", "e", "f")


def with_bad(*bad: str) -> Outcome:
    def run(tests: Sequence[GroupTest]) -> list[GroupOutcome]:
        return [GroupOutcome(not set(bad) & set(test.machines), f"slow {','.join(test.machines)}") for test in tests]

    return examine(NODES, run, lambda: True)


def test_good_nodes_take_one_round_of_pairs() -> None:
    assert with_bad() == Outcome({}, tests=3)


@pytest.mark.parametrize("bad", [("c",), ("a", "f")])
def test_bad_nodes_are_named_with_the_reason_of_their_test(bad: tuple[str, ...]) -> None:
    outcome = with_bad(*bad)
    assert tuple(outcome.bad) == bad
    assert all(outcome.bad[name].startswith(f"slow {name},") for name in bad)
    assert not outcome.unclear


def test_a_check_that_always_fails_excludes_no_node() -> None:
    outcome = with_bad(*NODES)
    assert not outcome.bad
    assert outcome.unclear


def test_more_bad_nodes_than_good_ones_are_the_checks_fault() -> None:
    outcome = with_bad("a", "b", "c", "d")
    assert not outcome.bad
    assert outcome.unclear


def test_two_nodes_cannot_be_told_apart() -> None:
    outcome = examine(("a", "b"), lambda tests: [GroupOutcome(False, "slow") for _ in tests], lambda: True)
    assert not outcome.bad
    assert "no good node" in outcome.unclear


def test_a_check_without_results_ends_the_test() -> None:
    outcome = examine(NODES, lambda tests: [GroupOutcome(None, "no srun") for _ in tests], lambda: True)
    assert not outcome.bad
    assert "no srun" in outcome.unclear
    assert outcome.tests == 6


def test_the_time_is_bounded() -> None:
    assert examine(NODES, lambda _: [], lambda: False).unclear == "the time is up"


def test_a_tests_output_is_cut_to_a_short_plain_line() -> None:
    assert plain("first\n\x1b[2Jlast\x07" + "x" * 999 + "\n\n") == ("?[2Jlast?" + "x" * 999)[:200]
    assert plain("\n") == ""


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A job with programs of Slurm that write down how they are called."""
    for name in ("srun", "scontrol"):
        (tmp_path / name).write_text(f'#!/bin/sh\necho {name} "$@" >> {tmp_path}/calls\n')
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "a,b")
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
    return tmp_path / "calls"


def test_a_job_with_a_bad_node_is_requeued_without_it(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert preflight.act(NODES, Outcome({"c": "TCP to a: 1 MB/s"}), "9 s") == 1
    assert "--requeue-without=c" in job.read_text()
    assert capsys.readouterr().out == "minivm preflight: node c: TCP to a: 1 MB/s; the job is requeued without (9 s)\n"


def test_a_job_is_requeued_a_bounded_number_of_times(
    job: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLURM_RESTART_COUNT", str(MOST_RESTARTS))
    assert preflight.act(NODES, Outcome({"c": "slow"}), "9 s") == 0
    assert not job.exists()
    assert "so it runs here" in capsys.readouterr().out


def test_without_a_clear_result_the_job_runs(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert preflight.act(NODES, Outcome({}, "the time is up"), "60 s") == 0
    assert preflight.act(NODES, Outcome({}), "9 s") == 0
    assert not job.exists()
    assert capsys.readouterr().out.splitlines() == [
        "minivm preflight: no clear result, so the job runs: the time is up (60 s)",
        "minivm preflight: 6 nodes passed (9 s)",
    ]


def test_a_job_that_cannot_be_requeued_is_told_what_to_exclude(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (job.parent / "srun").write_text("#!/bin/sh\necho Requested operation is presently disabled\nexit 1\n")
    assert preflight.act(NODES, Outcome({"c": "slow"}), "9 s") == 1
    assert "submit it again with --exclude=c" in capsys.readouterr().out


def test_the_exclusion_keeps_what_the_user_excluded(job: Path) -> None:
    scontrol = (
        f'#!/bin/sh\necho scontrol "$@" >> {job}\n[ "$2" = show ] && echo "JobId=7 ExcNodeList=x[1-2] Y=(null)"; true\n'
    )
    (job.parent / "scontrol").write_text(scontrol)
    assert preflight.requeue_step("7", ["c"]) == 0
    assert job.read_text().splitlines() == [
        "scontrol --oneliner show job 7", "scontrol requeue 7", "scontrol update jobid=7 excnodelist=x[1-2],c",
    ]  # fmt: skip


def test_outside_of_a_job_it_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert preflight.main([]) == 2
    assert "put it into the batch script" in capsys.readouterr().err


def test_one_task_of_an_array_is_requeued_and_not_the_array() -> None:
    task = {"SLURM_JOB_ID": "7", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3"}
    assert preflight.name_job(task) == "7_3"
    assert preflight.name_job({"SLURM_JOB_ID": "7"}) == "7"


def test_a_heterogeneous_job_is_left_alone(
    job: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLURM_HET_SIZE", "2")
    assert preflight.main([]) == 0
    assert not job.exists()
    assert "heterogeneous" in capsys.readouterr().out
