"""The broker with a fake controller that is a table: what it asks and posts, and what it leaves alone."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest

from health import black_box
from health.broker.decide import BrokerNode, OtherNode, names
from health.ledger import Ledger
from health.rounds import DeepState, DeepSummary, write_deep
from tests.support.broker import BOOT, QUICK, Desk
from tests.waiting import until


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    made = Desk(tmp_path)
    made.say("ok")
    assert made.calls() == ["node"], "one look at its own node at the start"
    return made


def test_a_problem_drains_once_and_the_all_clear_brings_the_node_back(desk: Desk) -> None:
    desk.say("problem")
    assert desk.slurm.state == BrokerNode(True, "minivm: gpu_ecc[reboot]@9f2c1ab gpu_ecc says so")
    assert desk.calls() == ["node", "others", "node", "drain"]
    desk.say("problem")
    desk.say("problem")
    assert desk.calls() == [], "nothing changed, nobody is asked"
    desk.say("ok")
    assert desk.slurm.state == BrokerNode(False, "")
    assert desk.calls() == ["node", "undrain"]


def test_a_healthy_node_costs_the_controller_nothing(desk: Desk) -> None:
    for _ in range(50):
        desk.say("ok")
        desk.say("problem", "load", "user")
    assert desk.calls() == []


def test_a_person_s_drain_is_neither_overwritten_nor_cleared(desk: Desk) -> None:
    desk.slurm.state = BrokerNode(True, "Ann: fan")
    desk.say("problem")
    desk.say("ok")
    assert desk.slurm.state == BrokerNode(True, "Ann: fan")
    assert not {"drain", "undrain"} & set(desk.calls())


@pytest.mark.parametrize("own", ["", "minivm: gpu_ecc[node]@9f2c1ab an earlier pod's words"])
def test_a_person_s_drain_that_comes_while_the_other_nodes_are_asked_stays(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, own: str
) -> None:
    """sinfo takes a while on a large cluster. With the broker's reason its checks would lift the person's drain."""
    ask = desk.slurm.other_nodes

    def ask_slowly() -> tuple[list[OtherNode], int]:
        desk.slurm.state = BrokerNode(True, "Ann: fan")
        return ask()

    monkeypatch.setattr(desk.slurm, "other_nodes", ask_slowly)
    desk.slurm.state = BrokerNode(bool(own), own)
    desk.say("problem")
    assert "others" in desk.calls()
    desk.say("ok")
    assert desk.slurm.state == BrokerNode(True, "Ann: fan")
    assert not {"drain", "undrain"} & set(desk.calls())


def test_a_person_who_takes_over_our_drain_owns_it(desk: Desk) -> None:
    desk.say("problem")
    desk.slurm.state = BrokerNode(True, "Ann: waiting for the part")
    desk.say("ok")
    assert desk.slurm.state == BrokerNode(True, "Ann: waiting for the part")


@pytest.mark.parametrize(
    ("when", "after"), [(("deep",), 1), (("boot", "deep"), 1), (("boot",), 1), ((), 1), (("boot", "background"), 2)]
)
def test_what_no_round_repeats_ends_an_earlier_pods_drain_by_passing_once(
    tmp_path: Path, when: tuple[str, ...], after: int
) -> None:
    """One passed run ends the earlier pod's drain for checks that no later round repeats.

    Example: the all-reduce hung, the machine was rebooted, and it passes; it does not run a second time.
    """
    desk = Desk(tmp_path, replace(QUICK, clear_after=2))
    desk.slurm.state = BrokerNode(True, "minivm: nccl_allreduce[reboot]@9f2c1ab it does not end")
    desk.index("nccl_allreduce", when=when)
    for _ in range(after):
        assert desk.slurm.state.drained
        desk.say("ok", "nccl_allreduce")
    assert not desk.slurm.state.drained


def test_while_deep_checks_run_an_earlier_pods_drain_stays_whatever_passes(tmp_path: Path) -> None:
    """While deep checks run, an earlier pod's drain stays.

    The drain's own check passes within a minute, but deep checks take many minutes, and jobs would start on the loaded
    machine.
    """
    desk = Desk(tmp_path)
    desk.slurm.state = BrokerNode(True, "minivm: gpu_bus[reboot]@9f2c1ab fell off")
    write_deep(desk.places.deep, DeepSummary(BOOT, DeepState.RUNNING))
    desk.say("ok", "gpu_bus")
    desk.say("ok", "gpu_bus")
    assert desk.slurm.state.drained
    assert desk.calls() == ["node"], "and nobody is asked at each look"
    write_deep(desk.places.deep, DeepSummary(BOOT, DeepState.OK))
    desk.broker.memory = replace(desk.broker.memory, due=time.monotonic())
    desk.broker.look()
    assert not desk.slurm.state.drained


REBOOTED = BrokerNode(True, "minivm: fleet: goal+proof: reboot new kernel, a deep check is to pass")


@pytest.mark.parametrize(
    ("found", "now", "wanted"),
    [
        (REBOOTED, REBOOTED, True),
        (REBOOTED, BrokerNode(False, ""), False),
        (REBOOTED, replace(REBOOTED, busy=True), False),
        (REBOOTED, BrokerNode(True, "Ann: fan"), False),
        (BrokerNode(False, ""), REBOOTED, False),
        (REBOOTED, None, None),
    ],
)
def test_a_deep_check_begins_where_the_pod_found_it_asked_for_and_nothing_has_changed_since(
    tmp_path: Path, found: BrokerNode, now: BrokerNode | None, wanted: bool | None
) -> None:
    """A deep check begins only if the drain that the pod found at its start is unchanged.

    If a person resumes the node meanwhile, it may have jobs.
    """
    desk = Desk(tmp_path)
    assert desk.broker.answer({"ask": "deep"}) == {"deep": None}, "nobody has looked yet"
    desk.slurm.state = found
    desk.broker.look()
    desk.slurm.state, desk.slurm.down = now or found, now is None
    assert desk.broker.answer({"ask": "deep"}) == {"deep": wanted}


def test_a_person_who_resumes_the_node_is_believed(desk: Desk) -> None:
    desk.say("problem")
    desk.slurm.state = BrokerNode(False, "")
    answer = desk.broker.answer({"ask": "gate", "checks": ["gpu_ecc"]})
    assert answer["drained"] is False, "a job starts: the node was resumed"
    desk.say("problem")
    assert desk.slurm.state == BrokerNode(False, "")


def test_a_second_problem_is_added_and_a_finished_one_removed(desk: Desk) -> None:
    desk.say("problem")
    desk.say("problem", "xid", "rma")
    assert desk.slurm.state.reason.startswith("minivm: xid[rma]@9f2c1ab")
    assert "gpu_ecc[reboot]@9f2c1ab" in desk.slurm.state.reason
    desk.say("ok")
    assert "gpu_ecc" not in desk.slurm.state.reason
    assert desk.slurm.state.drained


def test_many_nodes_with_the_same_check_on_the_same_commit_stop_the_drain(desk: Desk) -> None:
    desk.slurm.fleet = ["minivm: gpu_ecc[reboot]@9f2c1ab gpu_ecc says so"] * 3 + [""] * 6
    desk.say("problem")
    assert not desk.slurm.state.drained
    answer = desk.broker.answer({"ask": "gate", "checks": ["gpu_ecc"]})
    assert answer["drained"] is False
    assert "too many nodes" in str(answer["decisions"])


def test_a_drain_is_taken_back_when_the_fleet_says_the_same_a_moment_later(tmp_path: Path) -> None:
    desk = Desk(tmp_path, replace(QUICK, guard_recheck_s=0.01))
    desk.say("ok")
    desk.say("problem")
    assert desk.slurm.state.drained
    desk.slurm.fleet = ["minivm: gpu_ecc[reboot]@9f2c1ab gpu_ecc says so"] * 9

    def taken_back() -> bool:
        desk.broker.look()
        return not desk.slurm.state.drained

    until(taken_back, "the drain is taken back")
    desk.say("problem")
    assert not desk.slurm.state.drained


def test_nodes_wait_each_their_own_part_of_the_spread(tmp_path: Path) -> None:
    desk = Desk(tmp_path, replace(QUICK, guard_spread_s=3600.0))
    desk.say("ok")
    desk.say("problem")
    assert not desk.slurm.state.drained
    assert 0 < desk.broker.memory.due - time.monotonic() < 3600
    assert desk.broker.answer({"ask": "gate", "checks": ["gpu_ecc"]})["decisions"] == {"gpu_ecc": "about to drain"}


def test_a_clock_that_is_set_back_holds_no_drain_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk(tmp_path, replace(QUICK, guard_spread_s=0.2))
    desk.say("ok")

    def settled() -> bool:
        desk.broker.look()
        return not desk.broker.memory.due

    until(settled, "the first look at the node is over")
    desk.say("problem")
    assert desk.broker.memory.due
    wall = time.time
    monkeypatch.setattr(time, "time", lambda: wall() - 3600)

    def drained() -> bool:
        desk.broker.look()
        return desk.slurm.state.drained

    until(drained, "the node is drained")


def test_too_many_changes_wait(tmp_path: Path) -> None:
    desk = Desk(tmp_path, replace(QUICK, rate_actions=2, rate_per_s=3600))
    desk.say("ok")
    desk.say("problem")
    desk.say("ok")
    desk.say("problem")
    assert not desk.slurm.state.drained
    assert "too many changes" in desk.broker.memory.status_text


def test_a_controller_that_is_down_is_asked_again_later_and_not_at_once(desk: Desk) -> None:
    desk.slurm.down = True
    desk.say("problem")
    desk.broker.look()
    desk.broker.look()
    assert desk.calls() == ["node"]
    desk.slurm.down = False
    desk.broker.memory = replace(desk.broker.memory, due=time.monotonic())
    desk.broker.look()
    assert desk.slurm.state.drained


def test_an_earlier_pod_s_drain_ends_only_after_this_pod_s_checks_have_passed(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    desk.slurm.state = BrokerNode(True, "minivm: gpu_ecc[reboot]@9f2c1ab old")
    desk.say("ok", "disk_space", "node")
    assert desk.slurm.state.drained, "its own check has said nothing yet"
    desk.say("ok")
    assert not desk.slurm.state.drained


def test_what_grows_graver_is_posted_so_and_outlives_the_pod(desk: Desk, tmp_path: Path) -> None:
    desk.say("problem", "xid", "reboot")
    desk.say("problem", "xid", "rma")
    assert desk.slurm.state.reason == "minivm: xid[rma]@9f2c1ab xid says so"
    after = Desk(tmp_path)
    after.slurm.state = BrokerNode(True, "minivm: xid[rma]@0123456 failed for good")
    after.say("problem", "xid", "reboot")
    assert names(after.slurm.state.reason) == {"xid@9f2c1ab"}
    after.say("ok", "xid", "reboot")
    after.say("ok", "xid", "reboot")
    assert after.slurm.state.drained, "a lighter problem that has passed does not mend the part"


def test_repeats_of_a_gpu_make_it_an_offender_that_only_a_person_brings_back(desk: Desk) -> None:
    (desk.places.state / "memory").mkdir(parents=True)
    gpu = {"uuid": "GPU-aa", "serial": "165", "bus": "00000000:3B:00.0", "model": "NVIDIA H100 80GB HBM3"}
    facts = {"boot_id": BOOT, "state": {"gpus": [gpu]}}
    (desk.places.state / "memory/gpu_count.json").write_text(json.dumps(facts))
    for _ in range(2):
        desk.say("problem", "xid", "reboot", "0000:3b:00")
        desk.say("ok", "xid", "reboot", "0000:3b:00")
        assert not desk.slurm.state.drained
    desk.say("problem", "xid", "reboot", "0000:3b:00")
    assert "incident 3 of GPU-aa" in desk.slurm.state.reason
    desk.say("ok", "xid", "reboot", "0000:3b:00")
    assert desk.slurm.state.drained
    book = json.loads((desk.places.ledger / "GPU-aa.json").read_text())
    assert book["offender"] is True
    assert (book["serial"], len(book["events"])) == ("165", 3)


def enter(directory: Path, uuid: str, event: dict[str, object]) -> int:
    return Ledger(directory).enter(uuid, event, since=0.0, most=3)


def test_the_ledger_survives_pods_is_bounded_and_forgives(tmp_path: Path) -> None:
    for number in range(150):
        enter(tmp_path, "GPU-1", {"at": float(number), "check": "xid"})
    book = json.loads((tmp_path / "GPU-1.json").read_text())
    assert len(book["events"]) == 100
    assert Ledger(tmp_path).incidents("GPU-1", 140.0) == 9
    (tmp_path / "GPU-1.json").write_text(json.dumps({**book, "forgiven_at": 147.0}))
    assert Ledger(tmp_path).incidents("GPU-1", 140.0) == 2


def test_the_same_incident_seen_by_a_new_broker_counts_once(tmp_path: Path) -> None:
    for evidence in ("/capsules/1", "/capsules/1", "", "", "/capsules/2"):
        enter(tmp_path, "GPU-1", {"at": 5.0, "check": "xid", "evidence": evidence})
    assert Ledger(tmp_path).incidents("GPU-1", 0.0) == 4


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "[" * 100_000,
        '{"events": 5}',
        '{"events": [5, {"at": "noon"}, {"check": "xid"}]}',
        '{"events": [], "forgiven_at": "today"}',
    ],
)
def test_a_damaged_ledger_stops_no_broker(desk: Desk, text: str) -> None:
    desk.places.ledger.mkdir()
    (desk.places.ledger / "GPU-1.json").write_text(text)
    desk.say("problem", subject="GPU-1")
    assert desk.slurm.state.drained
    assert Ledger(desk.places.ledger).incidents("GPU-1", 0.0) == 1


def test_a_subject_cannot_name_a_file_elsewhere(tmp_path: Path) -> None:
    enter(tmp_path / "ledger", "GPU-../../x", {"at": 1.0})
    assert [path.name for path in tmp_path.rglob("*.json")] == ["GPU-______x.json"]


def test_a_damaged_verdict_is_no_verdict(desk: Desk) -> None:
    for name, text in (
        ("a", "{"),
        ("b", "[]"),
        ("c", '{"check": "c"}'),
        ("d", '{"check": 1, "at": "x"}'),
        ("e", "[" * 100_000),
    ):
        (desk.places.verdicts / f"{name}.json").write_text(text)
    desk.broker.look()
    assert desk.calls() == []


def test_an_unknown_question_is_answered_as_such(desk: Desk) -> None:
    for ask in ("drain", ["gate"], None):
        assert "unknown request" in str(desk.broker.answer({"ask": ask})["error"])


def test_an_operator_s_policy_wins_over_the_tree_s_and_a_bad_one_is_told_and_left_aside(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "current/lib").mkdir(parents=True)
    (tmp_path / "current/lib/policy.json").write_text('{"broker": {"clear_after": 7}}')
    desk = Desk(tmp_path)
    desk.broker.reload_policy()
    assert desk.broker.policy.clear_after == 7
    desk.places.policy.write_text('{"broker": {"clear_after": 3}}')
    desk.broker.reload_policy()
    assert desk.broker.policy.clear_after == 3 and not capsys.readouterr().err
    desk.places.policy.write_text('{"broker": {"clear_aftr": 3}}')
    desk.broker.reload_policy()
    said = capsys.readouterr().err
    assert desk.broker.policy.clear_after == 7 and "clear_after" in said and str(desk.places.policy) in said


def test_the_drain_of_a_check_ends_with_the_check(desk: Desk) -> None:
    desk.index("gpu_ecc", "bad")
    desk.say("problem", "bad", "manual")
    assert desk.slurm.state.drained
    desk.index("gpu_ecc")
    desk.broker.look()
    assert desk.slurm.state.drained, "while its verdict is there it is believed"
    desk.remove("bad")
    assert desk.slurm.state == BrokerNode(False, "")


def test_a_dead_reason_does_not_come_back_with_the_next_drain(desk: Desk) -> None:
    desk.index("gpu_ecc", "bad")
    desk.say("problem", "bad", "rma")
    desk.index("gpu_ecc")
    desk.remove("bad")
    desk.say("problem")
    assert desk.slurm.state.reason == "minivm: gpu_ecc[reboot]@9f2c1ab gpu_ecc says so"


def test_a_dead_reason_leaves_a_drain_that_stands_for_another(desk: Desk) -> None:
    desk.index("gpu_ecc", "bad")
    desk.say("problem", "bad", "rma")
    desk.say("problem")
    desk.index("gpu_ecc")
    desk.remove("bad")
    assert desk.slurm.state.reason == "minivm: gpu_ecc[reboot]@9f2c1ab gpu_ecc says so"


@pytest.mark.parametrize("check", ["bad", "prolog.10-bad"])
def test_an_earlier_pod_s_drain_for_what_is_no_more_ends_by_itself(tmp_path: Path, check: str) -> None:
    desk = Desk(tmp_path)
    desk.slurm.state = BrokerNode(True, f"minivm: {check}[rma]@9f2c1ab old; gpu_ecc[reboot]@9f2c1ab old")
    desk.say("ok", "disk_space", "node")
    desk.index("gpu_ecc")
    desk.say("ok", "disk_space", "node")
    assert desk.slurm.state.reason == "minivm: gpu_ecc[reboot]@9f2c1ab old", "what lives on must pass first"
    desk.say("ok")
    assert not desk.slurm.state.drained


def test_without_an_index_no_check_is_known_to_be_gone(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    desk.slurm.state = BrokerNode(True, "minivm: bad[manual]@9f2c1ab old")
    desk.say("ok", "disk_space", "node")
    assert desk.slurm.state.drained
    desk.index("disk_space")
    data = json.loads((desk.places.state / "index.json").read_text())
    (desk.places.state / "index.json").write_text(json.dumps({**data, "boot_id": "another"}))
    desk.say("ok", "disk_space", "node")
    assert desk.slurm.state.drained, "another boot's says nothing of this one"


def test_a_person_may_have_a_check_forgotten_and_it_counts_again_when_it_speaks_again(desk: Desk) -> None:
    desk.say("problem", class_="rma")
    desk.say("ok")
    assert desk.slurm.state.drained, "rma ends by a person alone"
    assert desk.broker.answer({"ask": "forget", "checks": ["gpu_ecc"]})["drained"] is False
    assert desk.slurm.state == BrokerNode(False, "")
    desk.say("problem", class_="rma")
    assert desk.slurm.state.drained


def test_what_a_person_has_forgotten_is_no_part_of_an_earlier_pod_s_drain(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    desk.slurm.state = BrokerNode(True, "minivm: xid[rma]@9f2c1ab old; gpu_ecc[reboot]@9f2c1ab old")
    desk.say("ok", "disk_space", "node")
    desk.broker.answer({"ask": "forget", "checks": ["xid"]})
    assert desk.slurm.state.reason == "minivm: gpu_ecc[reboot]@9f2c1ab old"


def test_forgetting_touches_no_drain_of_a_person_s(desk: Desk) -> None:
    desk.say("problem")
    desk.slurm.state = BrokerNode(True, "Ann: fan")
    desk.broker.answer({"ask": "forget", "checks": ["gpu_ecc"]})
    assert desk.slurm.state == BrokerNode(True, "Ann: fan")


def test_hardware_that_breaks_node_by_node_is_drained_however_often_it_did(desk: Desk) -> None:
    desk.slurm.fleet = ["minivm: gpu_ecc[reboot]@9f2c1ab gpu_ecc says so"] * 9
    desk.slurm.since = time.time() - 86400
    desk.say("problem")
    assert desk.slurm.state.drained, "it has passed here with this commit, and theirs are old"


def test_problems_and_drains_reach_the_black_boxes_of_the_jobs_that_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINIVM_LOG", str(tmp_path / "log"))
    desk = Desk(tmp_path)
    desk.say("ok")
    black_box.begin({"SLURM_JOB_ID": "12", "SLURM_JOB_UID": "1001"}, time.time())
    desk.say("problem")
    desk.say("problem")
    desk.say("ok")
    texts = [entry.get("text") for entry in black_box.parse_lines(black_box.find(12, 1001))]
    assert texts[1:] == [
        "gpu_ecc: gpu_ecc says so",
        "drained by the broker: minivm: gpu_ecc[reboot]@9f2c1ab gpu_ecc says so",
        "no longer: gpu_ecc",
        "no longer: drained by the broker",
    ]
