"""The first failure of a job of several tasks: from slurmd's log to the page."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from health import black_box
from health.jobs.boxes import Box, add_failures, explain, find_failed_step
from health.jobs.model import Answer, Job, JobCause, JobStep

NOW = 1_795_800_000.0
JOB = {"SLURM_JOB_ID": "12", "SLURM_JOB_UID": "1001", "SLURM_JOB_EXIT_CODE": "256"}


def stamp(at: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(NOW + at)) + f".{round(at % 1 * 1000):03d}"


def line(at: float, text: str, step: str = "12.0") -> str:
    return f"[{stamp(at)}] [{step}] {text}\n"


STARTS = line(0, "starting 2 tasks") + "".join(
    line(0, f"task {rank} ({rank + 40}) started {stamp(0)[:19]}") for rank in (2, 3)
)
FAILS = line(1.5, "task 3 (43) exited with exit code 7.")
KILLED = line(2.25, "task 2 (42) exited. Killed by signal 15.")


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MINIVM_LOG", str(tmp_path))
    return tmp_path / "slurmd.log"


def test_failed_tasks_of_each_step_are_read(log: Path) -> None:
    assert black_box.find_failed_steps(12, NOW) == []
    good = line(3, "starting 1 tasks", "12.1") + line(3, "task 0 (60) started x", "12.1")
    good += line(3, "task 0 (60) exited with exit code 0.", "12.1")
    oom = line(4, "starting 1 tasks", "12.2") + line(4, "task 0 (70) started x", "12.2")
    oom += line(4, "task 0 (70) Out Of Memory (OOM)", "12.2")
    log.write_text(STARTS + "junk\n" + FAILS + KILLED + good + oom + FAILS.replace("[12.0]", "[121.0]"))
    first = [[3, 7, 0, NOW + 1.5], [2, 0, 15, NOW + 2.25]]
    assert json.loads(json.dumps(black_box.find_failed_steps(12, NOW))) == [
        {"kind": "step", "step": 0, "tasks": 2, "failed": first},
        {"kind": "step", "step": 2, "tasks": 1, "failed": [[0, 0, black_box.OUT_OF_MEMORY, NOW + 4]]},
    ]
    assert black_box.find_failed_steps(12, NOW + 10) == [], "an earlier run of a requeued job does not count"


@pytest.mark.parametrize(
    "forged",
    [
        line(0.5, "task 2 (42) exited with exit code 1."),
        line(0.5, "task 9 (99) exited with exit code 1."),
        line(0.5, "task 9 (99) started x") + line(0.6, "task 9 (99) exited with exit code 1."),
        line(0.5, "starting 3 tasks") + line(0.5, "task 9 (99) started x"),
    ],
)
def test_lines_that_a_user_forged_make_the_step_doubtful_and_name_no_task(log: Path, forged: str) -> None:
    log.write_text(STARTS + forged + FAILS + KILLED)
    (entry,) = black_box.find_failed_steps(12, NOW)
    assert entry["odd"] and "failed" not in entry


def test_a_step_that_another_user_forged_as_a_whole_is_not_told(log: Path) -> None:
    forged = (STARTS + FAILS).replace("[12.0]", "[12.7]")
    log.write_text(STARTS + FAILS + KILLED + forged)
    (_, entry) = black_box.find_failed_steps(12, NOW)
    assert entry["step"] == 7 and "odd" not in entry, "by its lines alone it looks like a step"
    steps = json.loads(json.dumps(black_box.find_failed_steps(12, NOW)))
    boxes = [Box("w0", ({"kind": "begin"}, *steps, {"kind": "end"}), clock=(0.0, 0.01))]
    found = find_failed_step(boxes, ended(steps=(JobStep("12.batch", "FAILED", 7, 0), JobStep("12.0", "FAILED", 7, 0))))
    assert found is not None and found.name == "12.0"


def test_a_log_without_the_start_of_the_step_names_no_task(log: Path) -> None:
    log.write_text(FAILS + KILLED)
    (entry,) = black_box.find_failed_steps(12, NOW)
    assert entry["odd"]


def test_a_large_log_keeps_its_end_in_whole_lines(log: Path) -> None:
    black_box.trim_slurmd_log()
    log.write_text(STARTS + FAILS)
    black_box.trim_slurmd_log()
    assert log.read_text() == STARTS + FAILS
    with log.open("a") as slurmd:
        slurmd.write(FAILS * (black_box.LARGEST_SLURMD_LOG // len(FAILS) + 1))
        slurmd.flush()
        black_box.trim_slurmd_log()
        slurmd.write("next\n")
    text = log.read_text()
    assert len(text) <= black_box.LARGEST_SLURMD_LOG // 2 + 5
    assert text.startswith(FAILS) and text.endswith(FAILS + "next\n")


def test_the_box_has_the_steps_only_of_a_job_that_failed(log: Path) -> None:
    log.write_text(STARTS + FAILS + KILLED)
    for job, code in (("12", "256"), ("12", "0")):
        env = JOB | {"SLURM_JOB_ID": job, "SLURM_JOB_EXIT_CODE": code}
        black_box.begin(env, NOW)
        black_box.end(env, NOW + 9)
        kinds = [entry["kind"] for entry in black_box.parse_lines(black_box.find(12, 1001))]
        assert kinds[-3:] == (["begin", "step", "end"] if code != "0" else ["end", "begin", "end"])


def box(node: str, *failed: list[float], clock: tuple[float, float] | None = (0.0, 0.01), step: int = 0) -> Box:
    entries: list[dict[str, object]] = [{"kind": "begin"}]
    if failed:
        entries.append({"kind": "step", "step": step, "tasks": 2, "failed": list(failed)})
    return Box(node, (*entries, {"kind": "end"}), clock=clock)


def ended(**more: object) -> Job:
    return Job(id=12, shown="12", states=frozenset({"FAILED"}), nodes="w[0-1]", **more)  # type: ignore[arg-type]


HEAD = "Its own program ended with exit code 7."


def page(*boxes: Box, job: Job | None = None, cause: JobCause = JobCause.CODE) -> Answer:
    return add_failures(Answer(HEAD, cause), boxes, job or ended())


def test_the_first_failure_is_named_among_its_consequences() -> None:
    answer = page(box("w0", [0, 0, 15, 102.0], [1, 0, 15, 102.1]), box("w1", [3, 7, 0, 100.0]))
    assert answer.headline == f"First failed task 3 on w1, in step 12.0: exit code 7. {HEAD}"
    first, rest = (fact.text for fact in answer.evidence)
    assert first.startswith("step 12.0: task 3 on w1 ended first") and first.endswith("exit code 7")
    assert rest == ("step 12.0: after 2 s followed task 0 on w0 (killed by SIGTERM), task 1 on w0 (killed by SIGTERM)")


def test_clocks_of_nodes_are_compared_and_what_they_cannot_tell_is_not_told() -> None:
    ahead = page(box("w0", [0, 0, 9, 112.0], clock=(10.0, 0.01)), box("w1", [3, 7, 0, 105.0], clock=(0.0, 0.01)))
    assert "First failed task 0 on w0" in ahead.headline, "by w1's clock it was 102"
    unknown = page(box("w0", [0, 0, 9, 102.0], clock=None), box("w1", [3, 7, 0, 100.0]))
    assert "the clock of w0 may differ by 10 s: task 3 on w1, task 0 on w0." in unknown.headline
    first, rest = (fact.text for fact in unknown.evidence)
    assert "first" not in first and rest.startswith("step 12.0: by the nodes' clocks 2 s later task 0 on w0")
    close = page(box("w0", [0, 0, 9, 100.3]), box("w1", [3, 7, 0, 100.0]))
    assert "too close together" in close.headline
    one = page(box("w0", [0, 0, 9, 100.3], [1, 7, 0, 100.0]), box("w1"))
    assert "First failed task 1 on w0" in one.headline, "one clock tells its own tasks apart"


def stamped(one: Box, *ahead: float) -> Box:
    """Stamp the begin, the end and the answer by a clock that was ahead by so much then."""
    entries: list[dict[str, object]] = [{"kind": "now"}, *one.entries]
    times = {"begin": (ahead[0], 90.0), "end": (ahead[1], 120.0), "now": (ahead[2], 500.0)}
    shown = []
    for entry in entries:
        offset, true = times.get(str(entry["kind"]), (0.0, 0.0))
        shown.append({**entry, "at": offset + true, "boot": true - 50} if true else entry)
    return Box(one.node, tuple(shown), clock=(ahead[2], 0.01))


def test_a_clock_that_was_set_since_names_no_first_failure_by_it() -> None:
    later = box("w0", [0, 0, 9, 102.0])
    # w1 failed at 105, and its clock was 10 s behind: it is right when it answers.
    since = page(later, stamped(box("w1", [3, 7, 0, 95.0]), -10, -10, 0))
    assert "in an order that is not known, since the clock of w1 may differ by 10 s" in since.headline
    assert since.cause is JobCause.CODE and "First failed" not in since.headline
    steady = page(later, stamped(box("w1", [3, 7, 0, 95.0]), -10, -10, -10))
    assert "First failed task 0 on w0" in steady.headline
    boxes = [later, stamped(box("w1", [3, 7, 0, 95.0]), -10, -10, 0)]
    assert explain(boxes, ended())[1] == [
        "when exactly tasks on w1 ended: since the job's start its clock was set by 10 s, or the node booted"
    ]


def test_a_clock_that_was_set_during_the_run_hides_no_failure() -> None:
    hidden = page(box("w0", [0, 0, 9, 102.0]), stamped(box("w1"), 10, 0, 0))
    assert "First of the nodes that told failed task 0 on w0" in hidden.headline
    one = page(stamped(box("w1", [3, 7, 0, 101.0], [4, 0, 9, 108.0]), 10, 0, 0), box("w0"))
    assert "order that is not known" in one.headline


def test_tasks_that_were_asked_to_end_are_consequences_unless_they_ended_clearly_earlier() -> None:
    close = page(box("w0", [0, 0, 15, 99.9]), box("w1", [3, 7, 0, 100.0]))
    assert "First failed task 3 on w1" in close.headline
    clear = page(box("w0", [0, 0, 15, 90.0]), box("w1", [3, 7, 0, 100.0]))
    assert "First failed task 0 on w0" in clear.headline
    unsure = page(box("w0", [0, 0, 15, 99.0], clock=None), box("w1", [3, 7, 0, 100.0]), cause=JobCause.UNKNOWN)
    assert "First failed task 3 on w1" in unsure.headline and unsure.cause is JobCause.CODE


def test_a_node_that_told_nothing_makes_the_first_one_less_sure() -> None:
    silent = page(Box("w0", obstacle="no answer"), box("w1", [3, 7, 0, 100.0]))
    assert "First of the nodes that told failed task 3 on w1" in silent.headline
    cut = page(Box("w0", ({"kind": "begin"},)), box("w1", [3, 7, 0, 100.0]))
    assert "First of the nodes that told failed" in cut.headline
    doubtful = Box("w0", ({"kind": "begin"}, {"kind": "step", "step": 0, "tasks": 2, "odd": True}, {"kind": "end"}))
    assert "First of the nodes that told failed" in page(doubtful, box("w1", [3, 7, 0, 100.0])).headline
    assert explain([doubtful], ended())[1] == ["which tasks of step 0 failed on w0: slurmd's log there is not whole"]


def test_only_the_last_failed_step_counts_and_only_where_it_is_the_cause() -> None:
    both = (box("w0", [0, 1, 0, 50.0], step=1), box("w1", [1, 7, 0, 100.0], step=10))
    assert "in step 12.10" in page(*both).headline
    assert page(*both, cause=JobCause.PERSON).headline == HEAD and page(*both, cause=JobCause.PERSON).evidence
    running = Job(id=12, shown="12", states=frozenset({"RUNNING"}))
    assert not page(*both, job=running).evidence
    assert page(box("w0")).headline == HEAD
    single = Box("w0", ({"kind": "begin"}, {"kind": "step", "step": 0, "tasks": 1, "failed": [[0, 7, 0, 1.0]]}))
    assert page(single).headline == HEAD, "one task is no first one"


@pytest.mark.parametrize("odd", [{"failed": 1}, {"failed": [1, [1], ["x", 1, 1, 1], [0, 1, 0, float("inf")]]}, {}])
def test_a_hostile_box_names_no_task(odd: dict[str, object]) -> None:
    entry: dict[str, object] = {"kind": "step", "step": 0, "tasks": "x", **odd}
    assert page(Box("w\x1b0", ({"kind": "begin"}, entry, {"kind": "step", "step": [1]}))).headline == HEAD


def test_a_cut_epilog_names_no_first_failure_and_one_that_runs_again_names_it_once() -> None:
    whole = box("w0", [1, 7, 0, 100.0], [0, 0, 15, 102.0])
    begin, step, end = whole.entries
    cut = Box("w0", (begin, step), clock=whole.clock)
    assert page(cut).headline == HEAD and find_failed_step([cut], ended()) is None
    assert "its epilog has not written that" in explain([cut], ended())[1][0]
    again = Box("w0", (begin, step, step, end), clock=whole.clock)
    assert page(again) == page(whole)


def test_the_node_that_never_told_may_have_failed_first() -> None:
    told = box("w0", [0, 0, 15, 102.0], [1, 0, 15, 102.1])
    silent = Box("w1", obstacle="it gave no answer")
    answer = page(told, silent)
    assert answer.headline.startswith("First of the nodes that told failed task 0 on w0")
    assert "ended first of the nodes that told" in answer.evidence[0].text
    later = ended(steps=(JobStep("12.0", "FAILED", 1, 0), JobStep("12.1", "FAILED", 7, 0)))
    assert page(told, silent, job=later).headline == HEAD, "the step that counts is another one"
    assert page(told, box("w1"), job=later).headline.startswith("First failed task 0 on w0")
