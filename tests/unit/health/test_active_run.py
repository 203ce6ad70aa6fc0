"""An active check on its node: measuring programs, what is kept of a result, and what the controller reads."""

from __future__ import annotations

import ast
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from gitsync.errors import GitsyncError
from health.active import measure
from health.active.run import ActiveRecord, read_record, record_run, run_check, save
from health.active.turn import PlanMemory, load_memory, save_memory
from health.api import Capture, Class, Command, Result
from health.checks.active_checks import Needs, active_metrics, active_results, list_active_checks, read_needs
from health.checks.cases import examine
from health.checks.judge import Judged, Setting, judge
from health.checks.load import load_checks, load_limits
from health.verdict import Verdict
from init.view.metrics import open_metrics
from tests.waiting import until

TREE = Path(__file__).resolve().parents[3] / "scripts"
CHECKS = load_checks(TREE, kind="active.d").checks


DAY = 86400.0


def judged(result: Result, state: dict[str, object] | None = None) -> Judged:
    return Judged(Verdict("cpu", result, Class.MANUAL, "words", at=5.0, commit="c"), state or {})


def test_every_active_check_says_what_it_needs() -> None:
    listed = list_active_checks(TREE)
    assert not listed.broken
    assert set(listed.checks) == set(CHECKS)
    for name, needs in listed.checks.items():
        assert needs.period_s == CHECKS[name].CHECK.period_s
        # The job's limit leaves time for its start.
        deadlines = [source.deadline_s for source in CHECKS[name].CHECK.sources if isinstance(source, Command)]
        assert sum(deadlines) <= needs.minutes * 60


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "wanted a line like NEEDS"),
        ("NEEDS = {'node': 1}", "unknown key 'node'"),
        ("NEEDS = {'nodes': 3}", "wanted a number from 1 to 2, not 3"),
        ("NEEDS = {'nodes': True}", "not True"),
        ("NEEDS = {'minutes': 'x' * 3}", "wanted a literal mapping"),
        ("NEEDS = [1]", "wanted a mapping"),
        ("NEEDS = {" + "[" * 5000, "plan an active check"),
        ("\0", "plan an active check"),
    ],
)
def test_needs_that_cannot_be_read_are_refused(text: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text(text)
    with pytest.raises(GitsyncError) as error:
        read_needs(tmp_path / "x.py")
    assert reason in str(error.value)


def test_needs_are_read_without_running_the_file(tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text('raise SystemExit(1)\nNEEDS = {"nodes": 2}\n')
    assert read_needs(tmp_path / "x.py") == Needs(nodes=2)


def test_a_tree_with_a_broken_active_check_is_refused(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    shutil.copytree(TREE, tree)
    assert not examine(tree).faults
    (tree / "active.d/cpu.py").write_text((tree / "active.d/cpu.py").read_text().replace('"nodes": 1', '"nodes": 0'))
    assert any("NEEDS.nodes" in fault for fault in examine(tree).faults)


@pytest.mark.parametrize("part", ["cpu", "memory", "disk"])
def test_a_program_prints_rates_that_its_check_reads(
    part: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(measure, "SECONDS", 0.01)
    monkeypatch.setattr(measure, "BLOCK", 1 << 16)
    monkeypatch.setattr(measure, "DISK", 1 << 20)
    assert measure.main([part]) == 0
    (check,) = [module for module in CHECKS.values() if module.CHECK.sources[0].name == f"{part}_rates"]
    captures = {f"{part}_rates": Capture(capsys.readouterr().out)}
    done = judge(check, captures, lambda name: load_limits(TREE, name), Setting("c", "b", 1.0, {}), {})
    assert done.verdict.result is not Result.UNKNOWN, done.verdict.reason
    assert not done.broken


def test_a_slow_result_does_not_become_the_usual_one() -> None:
    check = CHECKS["memory_bandwidth"]
    state: dict[str, object] = {}
    for _ in range(8):
        captures = {"memory_rates": Capture("copy 8000.0 MB/s")}
        done = judge(check, captures, lambda name: load_limits(TREE, name), Setting("c", "b", 1.0, {}), state)
        assert done.verdict.result is Result.OK
        state = dict(done.state)
    for _ in range(30):
        captures = {"memory_rates": Capture("copy 5000.0 MB/s")}
        done = judge(check, captures, lambda name: load_limits(TREE, name), Setting("c", "b", 1.0, {}), state)
        assert done.verdict.result is Result.PROBLEM
        state = dict(done.state)


def test_only_a_measured_result_counts_or_clears_a_failure() -> None:
    record = ActiveRecord("cpu")
    for result, failures in [
        (Result.PROBLEM, 1), (Result.UNKNOWN, 1), (Result.PROBLEM, 2), (Result.OK, 0), (Result.UNKNOWN, 0),
    ]:  # fmt: skip
        record = record_run(record, judged(result), "7", DAY)
        assert record.failures == failures


@pytest.mark.parametrize(
    "program",
    [("sleep", "600"), ("yes", "cpu0 1.0 MB/s"), ("false",), ("sh", "-c", "yes >&2"), ("no-such-program",)],
    ids=["hangs", "floods", "fails", "floods its log", "is absent"],
)
def test_a_check_whose_program_is_broken_says_nothing_about_the_node(program: tuple[str, ...]) -> None:
    cpu = CHECKS["cpu"]
    check = replace(cpu.CHECK, sources=(Command("cpu_rates", program, deadline_s=1.0),))
    module = SimpleNamespace(CHECK=check, parse=cpu.parse, judge=cpu.judge)
    before = ActiveRecord("cpu", failures=1)
    done = run_check(module, TREE, "c", before, {})
    assert done.verdict.result is Result.UNKNOWN, done.verdict.reason
    assert len(done.verdict.reason) < 1000
    assert record_run(before, done, "7", DAY).failures == 1


def test_a_record_is_read_back_and_a_damaged_one_is_none(tmp_path: Path) -> None:
    record = record_run(ActiveRecord("cpu"), judged(Result.PROBLEM, {"rates": [1.0]}), "7", 3600.0)
    save(record, tmp_path)
    assert read_record("cpu", tmp_path) == record
    for text in ("", "[]", "{}", '{"at": "x", "failures": 1}', '{"at": 1e999, "failures": 1}', "[" * 100_000):
        (tmp_path / "cpu.json").write_text(text)
        assert read_record("cpu", tmp_path) == ActiveRecord("cpu")


KILLED = """
import os, signal, sys
from pathlib import Path
from health.active.run import ActiveRecord, save
from health.active.turn import PlanMemory, save_memory
def kill(event, _):
    if event == sys.argv[1]:
        os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(kill)
if sys.argv[2] == "cpu.json":
    save(ActiveRecord("cpu", at=2.0), Path(sys.argv[3]))
else:
    save_memory(Path(sys.argv[3]) / "plan.json", PlanMemory(taken=frozenset({"2"})))
"""


@pytest.mark.parametrize("name", ["cpu.json", "plan.json"])
@pytest.mark.parametrize("step", ["open", "os.rename"])
def test_a_writer_that_is_killed_leaves_the_earlier_file_and_no_rest(step: str, name: str, tmp_path: Path) -> None:
    before, plan = ActiveRecord("cpu", at=1.0), PlanMemory(taken=frozenset({"1"}))
    save(before, tmp_path)
    save_memory(tmp_path / "plan.json", plan)
    root = Path(__file__).resolve().parents[3]
    done = subprocess.run([sys.executable, "-c", KILLED, step, name, str(tmp_path)], cwd=root, timeout=60)
    assert done.returncode == -signal.SIGKILL
    assert (read_record("cpu", tmp_path), load_memory(tmp_path / "plan.json")) == (before, plan)
    save(before, tmp_path)
    save_memory(tmp_path / "plan.json", plan)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cpu.json", "plan.json"]


PREEMPTED = """
import subprocess, sys, time
from pathlib import Path
from types import SimpleNamespace
from dataclasses import replace
from health.active.run import ActiveRecord, wait_for_children, run_check
from health.api import Command
from health.checks.load import load_checks
cpu = load_checks(Path(sys.argv[1]), ["cpu"], "active.d").checks["cpu"]
check = replace(cpu.CHECK, sources=(Command("cpu_rates", ("sh", "-c", sys.argv[3], sys.argv[2])),))
module = SimpleNamespace(CHECK=check, parse=cpu.parse, judge=cpu.judge)
if sys.argv[4]:
    # The signal comes after the program's first steps, and before Popen has returned.
    execute = subprocess.Popen._execute_child
    def interrupted(*arguments):
        execute(*arguments)
        time.sleep(600)
    subprocess.Popen._execute_child = interrupted
with wait_for_children():
    run_check(module, Path(sys.argv[1]), "c", ActiveRecord("cpu"), {})
"""


DEAF = "trap '' TERM; echo $$ > $0.pid; sleep 60 & echo $! >> $0.pid; mv $0.pid $0; wait; sleep 60"
# As the program that measures and its srun: the first ends at once, its child afterwards.
LATE = """sh -c 'trap "while [ -e /proc/$PPID/exe ]; do sleep 0.01; done; echo > $0.told; exit" TERM
echo $PPID $$ > $0.pid; mv $0.pid $0; while :; do sleep 0.01; done' $0 & wait"""


@pytest.mark.parametrize("when", ["", "while it starts"])
@pytest.mark.parametrize(("program", "is_told"), [(DEAF, False), (LATE, True)], ids=["deaf", "late"])
def test_a_check_that_makes_room_ends_after_all_its_processes(
    program: str, is_told: bool, when: str, tmp_path: Path
) -> None:
    """Slurm sends SIGTERM; a process that outlives the job's first one costs the user's job a second and more."""
    pids = tmp_path / "pids"
    command = [sys.executable, "-c", PREEMPTED, str(TREE), str(pids), program, when]
    with subprocess.Popen(command, cwd=TREE.parent) as process:
        until(pids.exists, "the check's program runs")
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 128 + signal.SIGTERM
    assert not [pid for pid in pids.read_text().split() if Path("/proc", pid).exists()]
    assert (tmp_path / "pids.told").exists() == is_told


def test_the_health_check_reads_what_a_run_keeps(tmp_path: Path) -> None:
    module = load_checks(TREE, ["active_checks"]).checks["active_checks"]
    record = ActiveRecord("cpu")
    for expected in (Result.OK, Result.PROBLEM):
        record = record_run(record, judged(Result.PROBLEM), "7", DAY)
        save(record, tmp_path)
        captures = {"active_results": active_results(tmp_path)}
        done = judge(module, captures, lambda name: load_limits(TREE, name), Setting("c", "b", 9.0, {}), {})
        assert done.verdict.result is expected
    assert done.verdict.class_ is Class.MANUAL


@pytest.mark.parametrize(
    ("age", "words"), [(59.0, ""), (61.0, "failed 2 times); stale"), (-61.0, "failed 2 times); stale")]
)
def test_a_failure_older_than_its_period_is_unknown_and_repaired_by_no_time(
    age: float, words: str, tmp_path: Path
) -> None:
    module = load_checks(TREE, ["active_checks"]).checks["active_checks"]
    record = ActiveRecord("cpu")
    for _ in range(2):
        record = record_run(record, judged(Result.PROBLEM), "7", 60.0)
    save(record, tmp_path)
    captures = {"active_results": active_results(tmp_path)}
    done = judge(module, captures, lambda name: load_limits(TREE, name), Setting("c", "b", record.at + age, {}), {})
    assert done.verdict.result is (Result.UNKNOWN if words else Result.PROBLEM)
    assert words in done.verdict.reason


def test_a_damaged_result_is_unknown_and_none_is_ok(tmp_path: Path) -> None:
    module = load_checks(TREE, ["active_checks"]).checks["active_checks"]
    for text, result in [(None, Result.OK), ("[1]", Result.UNKNOWN), ('{"at": 1}', Result.UNKNOWN)]:
        if text:
            (tmp_path / "x.json").write_text(text)
        captures = {"active_results": active_results(tmp_path)}
        done = judge(module, captures, lambda name: load_limits(TREE, name), Setting("c", "b", 9.0, {}), {})
        assert done.verdict.result is result
        assert not done.broken


def test_metrics_have_time_failures_and_period_of_each_result(tmp_path: Path) -> None:
    assert active_metrics(tmp_path) == ""
    save(ActiveRecord("cpu", at=1e9, failures=2, period_s=3600.0), tmp_path)
    text = active_metrics(tmp_path)
    assert 'minivm_health_active_at_seconds{check="cpu"} 1000000000\n' in text
    assert 'minivm_health_active_failures{check="cpu"} 2\n' in text
    assert 'minivm_health_active_period_seconds{check="cpu"} 3600\n' in text
    assert "bytes_per_second" not in text, "it measured no rate"
    assert open_metrics(text, "minivm_health_"), "PID 1 passes them on"


def test_the_last_rate_is_a_metric_also_a_slow_one(tmp_path: Path) -> None:
    for name, text, rate in [
        ("memory_bandwidth", "copy 150.0 MB/s", 150), ("tcp", "to_b 900.0 MB/s\nfrom_b 40.5 MB/s", 40.5),
    ]:  # fmt: skip
        captures = {CHECKS[name].CHECK.sources[0].name: Capture(text)}
        done = judge(CHECKS[name], captures, lambda name: load_limits(TREE, name), Setting("c", "b", 1.0, {}), {})
        assert done.verdict.result is Result.PROBLEM
        save(record_run(ActiveRecord(name), done, "7", DAY), tmp_path)
        assert f'minivm_health_active_bytes_per_second{{check="{name}"}} {rate * 1e6:.0f}\n' in active_metrics(tmp_path)
    (tmp_path / "tcp.json").write_text('{"at": 1, "failures": 0, "period_s": 1, "state": {"last_mbs": 1e999}}')
    assert 'bytes_per_second{check="tcp"}' not in active_metrics(tmp_path)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"at": "x"}', '{"at": 1e999, "failures": 1, "period_s": 1}', "[" * 99_999]
)
def test_metrics_skip_a_damaged_result(text: str, tmp_path: Path) -> None:
    (tmp_path / "cpu.json").write_text(text)
    assert active_metrics(tmp_path) == ""


def test_a_result_that_is_no_plain_file_stops_no_reader(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.json")
    (tmp_path / "b.json").symlink_to("/dev/zero")
    (tmp_path / "c.json").write_text("{" + " " * 100_000)
    assert active_metrics(tmp_path) == ""
    assert active_results(tmp_path).text.splitlines()[1:-1] == ["null"] * 3


def test_measuring_imports_the_standard_library_only() -> None:
    tree = ast.parse(Path(measure.__file__).read_text())
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not {str(name).partition(".")[0] for name in modules} & {"health", "gitsync", "init", "ground"}
