"""The shared snapshot of jobs: how often slurmctld is asked, what is put together, and whose jobs are given to whom."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import threading
import time
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest

from health.jobs import snapshot
from health.jobs.ask import Asker, find_pages
from health.jobs.shared import PUBLIC, WAITING_JOBS, Shared, build_request
from health.jobs.snapshot import (
    APART_S,
    BURST,
    DEAR_S,
    EACH_S,
    FRESH_S,
    FRESH_WAITING_S,
    LARGE,
    MOST_OF_A_USER,
    MOST_SENT,
    JobSnapshot,
    TooLongError,
    drop_notes,
)  # fmt: skip
from init.errors import InitError
from init.slurm.client import SlurmError
from tests.waiting import PATIENCE, until

T = TypeVar("T")
ALICE, BOB = 61401, 61402


def job(number: int, uid: int = ALICE, **more: object) -> dict[str, Any]:
    return {"job_id": number, "user_id": uid, "user_name": {ALICE: "alice", BOB: "bob"}.get(uid, str(uid)), **more}


class Slurm:
    """slurmctld as squeue and scontrol show it; each command is kept."""

    def __init__(self, *jobs: dict[str, Any]) -> None:
        self.jobs, self.calls = jobs, list[tuple[str, bool]]()
        self.error: Exception | None = None
        self.cpu = 0.0  # seconds that all commands have taken
        self.text = ""  # of nodes and partitions
        self.dear = ""  # a job whose answer takes long to write

    def __call__(self, argv: Sequence[str], as_nobody: bool) -> str:
        self.calls.append((" ".join(argv), as_nobody))
        if self.error:
            raise self.error
        if not argv[0].endswith("squeue") or tuple(argv) == WAITING_JOBS:
            return self.text or f"text of {argv[-1]}"
        keys = set(argv[-1].partition("=")[2].split(","))
        if len(keys) > 1:
            self.cpu += DEAR_S * 2 if len(self.jobs) > 1000 else 0
        self.cpu += DEAR_S * 2 if self.dear in keys else 0
        return json.dumps({"jobs": self.jobs})


def replies(slurm: Slurm, *requests: tuple[int, object], now: list[float] | None = None) -> list[dict[str, Any]]:
    """Ask all at once, with a clock that stands still unless it is given."""
    clock = now or [0.0]

    async def ask() -> list[dict[str, Any]]:
        shared_jobs = JobSnapshot(slurm, lambda: clock[0], lambda: slurm.cpu)
        worker = asyncio.create_task(shared_jobs.work())
        try:
            return list(await asyncio.gather(*(reply(shared_jobs, uid, request) for uid, request in requests)))
        finally:
            worker.cancel()

    return run(ask())


async def reply(shared_jobs: JobSnapshot, uid: int, request: object) -> dict[str, Any]:
    """Return the reply without its age."""
    answer = await whole_reply(shared_jobs, uid, request)
    assert ("age" in answer) == bool({"jobs", "text"} & answer.keys())
    return {key: value for key, value in answer.items() if key != "age"}


async def whole_reply(shared_jobs: JobSnapshot, uid: int, request: object) -> dict[str, Any]:
    text = b"".join(await shared_jobs.reply(uid, request))
    assert text.endswith(b"\n")
    return dict(json.loads(text))


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
        for at, calls, age in ((0.0, 1, 0.0), (FRESH_S, 1, FRESH_S), (FRESH_S + 1, 2, 0.0)):
            now[0] = at
            answer = await whole_reply(shared_jobs, ALICE, wants("1"))
            assert answer == {"age": age, "jobs": [job(1, admin_comment="")]}
            assert len(slurm.calls) == calls
        worker.cancel()

    run(ask())


def test_jobs_that_are_asked_for_often_are_read_anew_together() -> None:
    slurm, now = Slurm(*map(job, range(1, 21))), [0.0]
    ids = [str(number) for number in range(1, 21)]

    async def ask() -> None:
        shared_jobs = JobSnapshot(slurm, lambda: now[0])
        worker = asyncio.create_task(shared_jobs.work())
        for at, asked in ((0.0, ids), (FRESH_S, ids), (FRESH_S + 1, ["1"]), (FRESH_S + 2, ids), (FRESH_S + 3, ids)):
            now[0] = at
            await asyncio.gather(*(reply(shared_jobs, ALICE, wants(id_)) for id_ in asked))
        now[0] = 3 * FRESH_S
        await reply(shared_jobs, ALICE, wants("1"))
        now[0] = 5 * FRESH_S
        await reply(shared_jobs, ALICE, wants("1"))
        worker.cancel()

    run(ask())
    asked = [set(call.rpartition("=")[2].split(",")) for call, _ in slurm.calls]
    assert asked[:3] == [set(ids)] * 3, "one question renews the answers that others use"
    assert asked[3:] == [{"1"}], "what serves no question is not read again"


def test_commands_are_apart_after_a_burst(monkeypatch: pytest.MonkeyPatch) -> None:
    slurm, now, slept = Slurm(), [0.0], list[float]()
    real = asyncio.sleep

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += seconds
        await real(0)

    monkeypatch.setattr(asyncio, "sleep", sleep)

    async def ask() -> None:
        shared_jobs = JobSnapshot(slurm, lambda: now[0])
        worker = asyncio.create_task(shared_jobs.work())
        for number in range(BURST + 10):
            assert await reply(shared_jobs, ALICE, wants(str(number))) == {"jobs": []}
        worker.cancel()

    run(ask())
    assert now[0] == pytest.approx(10 * EACH_S), "each command after the burst waits for its time"
    assert len(slurm.calls) == BURST + 10


def test_a_user_with_many_questions_keeps_no_other_one_waiting() -> None:
    slurm = Slurm(job(1, BOB))
    flood = [(ALICE, wants(*(str(number + 64 * part) for number in range(100, 164)))) for part in range(20)]
    *refused, last = replies(slurm, *flood, (BOB, wants("1")))
    assert last["jobs"]
    assert {"direct": True} in refused, "the rest he asks himself"
    assert max(len(call.split("=")[-1].split(",")) for call, _ in slurm.calls) <= 65


def test_each_user_gets_own_jobs_and_asks_for_other_ones_with_own_rights() -> None:
    slurm = Slurm(job(1), job(2, BOB), job(3, array_job_id={"set": True, "number": 9}), job(4, BOB, het_job_id=9))
    asks = [(ALICE, wants("1")), (ALICE, wants("2")), (ALICE, wants("1", "2")), (BOB, wants("2")), (ALICE, wants("9"))]
    mine, foreign, mixed, of_bob, shared_id = replies(slurm, *asks)
    assert mine["jobs"][0]["job_id"] == 1 and of_bob["jobs"][0]["job_id"] == 2
    assert [foreign, mixed, shared_id] == [{"direct": True}] * 3, "nothing of the other user's job, not even that it is"
    assert replies(slurm, (ALICE, wants("7"))) == [{"jobs": []}]
    nobodys = {"job_id": 5}, {"job_id": 6, "user_id": True}, {"job_id": 7, "user_id": {"set": False}}
    assert replies(Slurm(*nobodys), *[(0, wants(number)) for number in "567"]) == [{"direct": True}] * 3


def test_a_list_has_only_the_askers_jobs_by_the_kernels_word() -> None:
    slurm = Slurm(job(1), job(2, BOB))
    found = replies(slurm, (ALICE, {"ask": "mine"}), (BOB, {"ask": "mine", "user": "alice"}), (1, {"ask": "mine"}))
    assert [[each["job_id"] for each in reply.get("jobs", [])] for reply in found] == [[1], [2], []]
    assert slurm.calls == [(f"/usr/bin/squeue --local --json --states=all --users={ALICE},{BOB},1", False)]


def test_a_comment_for_operators_stays_with_them() -> None:
    kept, hidden = map(drop_notes, (job(1, admin_comment="minivm: x"), job(2, admin_comment="watch this person")))
    assert (kept["admin_comment"], hidden["admin_comment"]) == ("minivm: x", "")


def test_what_all_may_see_is_read_as_nobody_and_jobs_as_root() -> None:
    slurm = Slurm(job(1))
    replies(slurm, (ALICE, wants("1")), *((ALICE, {"ask": kind}) for kind in PUBLIC))
    assert {(call.split()[0].rpartition("/")[2], as_nobody) for call, as_nobody in slurm.calls} == {
        ("squeue", False), ("scontrol", True), ("squeue", True),
    }  # fmt: skip


@pytest.mark.parametrize(
    "request_",
    [None, 5, [], {}, {"ask": "config"}, {"ask": "turn"}, {"ask": "licenses"},
     wants(), wants("1; rm"), wants("-1"), wants("1" * 11), wants(*["1"] * 65),
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
def served(path: Path, slurm: Slurm, now: list[float] | None = None) -> Iterator[None]:
    loop = asyncio.new_event_loop()
    task = loop.create_task(snapshot.serve(path, slurm, (lambda: now[0]) if now else time.monotonic))

    def work() -> None:
        with pytest.raises(asyncio.CancelledError):
            loop.run_until_complete(task)
        if left := asyncio.all_tasks(loop):
            for each in left:
                each.cancel()
            loop.run_until_complete(asyncio.wait(left))

    thread = threading.Thread(target=work)
    thread.start()

    def listens() -> bool:
        with socket.socket(socket.AF_UNIX) as client:
            return client.connect_ex(str(path)) == 0

    until(listens, "the service listens")
    try:
        yield
    finally:
        loop.call_soon_threadsafe(task.cancel)
        thread.join()
        loop.close()


def test_the_command_takes_from_the_service_what_it_has_and_asks_for_the_rest_itself(tmp_path: Path) -> None:
    path, direct = tmp_path / "jobs.sock", list[str]()

    def itself(argv: Sequence[str]) -> str:
        direct.append(argv[0].rpartition("/")[2])
        return "itself"

    def ask(argv: Sequence[str]) -> str:
        return Shared(itself, path)(argv)

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
    assert ask(squeue) == "itself", "the service has gone"


def test_the_snapshot_is_asked_for_jobs_nodes_and_partitions_alone() -> None:
    assert build_request(("/usr/bin/sacct", "--json", "--jobs=1")) is None
    assert build_request(("/usr/bin/sacctmgr", "-nP", "show", "user")) is None
    assert build_request(("/usr/bin/squeue", "--json", "--states=all", "--jobs=1,2")) == wants("1", "2")
    assert build_request(("/usr/bin/squeue", "--json", "--states=all", "--me")) == {"ask": "mine"}
    for words in (("sstat", "-nP"), ("scontrol", "show", "assoc_mgr"), ("scontrol", "--json", "show", "licenses")):
        assert build_request((f"/usr/bin/{words[0]}", *words[1:])) is None


def test_an_answer_that_shows_nothing_is_kept_for_as_long() -> None:
    """A user who asks for an ended job again and again waits for no further command."""
    slurm, now = Slurm(), [0.0]

    async def ask() -> None:
        shared_jobs = JobSnapshot(slurm, lambda: now[0])
        worker = asyncio.create_task(shared_jobs.work())
        for _ in range(BURST):
            assert await reply(shared_jobs, ALICE, wants("1")) == {"jobs": []}
        assert len(slurm.calls) == 1
        slurm.jobs = (job(1),)
        now[0] = FRESH_S + 1
        assert (await reply(shared_jobs, ALICE, wants("1")))["jobs"]
        worker.cancel()

    run(ask())


def queued(number: int, **more: object) -> dict[str, Any]:
    fields = {"user_name": "alice", "name": "train", "job_state": ["PENDING"], "state_reason": "Priority"}
    return {"job_id": number, "user_id": os.getuid(), **fields, "partition": "main", **more}


def recorded(number: int) -> dict[str, Any]:
    times = {"submission": int(time.time()), "start": 0, "end": 0}
    more = {"array": {"job_id": 0, "task_id": {"set": False}}, "het": {"job_id": 0}, "steps": []}
    return {"job_id": number, "name": "new", "user": "alice", "state": {"current": ["PENDING"]}, "time": times, **more}


class Directly:
    """Slurm's clients with the user's own rights; each command is kept."""

    def __init__(self, **answers: object) -> None:
        self.answers, self.calls = answers, list[str]()

    def __call__(self, argv: Sequence[str]) -> str:
        name = argv[0].rpartition("/")[2]
        key = argv[-1] if name == "scontrol" else "jobs"
        self.calls.append(argv[-1] if name == "scontrol" else name)
        return json.dumps({key: self.answers.get(self.calls[-1], [])})

    def look(self, path: Path, wanted: str) -> str:
        (page,) = find_pages(Asker(Shared(self, path), "alice", False, time.time()), wanted)
        return page.answer.headline


def test_a_job_that_was_submitted_after_the_kept_answer_is_not_lost(tmp_path: Path) -> None:
    slurm, direct = Slurm(queued(41)), Directly(sacct=[recorded(42)])
    with served(tmp_path / "jobs.sock", slurm):
        direct.look(tmp_path / "jobs.sock", "train")
        slurm.jobs = ()
        direct.answers["squeue"] = [queued(41), queued(42, name="new")]
        assert "lost" not in direct.look(tmp_path / "jobs.sock", "new")
        assert direct.calls.count("squeue") == 1, "slurmctld was asked once more"
        slurm.jobs = (queued(42, name="new"),)
        assert "lost" not in direct.look(tmp_path / "jobs.sock", "42")
        assert direct.calls.count("squeue") == 1


def test_a_job_that_was_asked_for_before_it_was_submitted_is_found(tmp_path: Path) -> None:
    """A kept answer that showed nothing hides neither the job nor one that depends on it."""
    slurm, direct, path = Slurm(), Directly(), tmp_path / "jobs.sock"
    with served(path, slurm):
        with pytest.raises(InitError):
            direct.look(path, "42")
        slurm.jobs = (queued(43, state_reason="Dependency", dependency="afterok:42(unfulfilled)"),)
        direct.answers["squeue"] = [queued(42)]
        (page,) = find_pages(Asker(Shared(direct, path), "alice", False, time.time()), "43")
        assert any("job 42 is pending" in fact.text for fact in page.answer.evidence), page.answer
        slurm.jobs = ()
        assert "lost" not in direct.look(path, "42")


def test_the_jobs_before_one_are_read_once_a_minute_for_all(tmp_path: Path) -> None:
    """slurmctld packs its whole queue for them, so a command whose snapshot has no list does without."""
    slurm, direct, path, now = Slurm(queued(41)), Directly(nodes=[]), tmp_path / "jobs.sock", [0.0]
    slurm.text = "40|40_[1-9]|5|main|Priority\n41|41|3|main|Priority\n"
    with served(path, slurm, now):
        for at in (0.0, FRESH_WAITING_S - 1):
            now[0] = at
            (page,) = find_pages(Asker(Shared(direct, path), "alice", False, time.time()), "41")
            (fact,) = [fact for fact in page.answer.evidence if "before it" in fact.text]
            assert "1 waiting job is before it: the next is 40_[1-9] with priority 5" in fact.text
            assert fact.source == ("squeue, 59 s ago" if at else "squeue")
        assert [as_nobody for call, as_nobody in slurm.calls if "--states=PENDING" in call] == [True]
        assert not [call for call in direct.calls if call == "squeue"]
    direct.answers["squeue"] = [queued(41)]
    direct.look(tmp_path / "nobody-listens.sock", "41")
    assert direct.calls.count("squeue") == 1, "the job itself, and no list"


def test_a_page_has_the_age_of_the_kept_answer(tmp_path: Path) -> None:
    slurm, now, path = Slurm(queued(41, partition="lab", state_reason="Resources")), [0.0], tmp_path / "jobs.sock"
    node = {"name": "w1", "cpus": 64, "real_memory": 1 << 20, "state": ["IDLE"], "partitions": ["lab"]}
    slurm.text = json.dumps({"nodes": [node], "partitions": [{"name": "lab", "partition": {"state": ["UP"]}}]})
    with served(path, slurm, now):
        for at, age in ((0.0, 0.0), (FRESH_S - 1, FRESH_S - 1)):
            now[0] = at
            (page,) = find_pages(Asker(Shared(Directly(), path), "alice", False, time.time()), "41")
            assert (page.age, page.nodes_age) == (age, age)
        slurm.jobs = ()
        now[0] += FRESH_S
        direct = Directly(squeue=[queued(41)])
        (page,) = find_pages(Asker(Shared(direct, path), "alice", False, time.time()), "41")
        assert page.age == 0.0, "slurmctld has just answered the command itself"


def test_a_job_that_slurmctld_itself_does_not_know_is_lost(tmp_path: Path) -> None:
    with served(tmp_path / "jobs.sock", Slurm()):
        direct = Directly(sacct=[recorded(42)])
        for wanted in ("42", "new"):
            assert "lost" in direct.look(tmp_path / "jobs.sock", wanted)
        assert direct.calls.count("squeue") == 3, "each absence, and the job that may have come back for 42"


def test_a_partition_that_nobody_may_see_is_read_with_the_users_own_rights(tmp_path: Path) -> None:
    node = {"name": "w1", "cpus": 64, "real_memory": 1 << 20, "state": ["IDLE"], "partitions": ["lab"]}
    direct = Directly(nodes=[node], partitions=[{"name": "lab", "partition": {"state": ["UP"]}}])
    slurm = Slurm(queued(1, partition="lab", state_reason="Resources"))
    slurm.text = json.dumps({"nodes": [{**node, "partitions": ["main"]}], "partitions": []})
    with served(tmp_path / "jobs.sock", slurm):
        assert "has no nodes" not in direct.look(tmp_path / "jobs.sock", "1")
        assert {"nodes", "partitions"} <= set(direct.calls)
        direct.calls = []
        slurm.jobs = (queued(3, partition="lab", job_state=["RUNNING"], nodes="w1"),)
        direct.look(tmp_path / "jobs.sock", "3")
        assert direct.calls == ["nodes", "sstat"]
        slurm.jobs = (queued(2, partition="main", state_reason="Resources"),)
        direct.calls = []
    slurm.text = json.dumps({"nodes": [{**node, "partitions": ["main"]}], "partitions": [{"name": "main"}]})
    with served(tmp_path / "own.sock", slurm):
        direct.look(tmp_path / "own.sock", "2")
        assert direct.calls == [], "what the snapshot shows is not asked again"


@pytest.mark.parametrize("size", [220_000, 250_000, 280_000, 1_000_000, 5_000_000])
def test_a_large_answer_arrives_whole(tmp_path: Path, size: int) -> None:
    slurm = Slurm()
    slurm.text = "x" * size
    with served(tmp_path / "jobs.sock", slurm):
        for _ in range(5):
            ask = Shared(lambda argv: "itself", tmp_path / "jobs.sock")
            assert len(ask(("/usr/bin/scontrol", "--json", "show", "nodes"))) == size


def test_one_id_many_times_is_one_and_a_huge_answer_is_not_put_together() -> None:
    assert replies(slurm := Slurm(job(7)), (ALICE, wants(*["7"] * 64)))[0]["jobs"] == [job(7, admin_comment="")]
    assert len(slurm.calls) == 1
    tasks = [job(number, array_job_id=7, comment="x" * 2**16) for number in range(MOST_SENT // 2**16 + 1)]
    assert replies(Slurm(*tasks), (ALICE, wants("7"))) == [{"direct": True}]


def test_kept_answers_are_dropped_when_old_and_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "MOST_KEPT", 1 << 20)
    now, slurm = [0.0], Slurm()

    async def ask() -> None:
        shared_jobs = JobSnapshot(slurm, lambda: now[0])
        worker = asyncio.create_task(shared_jobs.work())
        for number in range(1, 13):
            slurm.jobs = (job(number, comment="x" * (1 << 18)),)
            now[0] += 60 if number < 5 else EACH_S / 100
            shared_jobs._tokens = BURST
            await reply(shared_jobs, ALICE, wants(str(number)))
            assert len(shared_jobs._kept) == min(3, max(1, number - 3)), number
        worker.cancel()

    run(ask())


class Large(Slurm):
    """slurmctld with a job 7 whose answer is too long."""

    def __call__(self, argv: Sequence[str], as_nobody: bool) -> str:
        text = super().__call__(argv, as_nobody)
        if "7" in argv[-1].partition("=")[2].split(","):
            raise TooLongError
        return text


def test_a_job_that_is_too_long_is_put_aside_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "EACH_S", 0.001)
    slurm = Large(*(job(number, 2000 + number) for number in range(1, 101)))

    async def ask() -> None:
        shared_jobs = JobSnapshot(slurm, time.monotonic, lambda: 0.0)
        worker = asyncio.create_task(shared_jobs.work())
        asks = (reply(shared_jobs, 2000 + number, wants(str(number))) for number in range(1, 101))
        found = await asyncio.gather(*asks)
        assert [number for number, each in enumerate(found, 1) if each == {"direct": True}] == [7]
        before = len(slurm.calls)
        assert await reply(shared_jobs, 2007, wants("7")) == {"direct": True}
        assert len(slurm.calls) == before, "it is not asked again soon"
        worker.cancel()

    run(ask())
    assert len(slurm.calls) <= 20


def test_a_job_that_is_too_long_spoils_no_question_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    slurm, now = Large(job(1)), [0.0]

    async def ask() -> None:
        shared_jobs = JobSnapshot(slurm, lambda: now[0])
        worker = asyncio.create_task(shared_jobs.work())
        await reply(shared_jobs, ALICE, wants("1"))
        shared_jobs._served.add(("jobs", "7"))  # it has grown since it was served
        now[0] = FRESH_S + 1
        assert "jobs" in await reply(shared_jobs, ALICE, wants("1"))
        async with asyncio.timeout(PATIENCE):
            while len(slurm.calls) < 4:  # the question has its answer before the other half is asked for
                await asyncio.sleep(0.01)
        worker.cancel()

    run(ask())
    assert [call.rpartition("=")[2] for call, _ in slurm.calls] == ["1", "1,7", "1", "7"]


def test_a_long_queue_is_not_loaded_for_each_batch() -> None:
    now = [0.0]
    slurm = Slurm(*(job(number, 2000 + number) for number in range(1, 1200)))

    async def ask() -> None:
        shared_jobs = JobSnapshot(slurm, lambda: now[0], lambda: slurm.cpu)
        worker = asyncio.create_task(shared_jobs.work())
        for expected in (1, 1, 2):
            asks = [reply(shared_jobs, 2000 + number, wants(str(number))) for number in (1, 2, 3)]
            found = await asyncio.gather(*asks)
            assert len([call for call, _ in slurm.calls if "," in call]) == expected
            assert ({"direct": True} in found) == (now[0] == FRESH_S + 1)
            assert await reply(shared_jobs, ALICE, {"ask": "nodes"}) == {"text": "text of nodes"}
            now[0] = APART_S + 1 if now[0] else FRESH_S + 1
        worker.cancel()

    run(ask())


def test_one_users_huge_array_is_put_aside_and_all_others_are_answered_on() -> None:
    now, text = [0.0], "x" * (LARGE // 2)
    array = (job(number, array_job_id=7, comment=text) for number in (7, 8, 9))
    slurm = Slurm(*array, *map(job, (10, 11)), *(job(number, 2000 + number) for number in range(1, 5)))
    slurm.dear = "7"

    async def ask() -> None:
        shared_jobs = JobSnapshot(slurm, lambda: now[0], lambda: slurm.cpu)
        worker = asyncio.create_task(shared_jobs.work())

        async def both(own: str) -> tuple[bool, bool]:
            """Tell if Alice has to ask directly, and if four other users get answers, by one command together."""
            before = len(slurm.calls)
            asks = [(ALICE, own), *((2000 + number, str(number)) for number in range(1, 5))]
            first, *others = await asyncio.gather(*(reply(shared_jobs, uid, wants(key)) for uid, key in asks))
            is_one = len(slurm.calls) == before + 1
            return first == {"direct": True}, is_one and all("jobs" in each for each in others)

        assert await both("7") == (False, True)
        for own in ("7", "10"):
            now[0] += FRESH_S + 1
            assert await both(own) == (True, True), "the user of the array asks for all jobs directly, for a while"
        now[0] += APART_S
        assert await both("11") == (False, True)
        worker.cancel()

    run(ask())


def test_in_a_long_queue_some_questions_at_a_time_get_commands_of_their_own() -> None:
    now = [0.0]
    slurm = Slurm(*(job(number, 2000 + number) for number in range(1, 1200)))

    async def ask() -> None:
        shared_jobs = JobSnapshot(slurm, lambda: now[0], lambda: slurm.cpu)
        worker = asyncio.create_task(shared_jobs.work())
        await asyncio.gather(*(reply(shared_jobs, 2000 + number, wants(str(number))) for number in (1, 2, 3)))
        now[0] = FRESH_S + 1
        asks = [(2001, "1"), (2001, "5"), (2002, "2"), (2003, "3")]
        found = await asyncio.gather(*(reply(shared_jobs, uid, wants(key)) for uid, key in asks))
        assert ["jobs" in each for each in found] == [True, False, True, False], "one a user, as many as are in time"
        assert all("," not in call for call, _ in slurm.calls[1:])
        worker.cancel()

    run(ask())


def test_a_late_command_for_many_lets_them_ask_themselves() -> None:
    slurm = Slurm()
    slurm.error = SlurmError("ask slurmctld", "no answer within 10 s")
    slurm.error.late = True
    assert replies(slurm, (ALICE, wants("1")), (BOB, wants("2"))) == [{"direct": True}] * 2


@pytest.mark.parametrize("text", ["", "{}", "[]", "5", '{"jobs"'])
def test_an_odd_answer_of_squeue_is_left_to_the_command(text: str) -> None:
    class Odd(Slurm):
        def __call__(self, argv: Sequence[str], as_nobody: bool) -> str:
            return text

    assert replies(Odd(), (ALICE, wants("1")), (BOB, {"ask": "mine"})) == [{"direct": True}] * 2


def test_a_service_that_hangs_costs_the_page_one_short_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("health.jobs.shared.WITHIN", 0.2)
    with socket.socket(socket.AF_UNIX) as service:
        service.bind(str(tmp_path / "jobs.sock"))
        service.listen(5)
        ask = Shared(lambda argv: "itself", tmp_path / "jobs.sock")
        for _ in range(3):
            assert ask(("/usr/bin/scontrol", "--json", "show", "nodes")) == "itself" and not ask.is_old
        service.accept()[0].close()
        service.setblocking(False)
        with pytest.raises(BlockingIOError):
            service.accept()


def test_connections_beyond_a_users_share_are_closed_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "HEAR_S", 600.0)
    with served(tmp_path / "jobs.sock", Slurm()):
        silent = [socket.socket(socket.AF_UNIX) for _ in range(MOST_OF_A_USER)]
        for each in silent:
            each.connect(str(tmp_path / "jobs.sock"))
        with socket.socket(socket.AF_UNIX) as beyond:
            beyond.settimeout(PATIENCE)
            beyond.connect(str(tmp_path / "jobs.sock"))
            assert beyond.recv(1) == b""
        for each in silent:
            each.close()

        def answers() -> bool:
            ask = Shared(lambda argv: "itself", tmp_path / "jobs.sock")
            return ask(("/usr/bin/scontrol", "--json", "show", "nodes")) == "text of nodes"

        until(answers, "the service answers again")


def test_slow_readers_are_cut_and_leave_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "SEND_S", 1.0)
    slurm = Slurm()
    slurm.text = "x" * 5_000_000
    with served(tmp_path / "jobs.sock", slurm):
        slow = [socket.socket(socket.AF_UNIX) for _ in range(MOST_OF_A_USER)]
        for each in slow:
            each.connect(str(tmp_path / "jobs.sock"))
            each.sendall(b'{"ask": "nodes"}\n')

        def answers() -> bool:
            ask = Shared(lambda argv: "itself", tmp_path / "jobs.sock")
            return len(ask(("/usr/bin/scontrol", "--json", "show", "nodes"))) == 5_000_000

        until(answers, "the slow ones have been cut")
        for each in slow:
            each.close()
