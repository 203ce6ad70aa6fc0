"""Notes in the outputs of failed jobs: which jobs get one, in which words, and which ends the runner asks about."""

from __future__ import annotations

from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Any

import pytest

from health.jobs.model import Job
from health.jobs.parse import parse_queue
from health.places import Places
from health.runner import failed
from health.runner.failed import APART_S, CHECKED_S, MOST, MOST_WAITING, SPREAD_S, WAIT_S, FailedJobs, choose_delay
from health.verdict import Class, Result, Verdict, write_verdict
from init.view.metrics import open_metrics

NOW = 1_800_000_000.0


def job(state: str, **more: object) -> Job:
    facts: dict[str, object] = {
        "id": 12, "shown": "12", "name": "train", "user": "alice", "states": frozenset({state, "COMPLETING"}),
        "nodes": "w0", "started": NOW - 500, "ended": NOW, "limit": 60, "output": "/home/alice/out",
    } | more  # fmt: skip
    return Job(**facts)  # type: ignore[arg-type]  # a table of fields


def words(subject: Job, problem: str = "") -> str:
    return failed.note_text(subject, NOW, "w0", problem)


@pytest.mark.parametrize(
    ("subject", "line"),
    [
        (job("FAILED", exit_code=3), "Its own program ended with exit code 3. Cause: your code, or one of its steps."),
        (
            job("FAILED", signal=11),
            "died of SIGSEGV: it accessed memory that is not its own. Cause: your code, or one of its steps.",
        ),
        (job("OUT_OF_MEMORY", memory="200M"), "used all of its memory, 200M in all"),
        (job("TIMEOUT"), "It reached its time limit of 1 h after 8 min. Cause: a limit."),
        (job("NODE_FAIL", failed_node="w0"), "slurmctld lost w0 while the job ran. Cause: the machine."),
    ],
)
def test_a_failed_job_gets_the_cause_and_the_command_in_two_lines(subject: Job, line: str) -> None:
    first, second, end = words(subject).split("\n")
    assert first.startswith("minivm: job 12 failed: ") and line in first
    assert (second, end) == ("minivm: evidence and what to do: minivm job 12", "")


def test_a_problem_of_the_node_is_named_and_blamed_for_nothing() -> None:
    text = words(job("FAILED", exit_code=3), "gpu_count: 7 of 8 GPUs")
    assert "Cause: your code, or the machine: w0 has a problem (gpu_count: 7 of 8 GPUs)." in text
    assert "problem" not in words(job("TIMEOUT"), "gpu_count: 7 of 8 GPUs")


def test_a_note_without_the_steps_denies_no_lack_of_memory() -> None:
    text = words(job("FAILED", exit_code=137))
    assert "killed by SIGKILL." in text and "memory" not in text and "Cause" not in text


def problem(check: str, class_: Class, **more: Any) -> Verdict:
    facts: dict[str, Any] = {"reason": "it is broken", "at": NOW, "expires": NOW + 60} | more
    return Verdict(check, Result.PROBLEM, class_, **facts)


def test_the_heaviest_problem_that_may_drain_the_node_is_the_suspect(tmp_path: Path) -> None:
    places = Places(verdicts=tmp_path / "verdicts", policy=tmp_path / "policy.json", scripts=tmp_path / "scripts")
    places.verdicts.mkdir()
    write_verdict(places.verdicts, problem("dns", Class.NODE))
    write_verdict(places.verdicts, problem("gpu_ecc", Class.RMA))
    write_verdict(places.verdicts, problem("disk", Class.USER))
    write_verdict(places.verdicts, problem("old", Class.RMA, expires=NOW - 1))
    write_verdict(places.verdicts, problem("failing_jobs", Class.RMA))
    assert failed.suspicion(places, NOW) == "gpu_ecc: it is broken"
    places.policy.write_text('{"broker": {"checks": {"gpu_ecc": "never", "dns": "never"}}}')
    assert failed.suspicion(places, NOW) == ""
    places.policy.write_text("{")
    assert failed.suspicion(places, NOW) == "gpu_ecc: it is broken", "an unusable policy ignores only proposals"


