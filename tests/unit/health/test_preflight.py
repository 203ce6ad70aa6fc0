"""`minivm preflight`: what it decides about a job's nodes, and what it tells its user."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from health.active import preflight
from health.active.culprit import GroupTest
from health.active.preflight import MOST_RESTARTS, REQUEUED, GroupOutcome, Outcome, examine, plain

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


# What slurmctld has about a running job, and sinfo about each node of its partition.
RECORD = (
    "JobId=7 JobName=x ArrayJobId=(null) JobState=RUNNING Reason=None Requeue=1 Restarts=0 Partition=main "
    "ReqNodeList=(null) ExcNodeList=(null) NodeList=a,b,c,d,e,f NumNodes=6 NumCPUs=6 Reservation=(null) "
    "Features=(null) TresPerTask=cpu=1\n"
)
STAND_INS = {
    "srun": 'echo srun "$@" >> calls; cat step; exit "$(cat code)"\n',
    "scontrol": """echo scontrol "$@" >> calls
case "$*" in
  *"show job "*) cat record; [ ! -e record.later ] || mv record.later record ;;
  *"show hostnames "*) echo "$3" | tr , '\\n' ;;
  *"show reservation "*) echo "ReservationName=r Nodes=$(cat reserved) NodeCnt=6" ;;
  requeue*) [ ! -e refused ] || { cat refused >&2; exit 1; } ;;
  update*) [ ! -e late ] || { cat late >&2; exit 1; } ;;
