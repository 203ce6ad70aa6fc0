"""A planned hand-over: which standby may take over, what a request and a report are worth, who may follow a term."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from init.helpers.lease import Keeper, LeaseKeeper, Takeover
from init.lean import replace
from init.pod.pod import Pod
from init.slurm.place import HELD
from init.state import hand_over, lease
from init.state.hand_over import HandOver, HandOverError, Standby
from init.state.lease import LASTS_S, Contest, Term, Terms
from init.view import metrics
from init.view.status import Snapshot
from tests.waiting import until

FIT = Standby("c-1", b"2", ready=True, why="", protocol=9)
BEFORE = {"c-1": replace(FIT, text=b"1")}


@pytest.mark.parametrize(
    ("wanted", "before", "now", "chosen", "why"),
    [
        ("", BEFORE, {"c-1": FIT}, "c-1", ""),
        ("c-1", BEFORE, {"c-1": FIT}, "c-1", ""),
        ("c-2", BEFORE, {"c-1": FIT}, "", "c-2 has never stood by"),
        ("", {}, {}, "", "no pod stands by"),
        ("", {}, {"c-1": FIT}, "", "c-1 does not report"),
        ("", {"c-1": FIT}, {"c-1": FIT}, "", "c-1 does not report"),
        ("", BEFORE, {"c-1": replace(FIT, ready=False, why="munged: failed")}, "", "c-1 is not ready: munged: failed"),
        ("", BEFORE, {"c-1": replace(FIT, protocol=8)}, "", "older Slurm"),
        ("", {"c-0": FIT}, {"c-0": replace(FIT, pod="c-0")}, "", "no pod stands by"),  # its own report
        ("", BEFORE, {"c-1": FIT, "c-2": replace(FIT, pod="c-2")}, "c-1", ""),
        ("c-0", {}, {"c-0": replace(FIT, pod="c-0")}, "", "c-0 acts already"),
    ],
)
def test_only_a_healthy_standby_is_chosen(
    wanted: str, before: dict[str, Standby], now: dict[str, Standby], chosen: str, why: str
) -> None:
    heir, text = hand_over.choose("c-0", wanted, 9, before, now)
    assert heir == chosen and why in text and bool(text) is not bool(chosen)


def test_a_report_is_read_as_it_was_written_and_has_one_length(tmp_path: Path) -> None:
    directory = tmp_path / "lease"
    hand_over.publish(directory, replace(FIT, ready=False, why='a "quoted"\x1b[31m reason ' + "é" * 5000), 1)
    size = (directory / "standby-c-1").stat().st_size
    first = hand_over.read_all(directory)["c-1"]
    assert not first.ready and first.why.startswith('a "quoted"?[31m reason ?') and len(first.why) == 200
    hand_over.publish(directory, FIT, 10**9)
    second = hand_over.read_all(directory)["c-1"]
    assert (directory / "standby-c-1").stat().st_size == size and second.ready and second.text != first.text


def test_hostile_reports_are_of_pods_that_are_not_ready(tmp_path: Path) -> None:
    for text in (b"", b"[" * 4096, b'{"ready": 1, "why": "", "protocol": 9}', b"\xff", b'{"ready": true}'):
        (tmp_path / "standby-c-1").write_bytes(text)
        assert not hand_over.read_all(tmp_path)["c-1"].ready
    (tmp_path / "standby-c-1").unlink()
    (tmp_path / "standby-c-1").symlink_to("/dev/zero")
    os.mkfifo(tmp_path / "standby-c-2")
    assert [item.ready for item in hand_over.read_all(tmp_path).values()] == [False, False]
    with pytest.raises(OSError, match="symbolic"):
        hand_over.publish(tmp_path, FIT, 1)
    for number in range(100):
        (tmp_path / f"standby-x{number}").touch()
    (tmp_path / "standby-A").touch()
    assert len(hand_over.read_all(tmp_path)) == hand_over.MOST


@pytest.mark.parametrize(
    ("text", "heir"),
    [
        ('{"heir": "c-1", "term": 4, "until": 110}', "c-1"),
        ('{"heir": "c-1", "term": 4, "until": 100}', ""),  # void
        ('{"heir": "c-1", "term": 4, "until": 1e9}', ""),
        ('{"heir": "c-1", "term": 4, "until": NaN}', ""),
        ('{"heir": ["c-1"], "term": 4, "until": 110}', ""),
        ('{"heir": "c-1", "term": 3, "until": 110}', ""),  # of a former term
        ('{"heir": "c-1", "until": 110}', ""),
        ("[]", ""),
        ("", ""),
    ],
)
def test_a_request_is_void_soon(tmp_path: Path, text: str, heir: str) -> None:
    file = tmp_path / "hand-over.json"
    assert hand_over.read_requested_heir(file, 4, 100.0) == ""
    file.write_text(text)
    assert hand_over.read_requested_heir(file, 4, 100.0) == heir


def test_a_link_is_no_request(tmp_path: Path) -> None:
    (tmp_path / "real").write_text('{"heir": "c-1", "term": 4, "until": 110}')
    (tmp_path / "hand-over.json").symlink_to(tmp_path / "real")
    assert hand_over.read_requested_heir(tmp_path / "hand-over.json", 4, 100.0) == ""


@pytest.mark.parametrize(
    ("term", "holder", "at", "next_term"),
    [
        (Term(4, released=True, heir="c-1"), "c-1", 0.1, 5),
        (Term(4, released=True, heir="c-1"), "c-0", 0.1, 0),  # the former holder, which starts anew
        (Term(4, life="me", heir="c-1"), "c-0", 0.1, 0),  # the same after a crash in the middle
        (Term(4, heir="c-1"), "c-1", 0.1, 0),  # announced, not released
        (Term(4, heir="c-1"), "c-1", LASTS_S, 5),
        (Term(4, released=True, heir="c-1"), "c-0", LASTS_S, 5),  # the heir did not come
    ],
)
def test_a_released_term_is_its_heir_s_for_a_while(term: Term, holder: str, at: float, next_term: int) -> None:
    contest = Contest(term, since=0.0, looked=at)
    assert lease.choose_term(contest, "me", at, first=True, holder=holder) == next_term


def test_the_heir_looks_more_often_and_knows_how_its_term_began(tmp_path: Path) -> None:
    store = Terms(tmp_path)
    assert store.claim(1, "c-0", "one")
    heir = Keeper(store, "c-1", "two")
    slow = heir.turn()
    store.renew(1, "c-0", "one", 1, heir="c-1")
    assert heir.turn() < slow
    store.renew(1, "c-0", "one", 2, released=True, heir="c-1")
    heir.turn()
    assert heir.contest.mine == 2 and heir.takeover is not None
    assert heir.takeover.former == "c-0" and heir.takeover.planned


def test_a_request_is_announced_and_taken_back(tmp_path: Path) -> None:
    keeper = Keeper(Terms(tmp_path), "c-0", "one")
    service = LeaseKeeper(keeper, tmp_path / "held", None, tmp_path / "hand-over.json")
    keeper.start()
    try:
        until(lambda: keeper.contest.mine == 1, "it has a term")
        (tmp_path / "hand-over.json").write_text(json.dumps({"heir": "c-1", "term": 1, "until": lease.now() + 20}))
        service.tick()
        until(lambda: heir_of(tmp_path) == "c-1", "the heir is announced")
        (tmp_path / "hand-over.json").unlink()
        service.tick()
        until(lambda: heir_of(tmp_path) == "", "it is taken back")
    finally:
        keeper.leaving.set()
        keeper.nudge()
        keeper.join(5)


def heir_of(base: Path) -> str:
    newest = Terms(base).newest()
    return newest.heir if newest else "?"


def test_how_a_term_began_in_words() -> None:
    assert Takeover(2, "c-0", True, 10.0).describe(11.94).startswith("handed over by c-0 in 1.9 s, 20")
    assert Takeover(2, "c-0", False, 10.0).describe(19.0).startswith("took over from c-0 in 9.0 s, 20")
    text = str(HandOver("c-0", 4, "c-1", 5, 1.94))
    assert text == "c-1 acts in term 5, after c-0 in term 4; no slurmctld for 1.9 s"


PAGE = {
    "phase": "running",
    "ready": True,
    "drain": "",
    "reasons": [],
    "services": [{"name": "slurmctld", "ready": True}],
}


@pytest.mark.parametrize(
    ("page", "ready"),
    [
        (PAGE, True),
        ({}, False),
        (PAGE | {"ready": False, "reasons": ["munged: failed"]}, False),
        (PAGE | {"phase": "stopping"}, False),
        (PAGE | {"drain": "drained"}, False),
        (PAGE | {"ready": "yes"}, False),
        (PAGE | {"ready": False, "reasons": 3}, False),
    ],
)
def test_a_standby_reports_what_its_pid_1_says(page: dict[str, object], ready: bool) -> None:
    assert hand_over.parse_page(page)[0] is ready


def test_a_new_controller_serves_once_clients_are_led_to_it() -> None:
    assert hand_over.serves(PAGE) and not hand_over.serves({}) and not hand_over.serves({"services": [3]})
    services = [{"name": "slurmctld", "ready": True}, {"name": "address", "ready": False}]
    assert not hand_over.serves(PAGE | {"services": services})


def a_pod(root: Path, term: int = 0, **env: str) -> Pod:
    for place in ("run/minivm", "run/slurm", "var/spool/slurmctld"):
        (root / place).mkdir(parents=True, exist_ok=True)
    pod = Pod({"MINIVM_POD_NAME": "c-0", "MINIVM_CONTROLLERS": "2"} | env, root)
    pod.path(HELD).write_text(json.dumps({"term": term}))
    return pod


def test_a_hand_over_is_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(HandOverError, match="not one of several controllers"):
        hand_over.hand_over(a_pod(tmp_path, MINIVM_CONTROLLERS="1"))
    with pytest.raises(HandOverError, match="no controller has had a term yet"):
        hand_over.hand_over(a_pod(tmp_path))
    store = Terms(tmp_path / "var/spool/slurmctld")
    assert store.claim(1, "c-1", "two")
    with pytest.raises(HandOverError, match=r"c-0 does not act: c-1 has term 1 \(run it in c-1"):
        hand_over.hand_over(a_pod(tmp_path))
    assert store.claim(2, "c-0", "one")
    hand_over.publish(store.directory, FIT, 1)  # and no more
    with pytest.raises(HandOverError, match="no healthy standby: c-1 does not report"):
        hand_over.hand_over(a_pod(tmp_path, term=2), within=0.3)
    assert not (tmp_path / "run/minivm/hand-over.json").exists()


def test_one_hand_over_at_a_time(tmp_path: Path) -> None:
    pod = a_pod(tmp_path)
    with hand_over._only_one(pod), pytest.raises(HandOverError, match="another hand-over is under way"):
        hand_over.hand_over(pod)


@pytest.mark.parametrize(
    ("turn", "parsed"),
    [
        ("active, term 5: handed over by c-0 in 2.1 s, 2026-11-27 05:12:33 UTC", (True, 5, 2.1)),
        ("active, term 5", (True, 5, -1.0)),
        ("standby: c-0 has term 4", (False, 0, -1.0)),
        ("active, term x: in y s, z", (True, 0, -1.0)),
        ("active, term 6: took over from in 9 s, in 12 s, x", (True, 6, 12.0)),
    ],
)
def test_the_metrics_of_a_controller(turn: str, parsed: tuple[bool, int, float]) -> None:
    assert metrics.parse_turn(turn) == parsed
    base = Snapshot("controller", "c-0", "running", True, True, 1.0, 1.0, "", (), (), (), (), turn)
    text = metrics.render(base, {})
    assert f"minivm_controller_active {int(parsed[0])}\n" in text and text.endswith("# EOF\n")
    assert "minivm_controller_active" not in metrics.render(replace(base, turn=""), {})
