"""The planner's turns against a simulated Slurm: nothing runs twice, whatever is killed; culprits are found."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path

import pytest

from health.active import __main__ as service
from health.active import show
from health.active.culprit import GroupTest, PlacedMachine
from health.active.turn import (
    ActiveInputs,
    ActiveJob,
    ActiveNode,
    ActiveSettings,
    CheckState,
    JobResult,
    MachineResult,
    PlanMemory,
    Submission,
    Turn,
    decide,
    findings,
    is_at_fault,
    list_blamed_leaves,
    load_memory,
    save_memory,
)
from health.checks.active_checks import Needs
from init.errors import ConfigError
from init.slurm import client
from init.slurm.node import parse

CHECKS = {"cpu": Needs(), "tcp": Needs(nodes=2)}
TICK = 20.0
SETTINGS = ActiveSettings(idle_s=60, share=0.5)


@dataclass
class Simulation:
    """Slurm with idle nodes. A job runs for some turns; slurmctld forgets an ended job after 300 s."""

    names: list[str]
    bad: Mapping[str, set[str]] = field(default_factory=dict)
    per_leaf: int = 4
    now: float = 1e9
    memory: PlanMemory = field(default_factory=PlanMemory)
    jobs: dict[str, tuple[Submission, float, JobResult]] = field(default_factory=dict)
    awaited: frozenset[str] = frozenset()
    # Submissions of a killed planner that reach slurmctld after the next planner has asked for the jobs.
    late: list[Submission] = field(default_factory=list)
    commit: str = "first"
    settings: ActiveSettings = SETTINGS
    weights: dict[str, int] = field(default_factory=dict)
    ran: list[Submission] = field(default_factory=list)
    waiting: dict[str, tuple[Submission, float]] = field(default_factory=dict)
    count: int = 0

    def inputs(self) -> ActiveInputs:
        self.start_waiting()
        busy = {name for item, end, _ in self.jobs.values() if end > self.now for name in item.test.machines}
        nodes = tuple(
            ActiveNode(
                PlacedMachine(name, ("/", f"r{i // self.per_leaf}")),
                name not in busy,
                self.now - 100,
                self.weights.get(name, 1),
            )
            for i, name in enumerate(self.names)
        )
        jobs = tuple(
            ActiveJob(id_, item.check, item.test, JobResult.IN_FLIGHT if end > self.now else result)
            for id_, (item, end, result) in self.jobs.items()
            if end + 300 > self.now
        )
        waiting = tuple(
            ActiveJob(id_, item.check, item.test, JobResult.IN_FLIGHT, waits_s=self.now - since)
            for id_, (item, since) in self.waiting.items()
        )
        return ActiveInputs(CHECKS, jobs + waiting, nodes, self.awaited, self.settings, self.commit)

    def start_waiting(self) -> None:
        for id_, (item, _) in list(self.waiting.items()):
            running = {name for other, end, _ in self.jobs.values() if end > self.now for name in other.test.machines}
            if not running.intersection(item.test.machines):
                del self.waiting[id_]
                self.run(id_, item)

    def run(self, id_: str, submission: Submission) -> None:
        sick = self.bad.get(submission.check, set()).intersection(submission.test.machines)
        result = JobResult.FAILED if sick else JobResult.PASSED
        self.jobs[id_] = (submission, self.now + 2.5 * TICK, result)
        self.ran.append(submission)

    def turn(self, killed_after: int | None = None, late: bool = False) -> None:
        """Take a turn; with a number, the planner is killed after so many submissions, its memory unwritten.

        With `late`, its memory is written, and its next submission reaches slurmctld in the next turn.
        """
        inputs = self.inputs()
        turn = decide(self.memory, inputs, self.now)
        for id_ in turn.cancel:
            self.waiting.pop(id_, None)
        for submission in turn.submit[:killed_after]:
            running = {name for item, end, _ in self.jobs.values() if end > self.now for name in item.test.machines}
            assert not running.intersection(submission.test.machines), "a machine runs two checks"
            self.count += 1
            self.run(str(self.count), submission)
        for submission in self.late:
            self.count += 1
            self.waiting[str(self.count)] = (submission, self.now - 1)
        self.late = list(turn.submit[killed_after or 0 :][:1]) if late else []
        if killed_after is None or late:
            self.memory = turn.memory
            # It is saved before the weights are set.
            if not late:
                self.weights |= turn.weights
        self.now += TICK


def names(count: int) -> list[str]:
    return [f"n{i:02}" for i in range(count)]


def test_every_idle_machine_is_tested_once_a_period_by_every_check() -> None:
    slurm = Simulation(names(16))
    for _ in range(200):
        slurm.turn()
    for check in CHECKS:
        tested = [name for item in slurm.ran if item.check == check for name in item.test.machines]
        assert sorted(tested) == names(16)
    slurm.now += 86400
    slurm.ran.clear()
    for _ in range(200):
        slurm.turn()
    assert sorted(name for item in slurm.ran if item.check == "tcp" for name in item.test.suspects) == names(16)


@pytest.mark.parametrize("seed", range(20))
def test_a_submission_that_outlives_its_planner_runs_once(seed: int) -> None:
    dice = random.Random(seed)
    slurm = Simulation(names(16))
    for _ in range(300):
        killed = dice.random() < 0.3
        slurm.turn(dice.randint(0, 2) if killed else None, late=killed)
    for check in CHECKS:
        tested = [name for item in slurm.ran if item.check == check for name in item.test.machines]
        assert sorted(tested) == names(16)


@pytest.mark.parametrize("seed", range(10))
def test_a_planner_that_is_killed_anywhere_doubles_nothing_and_still_finds_the_machine(seed: int) -> None:
    dice = random.Random(seed)
    slurm = Simulation(names(16), {"tcp": {"n05"}, "cpu": {"n09"}})
    for _ in range(400):
        killed = dice.random() < 0.3
        slurm.turn(dice.randint(0, 3) if killed else None)
        if dice.random() < 0.01:
            slurm.memory = PlanMemory()
    for _ in range(300):
        slurm.turn()
    assert [item.name for item in findings(slurm.memory.of("tcp"))] == ["n05"]
    assert [item.name for item in findings(slurm.memory.of("cpu"))] == ["n09"]


def test_a_repaired_machine_is_no_longer_blamed() -> None:
    slurm = Simulation(names(8), {"tcp": {"n05"}, "cpu": {"n01"}})
    for _ in range(200):
        slurm.turn()
    assert findings(slurm.memory.of("tcp"))
    slurm.bad = {}
    for _ in range(2):
        slurm.now += 86400
        for _ in range(200):
            slurm.turn()
    assert not findings(slurm.memory.of("tcp"))
    assert not findings(slurm.memory.of("cpu"))


def test_a_check_that_fails_everywhere_blames_no_machine() -> None:
    slurm = Simulation(names(8), {"cpu": set(names(8)), "tcp": set(names(8))})
    for _ in range(400):
        slurm.turn()
    assert is_at_fault(slurm.memory.of("cpu"))
    assert findings(slurm.memory.of("cpu")) == ()
    assert findings(slurm.memory.of("tcp")) == ()


def test_a_check_that_always_fails_rests_until_another_commit() -> None:
    slurm = Simulation(names(64), {"cpu": set(names(64))}, settings=replace(SETTINGS, share=0.1))
    for _ in range(800):
        slurm.turn()
    cpu = slurm.memory.of("cpu")
    assert 64 < [item.check for item in slurm.ran].count("cpu") <= 64 * 1.7, "it rests once most machines have failed"
    assert findings(cpu) == ()
    told = "the active check cpu fails on most machines at commit first and rests for 6 h or until another commit"
    assert told in service.sentence(Turn(slurm.memory))
    slurm.commit, slurm.bad = "second", {"cpu": {"n05"}}
    slurm.ran.clear()
    for _ in range(800):
        slurm.turn()
    assert {name for item in slurm.ran if item.check == "cpu" for name in item.test.machines} == set(names(64))
    assert [item.name for item in findings(slurm.memory.of("cpu"))] == ["n05"]
    assert service.sentence(Turn(slurm.memory)) == "active check cpu: n05 failed 2 of 2 tests"


def test_another_commit_keeps_the_results_of_a_check_that_works() -> None:
    slurm = Simulation(names(8), {"cpu": {"n05"}})
    for _ in range(200):
        slurm.turn()
    slurm.commit = "second"
    slurm.ran.clear()
    for _ in range(100):
        slurm.turn()
    assert not slurm.ran
    assert [item.name for item in findings(slurm.memory.of("cpu"))] == ["n05"]


def test_on_a_node_for_which_a_users_job_waits_no_check_starts() -> None:
    slurm = Simulation(names(8), awaited=frozenset(names(4)))
    for _ in range(60):
        slurm.turn()
    assert {name for item in slurm.ran for name in item.test.machines} == set(names(8)) - set(names(4))


def test_a_check_that_waits_too_long_or_for_an_awaited_node_or_twice_is_cancelled() -> None:
    def flying(id_: str, waits_s: float, name: str = "n00") -> ActiveJob:
        return ActiveJob(id_, "cpu", GroupTest((name,)), JobResult.IN_FLIGHT, waits_s)

    def cancelled(*jobs: ActiveJob, awaited: frozenset[str] = frozenset()) -> tuple[str, ...]:
        return decide(PlanMemory(), ActiveInputs(CHECKS, jobs, (), awaited), 1e9).cancel

    assert cancelled(flying("7", 31)) == ("7",)
    assert cancelled(flying("7", 1)) == ()
    assert cancelled(flying("7", 1), awaited=frozenset({"n00"})) == ("7",)
    assert cancelled(flying("7", 0), awaited=frozenset({"n00"})) == (), "slurmctld itself ends a running check"
    assert cancelled(flying("7", 1), flying("8", 0)) == ("7",)
    assert cancelled(flying("7", 2), flying("8", 1)) == ("8",)
    assert cancelled(flying("7", 0), flying("8", 1, "n01")) == ()


def test_a_verdict_ends_with_the_period_of_its_result() -> None:
    slurm = Simulation(names(8), {"tcp": {"n05"}, "cpu": {"n01"}})
    for _ in range(200):
        slurm.turn()
    assert findings(slurm.memory.of("tcp"))
    assert findings(slurm.memory.of("cpu"))
    # The machines are drained: no test runs on them.
    slurm.now += 86400
    slurm.awaited = frozenset(names(8))
    slurm.turn()
    assert not findings(slurm.memory.of("tcp"))
    assert not findings(slurm.memory.of("cpu"))


def test_a_machine_that_stays_bad_is_tested_again_before_its_verdict_ends() -> None:
    slurm = Simulation(names(8), {"tcp": {"n05"}, "cpu": {"n01"}})
    for _ in range(200):
        slurm.turn()
    for _ in range(int(1.2 * 86400 / TICK)):
        slurm.turn()
        assert [item.name for item in findings(slurm.memory.of("cpu"))] == ["n01"]
        assert [item.name for item in findings(slurm.memory.of("tcp"))] == ["n05"]


def test_a_clock_that_was_set_back_stops_no_check() -> None:
    slurm = Simulation(names(8), now=2e9)
    for _ in range(200):
        slurm.turn()
    slurm.now, slurm.jobs = 1e9, {}
    slurm.ran.clear()
    for _ in range(200):
        slurm.turn()
    assert {name for item in slurm.ran for name in item.test.machines} == set(names(8))


def test_a_broken_check_rests() -> None:
    memory, nodes = PlanMemory(), (ActiveNode(PlacedMachine("n00"), True, 0.0),)
    now = 1e9
    for number in range(3):
        job = ActiveJob(str(number), "cpu", GroupTest(("n00",)), JobResult.NONE)
        memory = decide(memory, ActiveInputs({"cpu": Needs()}, (job,), nodes), now).memory
        now += 3600
    assert decide(memory, ActiveInputs({"cpu": Needs()}, (), nodes), now).submit == ()
    assert "the active check cpu gave no result 3 times in a row" in service.sentence(Turn(memory))
    assert decide(replace(memory, checks={"cpu": replace(memory.of("cpu"), commit="a")}),
                  ActiveInputs({"cpu": Needs()}, (), nodes, commit="b"), now).submit  # fmt: skip
    assert decide(memory, ActiveInputs({"cpu": Needs()}, (), nodes), now + 7 * 3600).submit


def test_a_cancelled_check_is_tried_again_later_and_proves_nothing() -> None:
    nodes = (ActiveNode(PlacedMachine("n00"), True, 0.0),)
    job = ActiveJob("1", "cpu", GroupTest(("n00",)), JobResult.CANCELLED)
    turn = decide(PlanMemory(), ActiveInputs({"cpu": Needs()}, (job,), nodes), 1e9)
    assert turn.submit == ()
    assert turn.memory.of("cpu").broken == 0
    assert decide(turn.memory, ActiveInputs({"cpu": Needs()}, (job,), nodes), 1e9 + 601).submit


def test_the_memory_is_read_back_and_a_damaged_one_is_empty(tmp_path: Path) -> None:
    slurm = Simulation(names(8), {"tcp": {"n05"}})
    file = tmp_path / "plan.json"
    for _ in range(60):
        slurm.turn()
        save_memory(file, slurm.memory)
        assert load_memory(file) == slurm.memory
    for text in ("", "[]", '{"checks": {"a": 1}, "taken": []}', '{"checks": {"a": {}}, "taken": []}', "[" * 100_000):
        file.write_text(text)
        assert load_memory(file) == PlanMemory()


def test_a_gone_machine_is_forgotten() -> None:
    state = CheckState({"gone": MachineResult(1.0, True)})
    assert "gone" not in decide(PlanMemory({"cpu": state}), ActiveInputs(CHECKS, (), ()), 1e9).memory.of("cpu").machines


# The service around the turns.

LINE = "NodeName=w-0 CPUAlloc=0 State={} Topology=default:/:row/:row/r1,blocks:b LastBusyTime=2026-11-26T20:00:00"


@pytest.mark.parametrize(
    ("state", "idle"),
    [
        ("IDLE+DYNAMIC_NORM", True), ("IDLE", True), ("IDLE+DRAIN+DYNAMIC_NORM", False), ("IDLE*", False),
        ("IDLE+PLANNED", False), ("IDLE+RESERVED", False), ("IDLE+MAINTENANCE", False), ("MIXED", False),
        ("IDLE+COMPLETING", False), ("IDLE+NOT_RESPONDING", False), ("DOWN", False), ("UNKNOWN", False),
    ],
)  # fmt: skip
def test_only_a_node_without_any_hold_is_idle(state: str, idle: bool) -> None:
    node = service.parse_node(parse(LINE.format(state)), 1e10)
    assert node.is_idle is idle
    assert node.machine == PlacedMachine("w-0", ("/", "row/", "row/r1"))


def test_a_comment_names_the_check_and_its_machines() -> None:
    submission = Submission("tcp", Needs(nodes=2), GroupTest(("a-1", "b.x"), ("c",)))
    line = f"7|F|80:0|2026-11-26T20:00:00|minivm: rate 41.5 MB/s|{service.format_comment(submission)}|"
    assert service.parse_jobs(line, 1e10) == (ActiveJob("7", "tcp", submission.test, JobResult.FAILED, rate=41.5),)


@pytest.mark.parametrize(
    ("state", "code", "result"),
    [
        ("CD", "0:0", JobResult.PASSED), ("F", "80:0", JobResult.FAILED), ("F", "1:0", JobResult.NONE),
        ("TO", "0:15", JobResult.NONE), ("PR", "0:15", JobResult.CANCELLED), ("CA", "0:15", JobResult.CANCELLED),
        ("NF", "0:0", JobResult.CANCELLED), ("R", "0:0", JobResult.IN_FLIGHT), ("CG", "0:0", JobResult.IN_FLIGHT),
    ],
)  # fmt: skip
def test_a_job_is_read_by_its_state_and_exit_code(state: str, code: str, result: JobResult) -> None:
    line = f"7|{state}|{code}|N/A||active-check cpu suspects=a partners=|"
    (job,) = service.parse_jobs(f"{line}\n8|CD|0:0|N/A||a person's|\nnonsense\n", 1e10)
    assert job.result is result


def test_a_name_that_the_shell_would_change_is_refused() -> None:
    for name in ("a;b", "$(x)", "-a", "", "a b"):
        with pytest.raises(ConfigError):
            service.build_job_command(Submission("cpu", Needs(), GroupTest((name,))))


def test_slurms_own_words_about_an_account_become_that_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "run", lambda *_, **__: "physics\n")
    error = client.SlurmError("submit a job", "sbatch failed")
    assert service.explain(error, "nope", "ctl:6817") == str(error)
    error.output = "sbatch: error: Invalid account or account/partition combination specified"
    assert "activeChecks.account" in service.explain(error, "nope", "ctl:6817")


@pytest.mark.parametrize("seed", range(10))
def test_nodes_under_a_blamed_switch_are_chosen_last_until_it_passes(seed: int) -> None:
    dice = random.Random(seed)
    own = {"n02": 7, "n09": 3}
    slurm = Simulation(names(16), {"tcp": set(names(4))}, weights=dict(own))
    slurm.settings = replace(SETTINGS, switch_weight=50)

    def go_on(turns: int) -> None:
        for _ in range(turns):
            killed = dice.random() < 0.3
            slurm.turn(dice.randint(0, 2) if killed else None, late=killed)
        slurm.turn()
        slurm.turn()

    go_on(300)
    assert slurm.weights == own | dict.fromkeys(names(4), 50)
    slurm.weights["n01"] = 9  # by an operator
    go_on(1)
    assert slurm.weights["n01"] == 50
    slurm.settings = replace(SETTINGS, switch_weight=60)
    go_on(1)
    assert slurm.weights == own | dict.fromkeys(names(4), 60)
    slurm.bad = {}
    for _ in range(6):
        slurm.now += 86400
        go_on(200)
    assert not list_blamed_leaves(slurm.memory)
    assert slurm.weights == {**own, "n00": 1, "n01": 9, "n03": 1}
    assert not slurm.memory.penalties


def test_weights_stay_as_they_are_without_the_setting_and_come_back_once_it_goes() -> None:
    slurm = Simulation(names(16), {"tcp": set(names(4))})
    for _ in range(300):
        slurm.turn()
    assert not slurm.weights
    slurm.settings = replace(SETTINGS, switch_weight=50)
    slurm.turn()
    assert slurm.weights == dict.fromkeys(names(4), 50)
    slurm.weights["n03"] = 8  # by an operator, who wants to keep it
    slurm.settings = SETTINGS
    slurm.turn()
    assert slurm.weights == {"n00": 1, "n01": 1, "n02": 1, "n03": 8}


def test_a_wrong_account_is_told_with_field_found_expected_and_what_to_do() -> None:
    assert str(service.explain_wrong_account("nope", "slurm", [])) == (
        "activeChecks.account: cannot submit active checks: found 'nope', expected an account that has the user slurm, "
        "which is in none (run `sacctmgr add user slurm account=nope`)"
    )
    assert "which is in a, b (set it to one of these, or run `sacctmgr add user slurm account=ACCOUNT`)" in str(
        service.explain_wrong_account("", "slurm", ["a", "b"])
    )


@pytest.mark.parametrize(
    "env",
    [
        {"MINIVM_ACTIVE_IDLE": "x"},
        {"MINIVM_ACTIVE_SHARE": "2"},
        {"MINIVM_ACTIVE_SHARE": "nan"},
        {"MINIVM_ACTIVE_SWITCH_WEIGHT": "-1"},
        {"MINIVM_ACTIVE_SWITCH_WEIGHT": "٣"},
    ],
)
def test_a_wrong_setting_is_named(env: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=next(iter(env))):
        service.settings(env)


SOON, LATER, BEFORE = "2026-11-26T20:04:00", "2026-11-26T21:00:00", "2026-11-26T18:00:00"


@pytest.mark.parametrize(
    ("line", "nodes"),
    [
        ("gpu|Resources|N/A|2026-11-26T19:59:00|", "gpu-0 both-0"),
        ("all|Priority|N/A|2026-11-26T19:59:00|", "cpu-0 both-0"),
        ("gpu,all|None|N/A|N/A|", "gpu-0 cpu-0 both-0"),
        (f"gpu|Resources|{SOON}|{BEFORE}|", "gpu-0 both-0"),
        (f"gpu|Resources|{LATER}|{BEFORE}|", ""),
        (f"gpu|Resources|{LATER}|2026-11-26T19:59:00|", "gpu-0 both-0"),
        (f"gpu|Resources|N/A|{BEFORE}|", ""),
        (f"gpu|Priority|2026-11-24T20:00:00|{BEFORE}|", ""),  # an estimate of two days ago
        (f"gpu|BeginTime|{SOON}|{SOON}|", "gpu-0 both-0"),
        (f"gpu|BeginTime|{LATER}|{LATER}|", ""),
        ("gpu|BeginTime|N/A|N/A|", ""),
        (f"gpu|Dependency|N/A|{BEFORE}|", ""),
        ("gpu|JobHeldUser|N/A|N/A|", ""),
        ("minivm-active|Resources|N/A|N/A|", ""),
        ("no-such|Resources|N/A|N/A|", ""),
        ("nonsense", ""),
        ("", ""),
    ],
)
def test_a_job_that_may_start_soon_holds_checks_back_on_the_nodes_of_its_partitions(line: str, nodes: str) -> None:
    shown = [
        parse(f"NodeName={name} CPUAlloc=0 State=IDLE Partitions={partitions},minivm-active")
        for name, partitions in (("gpu-0", "gpu"), ("cpu-0", "all"), ("both-0", "all,gpu"))
    ]
    now = datetime.fromisoformat("2026-11-26T20:00:00").timestamp()
    assert service.find_awaited([line], shown, now) == frozenset(nodes.split())


def measured(job: str, name: str, rate: float, *, passed: bool = True, peer: str = "") -> ActiveJob:
    test = GroupTest((name,), (peer,) if peer else ())
    return ActiveJob(job, "tcp" if peer else "cpu", test, JobResult.PASSED if passed else JobResult.FAILED, rate=rate)


def test_the_slowest_machines_are_shown_with_their_share_of_the_median(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rates = {f"w{number}": 1000.0 + number for number in range(200)} | {"w7": 400.0, "w9": 900.0}
    jobs = [measured(str(number), name, rate) for number, (name, rate) in enumerate(rates.items())]
    jobs.append(measured("900", "w3", 50.0, peer="w4"))
    nodes = tuple(ActiveNode(PlacedMachine(name, ("leaf",)), True, 0.0) for name in rates)
    now = time.time()
    turn = decide(PlanMemory(), ActiveInputs(CHECKS, tuple(jobs), nodes, settings=SETTINGS), now)
    # A later result without a rate keeps the last one; the partner of a group has measured none.
    turn = decide(turn.memory, ActiveInputs(CHECKS, (measured("901", "w7", 0.0),), nodes, settings=SETTINGS), now)
    assert turn.memory.of("tcp").machines["w4"].rate == 0.0
    save_memory(tmp_path / "plan.json", turn.memory)

    assert show.main(["cpu", "--slowest", "2"], tmp_path / "plan.json") == 0
    first, *rest = capsys.readouterr().out.splitlines()
    assert "200 machines tested, 0 failed" in first and "median 1100 MB/s" in first
    assert [line.split(",")[0].strip() for line in rest] == [
        "slowest: w7 400 MB/s", "slowest: w9 900 MB/s", "slowest: w0 1000 MB/s", "slowest: w1 1001 MB/s",
    ]  # fmt: skip
    assert "36 % of the median" in rest[0]

    assert show.main(["--json"], tmp_path / "plan.json") == 0
    cpu, tcp = json.loads(capsys.readouterr().out)
    assert (cpu["machines"], [item["machine"] for item in cpu["slowest"]]) == (200, ["w7", "w9", "w0"])
    assert [item["machine"] for item in tcp["slowest"]] == ["w3"]


def test_a_pod_without_results_says_where_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert show.main([], tmp_path / "plan.json") == 1
    assert "activeChecks.enabled" in capsys.readouterr().err
    save_memory(tmp_path / "plan.json", PlanMemory({"cpu": CheckState()}))
    assert show.main([], tmp_path / "plan.json") == 0
    assert capsys.readouterr().out == "cpu: no machine was tested yet\n"
    assert show.main(["cpo"], tmp_path / "plan.json") == 2
    assert "there are: cpu" in capsys.readouterr().err
