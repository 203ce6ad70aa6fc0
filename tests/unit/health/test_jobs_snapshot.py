"""The shared snapshot of jobs: how often slurmctld is asked, what is put together, and whose jobs are given to whom."""

from __future__ import annotations

import asyncio
import json
import os
import pwd
import socket
import threading
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest

from health.jobs import snapshot
from health.jobs.shared import PUBLIC, question, shared
from health.jobs.snapshot import BURST, EACH_S, FRESH_S, JobSnapshot, TooLongError, own
from init.slurm.client import SlurmError
from tests.waiting import until

T = TypeVar("T")
ALICE, BOB = 61401, 61402


def job(number: int, uid: int = ALICE, **more: object) -> dict[str, Any]:
    return {"job_id": number, "user_id": uid, "user_name": {ALICE: "alice", BOB: "bob"}.get(uid, str(uid)), **more}


class Slurm:
    """slurmctld as squeue and scontrol show it; each command is kept."""

    def __init__(self, *jobs: dict[str, Any]) -> None:
        self.jobs, self.calls = jobs, list[tuple[str, bool]]()
        self.error: Exception | None = None

    def __call__(self, argv: Sequence[str], as_nobody: bool) -> str:
        self.calls.append((" ".join(argv), as_nobody))
        if self.error:
            raise self.error
        return json.dumps({"jobs": self.jobs}) if argv[0].endswith("squeue") else f"text of {argv[-1]}"


def replies(slurm: Slurm, *requests: tuple[int, object], now: list[float] | None = None) -> list[dict[str, Any]]:
    """Ask all at once, with a clock that stands still unless it is given."""
    clock = now or [0.0]

    async def ask() -> list[dict[str, Any]]:
        shared_jobs = JobSnapshot(slurm, lambda: clock[0])
        worker = asyncio.create_task(shared_jobs.work())
        try:
            return await asyncio.gather(*(shared_jobs.reply(uid, request) for uid, request in requests))
        finally:
            worker.cancel()

    return run(ask())


def run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(work)


def wants(*ids: str) -> dict[str, object]:
    return {"ask": "jobs", "ids": list(ids)}


def test_two_hundred_people_cost_one_command_of_a_kind() -> None:
    slurm = Slurm(*(job(number, 2000 + number) for number in range(1, 201)))
    people = [(2000 + number, wants(str(number))) for number in range(1, 201)]
    found = replies(slurm, *people, *[(ALICE, {"ask": "nodes"})] * 200)
    assert [reply["jobs"][0]["job_id"] for reply in found[:200]] == list(range(1, 201))
    assert {reply["text"] for reply in found[200:]} == {"text of nodes"}
    assert len(slurm.calls) == 2


def test_an_answer_serves_for_some_seconds_and_no_longer() -> None:
    slurm, now = Slurm(job(1)), [0.0]

    async def ask() -> None:
        shared_jobs = JobSnapshot(slurm, lambda: now[0])
        worker = asyncio.create_task(shared_jobs.work())
        for at, calls in ((0.0, 1), (FRESH_S, 1), (FRESH_S + 1, 2)):
            now[0] = at
            assert (await shared_jobs.reply(ALICE, wants("1")))["jobs"] == [job(1, admin_comment="")]
            assert len(slurm.calls) == calls
        worker.cancel()

    run(ask())


def test_commands_are_apart_after_a_burst(monkeypatch: pytest.MonkeyPatch) -> None:
    slurm, now, slept = Slurm(), [0.0], list[float]()
    real = asyncio.sleep

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += seconds
        await real(0)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    asks = [(ALICE, {"ask": "turn"}) for _ in range(BURST + 10)]
    assert replies(slurm, *asks, now=now) == [{"direct": True}] * len(asks)
    assert now[0] == pytest.approx(10 * EACH_S), "each turn after the burst waits for its time"
    assert slurm.calls == []


def test_a_user_with_many_questions_keeps_no_other_one_waiting() -> None:
    slurm = Slurm(job(1, BOB))
    flood = [(ALICE, wants(*(str(number + 64 * part) for number in range(100, 164)))) for part in range(20)]
    *refused, last = replies(slurm, *flood, *[(ALICE, {"ask": "turn"})] * 3, (BOB, wants("1")))
    assert last["jobs"]
    assert [reply for reply in refused if "under way" in reply.get("why", "")], refused
    assert max(len(call.split("=")[-1].split(",")) for call, _ in slurm.calls) <= 65


def test_each_user_gets_own_jobs_and_asks_for_other_ones_with_own_rights() -> None:
    slurm = Slurm(job(1), job(2, BOB), job(3, array_job_id={"set": True, "number": 9}), job(4, BOB, het_job_id=9))
    asks = [(ALICE, wants("1")), (ALICE, wants("2")), (ALICE, wants("1", "2")), (BOB, wants("2")), (ALICE, wants("9"))]
    mine, foreign, mixed, of_bob, shared_id = replies(slurm, *asks)
    assert mine["jobs"][0]["job_id"] == 1 and of_bob["jobs"][0]["job_id"] == 2
    assert [foreign, mixed, shared_id] == [{"direct": True}] * 3, "nothing of the other user's job, not even that it is"
    assert replies(slurm, (ALICE, wants("7"))) == [{"jobs": []}]
    assert own([{"job_id": 5}, {"job_id": 6, "user_id": True}, {"job_id": 7, "user_id": {"set": False}}], 0) == []