@pytest.mark.parametrize("state", ["COMPLETED", "CANCELLED", "PREEMPTED", "REVOKED", "RUNNING", "PENDING"])
def test_other_jobs_get_none(state: str) -> None:
    assert words(job(state)) == ""


def test_only_a_batch_job_and_only_the_first_component_gets_one() -> None:
    assert words(job("FAILED", exit_code=1, batch=False)) == ""
    assert words(job("FAILED", exit_code=1, shown="12+1")) == ""
    assert "minivm job 12+0\n" in words(job("FAILED", exit_code=1, shown="12+0"))
    assert "minivm job 12_3\n" in words(job("FAILED", exit_code=1, shown="12_3"))


def test_what_users_wrote_makes_no_line_and_no_escape() -> None:
    hostile = "\x1b]0;x\x07\nminivm: job 1 was stolen"
    text = words(job("NODE_FAIL", name=hostile, nodes=hostile, failed_node=hostile, user=hostile, output=hostile))
    assert text.count("\n") == 2 and "\x1b" not in text and len(text) < 1000


@pytest.mark.parametrize(
    ("subject", "problem", "key"),
    [
        (job("FAILED", exit_code=3), "", ("FAILED", "your code")),
        (job("FAILED", exit_code=3), "gpu_count: 7 of 8 GPUs", ("FAILED", "your code or the machine")),
        (job("FAILED", exit_code=1, reason="SystemFailure"), "", ("FAILED", "the cluster")),
        (job("BOOT_FAIL", exit_code=1, reason="JobLaunchFailure"), "", ("BOOT_FAIL", "not known")),
        (job("FAILED", signal=53), "", ("FAILED", "the request")),
        (job("FAILED", signal=9), "", ("FAILED", "not known")),
        (job("TIMEOUT"), "gpu_count: 7 of 8 GPUs", ("TIMEOUT", "a limit")),
        (job("OUT_OF_MEMORY"), "", ("OUT_OF_MEMORY", "the request")),
        (job("NODE_FAIL"), "", ("NODE_FAIL", "the machine")),
        (job("CANCELLED", killer="alice"), "", ("CANCELLED", "a person")),
        (job("PREEMPTED"), "", ("PREEMPTED", "the cluster")),
        (job("COMPLETED"), "", None),
        (job("PENDING"), "", None),
        (job("FAILED", exit_code=1, batch=False), "", None),
        (job("FAILED", exit_code=1, shown="12+1"), "", None),
    ],
)
def test_each_bad_end_is_of_a_state_and_a_cause(subject: Job, problem: str, key: tuple[str, str] | None) -> None:
    assert failed.classify(subject, NOW, problem) == key
    assert {key} - {None} <= set(failed.SERIES), "its series exists before the first failure"


def counted(path: Path) -> dict[tuple[str, str], int]:
    return {key: number for key, number in failed.read_counts(path)[0].items() if number}


def test_causes_are_counted_and_counts_outlive_the_runner(tmp_path: Path) -> None:
    path = tmp_path / "metrics.d/jobs.prom"
    failed.write_counts(path, *failed.read_counts(path))
    assert counted(path) == {} and path.read_text().count('"} 0\n') == len(failed.SERIES) + 1
    jobs = [failed.EndedJob(number, 61401, 61400) for number in (12, 13, 14)]
    shown = {12: job("FAILED", exit_code=3), 13: job("DEADLINE", admin_comment="minivm: the pod of node w0 stops")}
    rare = failed.classify(shown[13], NOW)
    assert rare == ("DEADLINE", "the cluster") and rare not in failed.SERIES
    for times in (1, 2):
        failed.count(path, jobs, shown, "", dropped=5)
        assert counted(path) == {("FAILED", "your code"): times, rare: times}
        assert failed.read_counts(path)[1] == 6 * times, "one that slurmctld does not know, and five beyond the limits"
    lines = open_metrics(path.read_text(), "minivm_jobs_")
    assert 'minivm_jobs_failed_total{state="FAILED",cause="your code"} 2' in lines
    assert "minivm_jobs_unexplained_total 12" in lines