esac
""",
    # As sinfo does: it refuses --all together with --partition.
    "sinfo": 'echo sinfo "$@" >> calls\ncase "$*" in *--all*-p*|*-p*--all*) exit 1 ;; esac\ncat partition\n',
}


def row(
    name: str, state: str = "idle", cpus: int = 8, memory: int = 1000, features: str = "x", gres: str = "",
    partition: str = "main",
) -> str:  # fmt: skip
    return f"{partition}|{name}|{state}|{cpus}|{memory}|{features}|{gres or '(null)'}\n"


OWN = "".join(row(name, "allocated") for name in NODES)
ASKED = "minivm preflight: node c: TCP to a: 1 MB/s; asks slurmctld to requeue the job without (9 s)"


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A job of six nodes in a partition of seven, with stand-ins for Slurm's programs that write down their calls."""
    for name, text in STAND_INS.items():
        (tmp_path / name).write_text(f"#!/bin/sh\ncd {tmp_path}\n{text}")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "record").write_text(RECORD)
    (tmp_path / "partition").write_text(OWN + row("g"))
    (tmp_path / "step").write_text("requeued\nexcluded\n")
    (tmp_path / "code").write_text("0")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NODELIST", ",".join(NODES))
    for name in ("SLURM_RESTART_COUNT", "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID", "SLURM_HET_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def calls(job: Path, *programs: str) -> list[str]:
    lines = (job / "calls").read_text().splitlines() if (job / "calls").exists() else []
    return [line for line in lines if not programs or line.split()[0] in programs]


def act_on_c() -> int:
    return preflight.act(NODES, Outcome({"c": "TCP to a: 1 MB/s"}), "9 s")


def test_a_job_with_a_bad_node_is_requeued_without_it(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert act_on_c() == REQUEUED
    assert [line.split()[-1] for line in calls(job, "srun")] == ["--requeue-without=c"]
    assert capsys.readouterr().out.splitlines() == [ASKED, "minivm preflight: the job is requeued without c"]


def test_a_job_is_requeued_a_bounded_number_of_times(
    job: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLURM_RESTART_COUNT", str(MOST_RESTARTS))
    assert act_on_c() == 0
    assert not calls(job)
    assert "so it runs here" in capsys.readouterr().out


def test_without_a_clear_result_the_job_runs(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert preflight.act(NODES, Outcome({}, "the time is up"), "60 s") == 0
    assert preflight.act(NODES, Outcome({}), "9 s") == 0
    assert not calls(job)
    assert capsys.readouterr().out.splitlines() == [
        "minivm preflight: no clear result, so the job runs: the time is up (60 s)",
        "minivm preflight: 6 nodes passed (9 s)",
    ]


@pytest.mark.parametrize(
    ("step", "reason"),
    [
        ("echo 'Requested operation is presently disabled'; exit 1", "Requested operation is presently disabled"),
        ("echo 'srun: error: step creation refused' >&2; exit 1", "step creation refused"),
        ("exit 0", "the step says nothing"),
        ("kill -9 $$", "the step says nothing"),
    ],
)
def test_a_job_that_is_not_requeued_runs_and_its_output_says_so(
    job: Path, capsys: pytest.CaptureFixture[str], step: str, reason: str
) -> None:
    (job / "srun").write_text(f"#!/bin/sh\n{step}\n")
    assert act_on_c() == 0
    first, last = capsys.readouterr().out.splitlines()
    assert first == ASKED
    assert "it is not requeued and runs here" in last
    assert reason in last
    assert "submit it again with --exclude=c" in last


def test_a_job_that_is_requeued_but_not_without_the_node_says_so(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (job / "step").write_text("requeued\ncannot exclude: Unable to contact slurm controller\n")
    (job / "code").write_text("1")
    assert act_on_c() == REQUEUED
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "minivm preflight: the job is requeued; cannot exclude: Unable to contact slurm controller"


@pytest.mark.parametrize(
    "later",
    [RECORD.replace("Restarts=0", "Restarts=1"), RECORD.replace("RUNNING", "PENDING").replace("=6", "=4-6")],
    ids=["count", "state"],
)
def test_slurmctld_is_asked_where_the_requeue_ended_the_step(
    job: Path, capsys: pytest.CaptureFixture[str], later: str
) -> None:
    (job / "srun").write_text(f"#!/bin/sh\ncat > {job}/record <<'END'\n{later}END\nkill -9 $$\n")
    assert act_on_c() == REQUEUED
    assert capsys.readouterr().out.splitlines()[-1].startswith("minivm preflight: the job is requeued")


@pytest.mark.parametrize(
    ("record", "partition", "reason"),
    [
        ({}, OWN, "5 other nodes of partition main can run it, and it needs 6"),
        ({}, OWN + row("g", "down*") + row("h", "drained") + row("i", "idle*") + row("j", "maint"), "5 other nodes"),
        ({"ReqNodeList=(null)": "ReqNodeList=a,c"}, OWN + row("g"), "its --nodelist requires c"),
        ({"ExcNodeList=(null)": "ExcNodeList=x,g"}, OWN + row("g"), "5 other nodes"),
        ({"Features=(null)": "Features=fast"}, OWN.replace("|x|", "|x,fast|") + row("g"), "5 other nodes"),
        ({"TresPerTask=cpu=1": "TresPerNode=gres/gpu:1"}, OWN.replace("(null)", "gpu:4(S:0)") + row("g"), "5 other"),
        ({}, OWN + row("g", memory=500), "5 other nodes"),
        ({}, OWN + row("g", cpus=4), "5 other nodes"),
        ({"Reservation=(null)": "Reservation=r"}, OWN + row("g"), "5 other nodes"),
        ({}, OWN + row("g", partition="mainly"), "5 other nodes"),
        ({}, "", "cannot tell if other nodes can run it"),
        ({"NumNodes=6": "x"}, OWN + row("g"), "cannot tell if other nodes can run it"),
    ],
)
def test_a_job_that_could_not_start_again_runs_where_it_is(
    job: Path, capsys: pytest.CaptureFixture[str], record: dict[str, str], partition: str, reason: str
) -> None:
    text = RECORD
    for before, after in record.items():
        text = text.replace(before, after)
    (job / "record").write_text(text)
    (job / "partition").write_text(partition)
    (job / "reserved").write_text(",".join(NODES))
    assert act_on_c() == 0
    assert not calls(job, "srun")
    (line,) = capsys.readouterr().out.splitlines()
    assert "node c: TCP to a: 1 MB/s" in line, "which node, and what was measured"
    assert reason in line
    assert "runs here" in line


@pytest.mark.parametrize("state", ["idle", "mixed", "allocated", "idle~", "allocated+", "completing", "planned"])
def test_a_job_is_requeued_if_enough_nodes_are_left(job: Path, state: str) -> None:
    record = RECORD.replace("Features=(null) TresPerTask=cpu=1", "Features=(fast|slow)&[x*2] TresPerNode=gres/gpu:1")
    (job / "record").write_text(record.replace("ReqNodeList=(null)", "ReqNodeList=a,b"))
    own = OWN.replace("|x|", "|x,zone-a,fast|").replace("(null)", "gpu:4(S:0)")
    (job / "partition").write_text(own + row("g", state, memory=990, features="fast,x,more", gres="gpu:4(S:0-1)"))
    assert act_on_c() == REQUEUED


def test_a_client_that_fails_keeps_no_job_from_running(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (job / "sinfo").unlink()
    assert act_on_c() == 0
    assert "cannot tell if other nodes can run it" in capsys.readouterr().out


def test_the_exclusion_keeps_what_the_user_excluded(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (job / "record").write_text(RECORD.replace("ExcNodeList=(null)", "ExcNodeList=x[1-2]"))
    assert preflight.requeue_step("7", ["c"]) == 0
    assert calls(job) == [
        "scontrol --oneliner show job 7", "scontrol requeue 7", "scontrol update jobid=7 excnodelist=x[1-2],c",
    ]  # fmt: skip
    assert capsys.readouterr().out.splitlines() == ["requeued", "excluded"]


def test_the_step_says_only_what_slurmctld_did(
    job: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(preflight, "PENDING_S", 0.0)
    (job / "late").write_text("Job is not pending\n")
    assert preflight.requeue_step("7", ["c"]) == 1
    assert capsys.readouterr().out.splitlines() == ["requeued", "cannot exclude: Job is not pending"]
    (job / "refused").write_text("Requested operation is presently disabled\n")
    assert preflight.requeue_step("7", ["c"]) == 1
    assert capsys.readouterr().out.splitlines() == ["Requested operation is presently disabled"]


def test_few_tests_run_at_once_and_none_starts_after_the_time(
    job: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each test is an srun in the memory that the batch step has."""
    nodes = [f"n{number}" for number in range(200)]
    monkeypatch.setenv("SLURM_JOB_NODELIST", ",".join(nodes))
    running, most, lock = 0, 0, threading.Lock()

    def run_test(test: GroupTest, within_s: float) -> GroupOutcome:
        nonlocal running, most
        with lock:
            running, most = running + 1, max(most, running + 1)
        time.sleep(0.01)
        with lock:
            running -= 1
        return GroupOutcome(True)

    monkeypatch.setattr(preflight, "run_test", run_test)
    assert preflight.main([]) == 0
    assert most <= 16
    assert "200 nodes passed" in capsys.readouterr().out
    most = 0
    ends = iter([0.0, 0.0, *[999.0] * 1000])
    monkeypatch.setattr("time.monotonic", lambda: next(ends))
    assert preflight.main([]) == 0
    assert not most
    assert "the time is up" in capsys.readouterr().out


LUA = Path(__file__).parents[3] / "cluster/chart/files/job_submit.lua"


@pytest.mark.parametrize("shell", ["sh", "dash", "bash", "bash -e", "bash -eu"])
@pytest.mark.parametrize("code", [0, 1, 2, 3, REQUEUED, 127, 137, None])
def test_only_the_code_of_a_requeue_ends_the_batch_script(tmp_path: Path, shell: str, code: int | None) -> None:
    """A traceback, an image without the command, a kill: the job runs."""
    program, *options = shell.split()
    if not shutil.which(program):
        pytest.skip(f"no {program} here")
    (escaped,) = re.findall(r'^local PREFLIGHT = "(.*)"$', LUA.read_text(), re.MULTILINE)
    assert escaped.endswith(r"\n"), "one line of Lua without other escapes"
    assert "\\" not in escaped[:-2]
    minivm = tmp_path / "minivm"
    if code is not None:
        minivm.write_text(f"#!/bin/sh\n[ $1 = preflight ] && exit {code}\n")
        minivm.chmod(0o755)
    line = escaped[:-2].replace("/usr/bin/minivm", str(minivm))
    script = tmp_path / "script"
    script.write_text(f'{line}\necho "ran $?"\n')
    done = subprocess.run([program, *options, script], capture_output=True, text=True, timeout=20, check=False)
    assert (done.returncode, done.stdout) == ((1, "") if code == REQUEUED else (0, "ran 0\n"))
    assert not done.stderr


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
    assert not calls(job)
    assert "heterogeneous" in capsys.readouterr().out


def test_a_test_that_srun_started_on_another_node_has_no_result(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm 24.11 was seen to do so in a job with --nodelist."""
    run = "import sys; from health.active.run import main; sys.exit(main(sys.argv[1:]))"
    script = f"""#!/bin/sh
while [ "$1" != -m ]; do shift; done; shift 2
export SLURMD_NODENAME=f
exec {sys.executable} -c '{run}' "$@"
"""
    (job / "srun").write_text(script)
    monkeypatch.setattr(preflight, "OF_THE_JOB", (*preflight.OF_THE_JOB, "PYTHONPATH"))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))
    outcome = preflight.run_test(GroupTest(("c",), ("a",)), 20.0)
    assert outcome == GroupOutcome(None, "tcp: unknown: srun started the test on f and not on c")