def test_a_list_has_only_the_askers_jobs_by_the_kernels_word(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {ALICE: "alice", BOB: "bob"}
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: type("Entry", (), {"pw_name": names[uid]}))
    slurm = Slurm(job(1), job(2, BOB))
    found = replies(slurm, (ALICE, {"ask": "mine"}), (BOB, {"ask": "mine", "user": "alice"}), (1, {"ask": "mine"}))
    assert [[each["job_id"] for each in reply.get("jobs", [])] for reply in found] == [[1], [2], []]
    assert found[2] == {"direct": True}


def test_a_comment_for_operators_stays_with_them() -> None:
    kept, hidden = own([job(1, admin_comment="minivm: x"), job(2, admin_comment="watch this person")], ALICE)
    assert (kept["admin_comment"], hidden["admin_comment"]) == ("minivm: x", "")


def test_what_all_may_see_is_read_as_nobody_and_jobs_as_root() -> None:
    slurm = Slurm(job(1))
    replies(slurm, (ALICE, wants("1")), *((ALICE, {"ask": kind}) for kind in PUBLIC))
    assert {(call.split()[0].rpartition("/")[2], as_nobody) for call, as_nobody in slurm.calls} == {
        ("squeue", False), ("scontrol", True),
    }  # fmt: skip


@pytest.mark.parametrize(
    "request_",
    [None, 5, [], {}, {"ask": "config"}, wants(), wants("1; rm"), wants("-1"), wants("1" * 11), wants(*["1"] * 65),
     {"ask": "jobs", "ids": "1"}, {"ask": "jobs", "ids": [1]}, {"ask": ["nodes"]}],
)  # fmt: skip
def test_a_request_of_a_stranger_reaches_no_command(request_: object) -> None:
    slurm = Slurm()
    (reply,) = replies(slurm, (ALICE, request_))
    assert "why" in reply and slurm.calls == []


def test_an_error_is_given_to_its_askers_and_the_next_question_is_asked_anew() -> None:
    slurm = Slurm(job(1))
    slurm.error = SlurmError("ask slurmctld", "slurm-controller:6817 cannot be reached")
    assert replies(slurm, *[(ALICE, wants("1"))] * 3) == [{"why": "slurm-controller:6817 cannot be reached"}] * 3
    slurm.error = SlurmError("ask slurmctld", "Invalid job id specified")
    assert replies(slurm, (ALICE, wants("1"))) == [{"jobs": []}]
    slurm.error = TooLongError()
    assert replies(slurm, (ALICE, wants("1"))) == [{"direct": True}]


@contextmanager
def served(path: Path, slurm: Slurm) -> Iterator[None]:
    loop = asyncio.new_event_loop()
    task = loop.create_task(snapshot.serve(path, slurm))

    def work() -> None:
        with pytest.raises(asyncio.CancelledError):
            loop.run_until_complete(task)

    thread = threading.Thread(target=work)
    thread.start()
    until(path.exists, "the service listens")
    yield
    loop.call_soon_threadsafe(task.cancel)
    thread.join()
    loop.close()


def test_the_command_takes_from_the_service_what_it_has_and_asks_for_the_rest_itself(tmp_path: Path) -> None:
    path, direct = tmp_path / "jobs.sock", list[str]()

    def itself(argv: Sequence[str]) -> str:
        direct.append(argv[0].rpartition("/")[2])
        return "itself"

    ask = shared(itself, path)
    squeue = ("/usr/bin/squeue", "--json", "--states=all", "--jobs=1")
    assert ask(squeue) == "itself", "without the service"
    mine = {"job_id": 1, "user_id": os.getuid(), "user_name": "x"}
    with served(path, Slurm(mine)):
        assert path.stat().st_mode & 0o777 == 0o666
        assert json.loads(ask(squeue))["jobs"][0]["job_id"] == 1
        assert ask(("/usr/bin/scontrol", "--json", "show", "nodes")) == "text of nodes"
        assert direct == ["squeue"]
        assert ask(("/usr/bin/scontrol", "show", "assoc_mgr", "flags=assoc,qos", "accounts=a")) == "itself"
        assert ask(("/usr/bin/sacct", "--json", "--jobs=1")) == "itself"
        for garbage in (b"\n", b"{", b"[" * 9000 + b"\n", b"x" * 100_000):
            with socket.socket(socket.AF_UNIX) as stranger:
                stranger.connect(str(path))
                stranger.sendall(garbage)
        assert json.loads(ask(squeue))["jobs"]
    assert direct == ["squeue", "scontrol", "sacct"]


def test_a_command_that_does_not_reach_slurmctld_takes_no_turn() -> None:
    assert question(("/usr/bin/sacct", "--json", "--jobs=1")) is None
    assert question(("/usr/bin/sacctmgr", "-nP", "show", "user")) is None
    assert question(("/usr/bin/squeue", "--json", "--states=all", "--jobs=1,2")) == wants("1", "2")
    assert question(("/usr/bin/squeue", "--json", "--states=all", "--me")) == {"ask": "mine"}
    assert question(("/usr/bin/sstat", "-nP")) == {"ask": "turn"}