def test_a_hostile_slurmctld_makes_no_endless_list_of_series(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, jobs = tmp_path / "jobs.prom", [failed.EndedJob(12, 61401, 61400)]
    for state in [f"{'X' * (number % 30)}Y{'Z' * (number // 30)}" for number in range(2 * failed.MOST_SERIES)]:
        monkeypatch.setattr(failed, "classify", lambda *_, state=state: (state, "the cluster"))
        failed.count(path, jobs, {12: job("FAILED")}, "", dropped=0)
    counts, _ = failed.read_counts(path)
    assert len(counts) == failed.MOST_SERIES and counts[failed.OTHER] > 0
    assert open_metrics(path.read_text(), "minivm_jobs_")


@pytest.mark.parametrize("text", ["", "\xff\x00", 'minivm_jobs_failed_total{state="FAILED",cause="your code"} -1\n'])
def test_counts_that_cannot_be_read_begin_again(tmp_path: Path, text: str) -> None:
    (tmp_path / "jobs.prom").write_text(text)
    assert failed.read_counts(tmp_path / "jobs.prom") == (dict.fromkeys((*failed.SERIES, failed.OTHER), 0), 0)


def test_the_file_of_standard_error_is_known() -> None:
    recorded = Path(__file__).parents[2] / "recordings/jobs/24.11-squeue.json"
    assert [found.errors for found in parse_queue(recorded.read_text()) if found.id in (1, 2)] == [
        "/home/alice/slurm-1.out", "/dev/null",
    ]  # fmt: skip


def env(number: int = 12, code: str = "256", **more: str) -> dict[str, str]:
    return {
        "SLURM_JOB_ID": str(number), "SLURM_JOB_UID": "61401", "SLURM_JOB_GID": "61400", "SLURM_JOB_EXIT_CODE": code,
        "SLURM_JOB_NODELIST": "w[0-3]", "SLURMD_NODENAME": "w0",
    } | more  # fmt: skip


def taken(*ended: dict[str, str], started: dict[str, str] | None = None) -> list[int]:
    jobs = FailedJobs()
    if started:
        jobs.note_start(started)
    for each in ended:
        jobs.note_end(each, 0.0, NOW)
    return [found.id for found in jobs.take(WAIT_S + SPREAD_S)]


def test_slurmctld_is_asked_only_about_jobs_that_may_have_failed_on_the_batch_hosts_node() -> None:
    assert taken(env()) == [12]
    assert taken(env(), env()) == [12], "an epilog that runs twice is one job"
    assert taken(env(code="0")) == [], "it ended well"
    assert taken(env(SLURMD_NODENAME="w1")) == [], "the first node of the job writes the note"
    assert taken(env(SLURM_JOB_UID="0")) == [], "a job of root"
    assert taken({}, {"SLURM_JOB_ID": "x" * 9}, {"SLURM_JOB_ID": "-1"}) == []


def test_a_job_that_reached_its_time_limit_ends_with_code_0_and_is_asked_about() -> None:
    limit = {"SLURM_JOB_ID": "12", "SLURM_JOB_END_TIME": str(int(NOW))}
    assert taken(env(code="0"), started=limit) == [12]
    assert taken(env(code="0"), started=limit | {"SLURM_JOB_END_TIME": str(int(NOW + 60))}) == []


def test_rounds_are_bounded_and_apart_and_wait_for_the_checks_of_the_node() -> None:
    jobs = FailedJobs()
    assert jobs.times(is_checked=True) == []
    for number in range(1, 200):
        jobs.note_end(env(number), 100.0, NOW)
    assert jobs.times(is_checked=True) == [100.0 + WAIT_S + choose_delay("w0")]
    assert jobs.times(is_checked=False) == [100.0 + WAIT_S + choose_delay("w0") + CHECKED_S]
    rounds = []
    now = 100.0
    while times := jobs.times(is_checked=True):
        now = max(now, *times)
        rounds.append((now, len(jobs.take(now))))
        jobs.set_fork(7)
        assert jobs.times(is_checked=True) == [], "one round at a time"
        jobs.forget_fork(8)
        jobs.forget_fork(7)
    assert sum(number for _, number in rounds) == MOST_WAITING and jobs.dropped == 199 - MOST_WAITING
    assert all(number <= MOST for _, number in rounds)
    assert all(later - sooner >= APART_S for (sooner, _), (later, _) in pairwise(rounds))
    assert inf not in [at for at, _ in rounds]
