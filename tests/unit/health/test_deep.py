"""Deep checks at the start of a pod: whether they are requested, that they run once per boot, and the stored result."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from health.broker.decide import BrokerNode, asks_for_deep
from health.broker.step import AskNode, BrokerInputs, Failed, Memory, Now, step
from health.checks import loop as begin
from health.places import Places, boot_id
from health.policy import BrokerPolicy
from health.rounds import SUMMARY_LIMIT, DeepState, DeepSummary, read_deep, summarise, write_deep
from health.verdict import Class, Result, Verdict

NOW = Now(1000.0, 50.0)


def verdict(check: str, result: Result = Result.OK, class_: Class = Class.MANUAL, **changes: Any) -> Verdict:
    return replace(Verdict(check, result, class_, "x", commit="9f2c0011"), **changes)


@pytest.mark.parametrize(
    ("drained", "reason", "busy", "wanted"),
    [
        (True, "minivm: fleet: goal+proof: reboot new kernel, a deep check is to pass", False, True),
        (True, "minivm: fleet: cordon+machine+proof: fan 3, reboot x, a deep check is to pass (again)", False, True),
        (True, "minivm: fleet: proof: a deep check is to pass [slurm@2026-11-23T09:00:00]", False, True),
        (True, "minivm: gpu_lost[reboot]@9f2c001 fell off the bus", False, True),
        (True, "minivm: disk_space[node]@9f2c001 full; gpu_ecc[rma]@9f2c001 x", False, True),
        (False, "minivm: fleet: goal+proof: reboot new kernel, a deep check is to pass", False, False),
        (True, "minivm: fleet: goal+proof: reboot new kernel, a deep check is to pass", True, False),
        (True, "minivm: fleet: goal: drain proof", False, False),
        (True, "minivm: fleet: cordon: minivm: fleet: goal+proof: x", False, False),
        (True, "minivm: fleet: goal+proofs: x", False, False),
        (True, "minivm: disk_space[node]@9f2c001 full", False, False),
        (True, "minivm: gpu_pcie[manual]@9f2c001 x8", False, False),
        (True, "look at fan 3", False, False),
        (True, "proof gpu_lost[reboot]@9f2c001 x", False, False),
        (True, "", False, False),
        (False, "", False, False),
    ],
)
def test_by_its_nodes_drain_a_pod_knows(drained: bool, reason: str, busy: bool, wanted: bool) -> None:
    assert asks_for_deep(BrokerNode(drained, reason, busy)) is wanted


def test_what_the_pod_found_first_counts_and_not_what_it_has_posted_itself() -> None:
    asks = BrokerInputs("w", BrokerPolicy(), "boot")
    memory, actions = step(Memory(), asks, NOW)
    assert (memory.node_at_start, actions) == (None, (AskNode(),))
    later, _ = step(memory, BrokerInputs("w", BrokerPolicy(), "boot", node=Failed("no answer")), NOW)
    assert later.node_at_start is None, "nobody could say"
    found, _ = step(memory, BrokerInputs("w", BrokerPolicy(), "boot", node=BrokerNode(False, "")), NOW)
    assert found.node_at_start == BrokerNode(False, "")
    sick = Verdict("gpu_lost", Result.PROBLEM, Class.REBOOT, "x", boot_id="boot", at=1000.0, expires=2000.0)
    ours = BrokerNode(True, "minivm: gpu_lost[reboot]@none x")
    after, _ = step(found, BrokerInputs("w", BrokerPolicy(guard_spread_s=0.0), "boot", (sick,), node=ours), NOW)
    assert after.drained and after.node_at_start == BrokerNode(False, "")


A_BAD = verdict("a", Result.PROBLEM, reason="memory: fail")
B_BAD = verdict("b", Result.PROBLEM, Class.RMA, reason="memory: fail")


@pytest.mark.parametrize(
    ("verdicts", "broken", "state", "ran", "said"),
    [
        ([], [], DeepState.OK, 0, ""),
        ([verdict("a", applies=False, result=Result.UNKNOWN)], [], DeepState.OK, 0, ""),
        ([verdict("a"), verdict("b")], [], DeepState.OK, 1, "a b"),
        ([verdict("a"), verdict("b", Result.UNKNOWN, reason="no dcgmi")], [], DeepState.UNKNOWN, 1, "b: no dcgmi"),
        ([verdict("a")], ["c"], DeepState.UNKNOWN, 1, "c: the check is broken"),
        ([A_BAD], ["c"], DeepState.PROBLEM, 1, "a[manual]@9f2c001 memory: fail"),
        (
            [A_BAD, B_BAD, verdict("c", Result.UNKNOWN)],
            [], DeepState.PROBLEM, 2, "b[rma]@9f2c001 memory: fail; a[manual]@9f2c001 memory: fail",
        ),
        ([verdict("a", Result.PROBLEM, reason="x\n\x1b[2J" + "y" * 999)], [], DeepState.PROBLEM, 1, ""),
    ],
)  # fmt: skip
def test_the_word_of_a_round(verdicts: list[Verdict], broken: list[str], state: DeepState, ran: int, said: str) -> None:
    found = summarise(verdicts, broken, "boot", {"a", "c"})
    assert (found.boot_id, found.state, found.ran) == ("boot", state, ran)
    assert found.said.startswith(said)
    assert found.said.isprintable()
    assert len(found.said) <= SUMMARY_LIMIT


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MINIVM_HEALTH_STATE", str(tmp_path / "state"))
    monkeypatch.delenv("MINIVM_HEALTH_DEEP", raising=False)
    return Places.from_environment().deep


class Rounds:
    """Fake deep check round, which counts its runs and stores the given state."""

    def __init__(self, path: Path, state: DeepState | None = DeepState.OK, why: str = "") -> None:
        self.path, self.state, self.why, self.times = path, state, why, 0

    def __call__(self) -> str:
        self.times += 1
        assert (known := read_deep(self.path)) is not None and known.state is DeepState.RUNNING
        if self.state is not None:
            write_deep(self.path, DeepSummary(boot_id(), self.state, 1, "x"))
        return self.why


def test_asked_for_it_runs_once_in_a_boot(path: Path) -> None:
    runs = Rounds(path)
    assert not begin.run_deep_once(runs, lambda: None), "the controller is away"
    assert runs.times == 0 and not path.exists()
    assert begin.run_deep_once(runs, lambda: True)
    assert begin.run_deep_once(runs, lambda: True)
    assert runs.times == 1
    assert read_deep(path) == DeepSummary(boot_id(), DeepState.OK, 1, "x")


def test_not_asked_for_it_is_not_asked_again(path: Path) -> None:
    runs = Rounds(path)
    assert begin.run_deep_once(runs, lambda: False)
    assert begin.run_deep_once(runs, lambda: True), "what the pod did not find it finds no more: jobs may run by now"
    assert runs.times == 0
    assert read_deep(path) == DeepSummary(boot_id(), DeepState.NOT_ASKED)
    assert path.parent.parent.stat().st_mode & 0o777 == 0o700, "what lies beside it is root's alone"


def test_one_that_was_cut_begins_anew_and_one_of_another_boot_says_nothing(path: Path) -> None:
    runs = Rounds(path)
    write_deep(path, DeepSummary(boot_id(), DeepState.RUNNING))
    assert not begin.run_deep_once(runs, lambda: None), "the broker does not know yet whether it still may"
    assert runs.times == 0
    assert begin.run_deep_once(runs, lambda: True)
    assert runs.times == 1
    write_deep(path, DeepSummary("another", DeepState.OK, 1, "x"))
    assert not begin.run_deep_once(runs, lambda: None)
    assert begin.run_deep_once(runs, lambda: True)
    assert runs.times == 2


def test_one_that_was_cut_does_not_begin_anew_where_jobs_may_run(path: Path) -> None:
    """An interrupted deep check does not restart once jobs may run.

    A person has resumed the node while its health service was stopped.
    """
    runs = Rounds(path)
    write_deep(path, DeepSummary(boot_id(), DeepState.RUNNING))
    assert begin.run_deep_once(runs, lambda: False)
    assert runs.times == 0
    assert read_deep(path) == DeepSummary(
        boot_id(), DeepState.UNKNOWN, 0, "the deep checks were interrupted, and jobs may run by now"
    )


@pytest.mark.parametrize(
    ("why", "said"), [("it did not end within 900 s", "it did not end within 900 s"), ("", "the round left no result")]
)
def test_one_that_could_not_run_does_not_know(path: Path, why: str, said: str) -> None:
    assert begin.run_deep_once(Rounds(path, None, why), lambda: True)
    assert read_deep(path) == DeepSummary(boot_id(), DeepState.UNKNOWN, 0, said)
    assert begin.run_deep_once(Rounds(path), lambda: True), "and is not begun again and again"


@pytest.mark.parametrize("text", ["", "[]", "{", '{"boot_id": 1}', '{"boot_id":"b","state":"fine","ran":1,"said":""}',
                                  '{"boot_id":"b","state":"ok","ran":1e999,"said":""}'])  # fmt: skip
def test_a_damaged_word_is_none(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True)
    path.write_text(text)
    assert read_deep(path) is None


def test_the_pods_own_environment_asks_too(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINIVM_BROKER", str(path.parent / "none"))
    assert begin.are_deep_checks_wanted() is None
    monkeypatch.setenv("MINIVM_HEALTH_DEEP", "1")
    assert begin.are_deep_checks_wanted() is True
