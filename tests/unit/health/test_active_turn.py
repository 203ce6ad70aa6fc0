"""The planner's turns against a simulated Slurm: nothing runs twice, whatever is killed; culprits are found."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from health.active import __main__ as service
from health.active.groups import GroupTest, PlacedMachine
from health.active.memory import CheckState, MachineResult, PlanMemory, load, save
from health.active.turn import (
    ActiveInputs,
    ActiveJob,
    ActiveNode,
    ActiveSettings,
    JobResult,
    Submission,
    decide,
    findings,
    is_at_fault,
)
from health.checks.needs import Needs
from init.errors import ConfigError
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
    users_wait: bool = False
    ran: list[Submission] = field(default_factory=list)
    count: int = 0

    def inputs(self) -> ActiveInputs:
        busy = {name for item, end, _ in self.jobs.values() if end > self.now for name in item.test.machines}
        nodes = tuple(
            ActiveNode(PlacedMachine(name, ("/", f"r{i // self.per_leaf}")), name not in busy, self.now - 100)
            for i, name in enumerate(self.names)
        )
        jobs = tuple(
            ActiveJob(id_, item.check, item.test, JobResult.IN_FLIGHT if end > self.now else result)
            for id_, (item, end, result) in self.jobs.items()
            if end + 300 > self.now
        )
        return ActiveInputs(CHECKS, jobs, nodes, self.users_wait, SETTINGS)

    def turn(self, killed_after: int | None = None) -> None:
        """Take a turn; with a number, the planner is killed after so many submissions, its memory unwritten."""
        inputs = self.inputs()
        turn = decide(self.memory, inputs, self.now)
        for submission in turn.submit[:killed_after]:
            running = {name for item, end, _ in self.jobs.values() if end > self.now for name in item.test.machines}
            assert not running.intersection(submission.test.machines), "a machine runs two checks"
            self.count += 1
            sick = self.bad.get(submission.check, set()).intersection(submission.test.machines)
            result = JobResult.FAILED if sick else JobResult.PASSED
            self.jobs[str(self.count)] = (submission, self.now + 2.5 * TICK, result)
            self.ran.append(submission)
        if killed_after is None:
            self.memory = turn.memory
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


def test_while_a_users_job_waits_no_check_starts() -> None:
    slurm = Simulation(names(8), users_wait=True)
    for _ in range(10):
        slurm.turn()
    assert not slurm.ran


def test_a_check_that_waits_is_cancelled() -> None:
    job = ActiveJob("7", "cpu", GroupTest(("n00",)), JobResult.IN_FLIGHT, waits_s=31)
    inputs = ActiveInputs(CHECKS, (job,), (), users_wait=False)
    assert decide(PlanMemory(), inputs, 1e9).cancel == ("7",)
    inputs = ActiveInputs(CHECKS, (job,), (), users_wait=True)
    assert decide(PlanMemory(), inputs, 1e9).cancel == ("7",)


def test_a_broken_check_rests() -> None:
    memory, nodes = PlanMemory(), (ActiveNode(PlacedMachine("n00"), True, 0.0),)
    now = 1e9
    for number in range(3):
        job = ActiveJob(str(number), "cpu", GroupTest(("n00",)), JobResult.NONE)
        memory = decide(memory, ActiveInputs({"cpu": Needs()}, (job,), nodes, False), now).memory
        now += 3600
    assert decide(memory, ActiveInputs({"cpu": Needs()}, (), nodes, False), now).submit == ()
    assert decide(memory, ActiveInputs({"cpu": Needs()}, (), nodes, False), now + 7 * 3600).submit


def test_a_cancelled_check_is_tried_again_later_and_proves_nothing() -> None:
    nodes = (ActiveNode(PlacedMachine("n00"), True, 0.0),)
    job = ActiveJob("1", "cpu", GroupTest(("n00",)), JobResult.CANCELLED)
    turn = decide(PlanMemory(), ActiveInputs({"cpu": Needs()}, (job,), nodes, False), 1e9)
    assert turn.submit == ()
    assert turn.memory.of("cpu").broken == 0
    assert decide(turn.memory, ActiveInputs({"cpu": Needs()}, (job,), nodes, False), 1e9 + 601).submit


def test_the_memory_is_read_back_and_a_damaged_one_is_empty(tmp_path: Path) -> None:
    slurm = Simulation(names(8), {"tcp": {"n05"}})
    file = tmp_path / "plan.json"
    for _ in range(60):
        slurm.turn()
        save(file, slurm.memory)
        assert load(file) == slurm.memory
    for text in ("", "[]", '{"checks": {"a": 1}, "taken": []}', '{"checks": {"a": {}}, "taken": []}', "[" * 100_000):
        file.write_text(text)
        assert load(file) == PlanMemory()


def test_a_gone_machine_is_forgotten() -> None:
    state = CheckState({"gone": MachineResult(1.0, True)})
    assert (
        "gone"
        not in decide(PlanMemory({"cpu": state}), ActiveInputs(CHECKS, (), (), False), 1e9).memory.of("cpu").machines
    )


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
    line = f"7|F|80:0|2026-11-26T20:00:00|{service.comment_of(submission)}|"
    assert service.parse_jobs(line, 1e10) == (ActiveJob("7", "tcp", submission.test, JobResult.FAILED),)


@pytest.mark.parametrize(
    ("state", "code", "result"),
    [
        ("CD", "0:0", JobResult.PASSED), ("F", "80:0", JobResult.FAILED), ("F", "1:0", JobResult.NONE),
        ("TO", "0:15", JobResult.NONE), ("PR", "0:15", JobResult.CANCELLED), ("CA", "0:15", JobResult.CANCELLED),
        ("NF", "0:0", JobResult.CANCELLED), ("R", "0:0", JobResult.IN_FLIGHT), ("CG", "0:0", JobResult.IN_FLIGHT),
    ],
)  # fmt: skip
def test_a_job_is_read_by_its_state_and_exit_code(state: str, code: str, result: JobResult) -> None:
    line = f"7|{state}|{code}|N/A|active-check cpu suspects=a partners=|"
    (job,) = service.parse_jobs(f"{line}\n8|CD|0:0|N/A|a person's|\nnonsense\n", 1e10)
    assert job.result is result


def test_a_name_that_the_shell_would_change_is_refused() -> None:
    for name in ("a;b", "$(x)", "-a", "", "a b"):
        with pytest.raises(ConfigError):
            service.job_command(Submission("cpu", Needs(), GroupTest((name,))))


@pytest.mark.parametrize(
    "env", [{"MINIVM_ACTIVE_IDLE": "x"}, {"MINIVM_ACTIVE_SHARE": "2"}, {"MINIVM_ACTIVE_SHARE": "nan"}]
)
def test_a_wrong_setting_is_named(env: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=next(iter(env))):
        service.settings(env)


def test_only_jobs_that_wait_for_nodes_hold_checks_back() -> None:
    assert service.users_wait(["all|Resources|"])
    assert not service.users_wait(["minivm-active|Resources|", "all|Dependency|", "all|JobHeldUser|", ""])
