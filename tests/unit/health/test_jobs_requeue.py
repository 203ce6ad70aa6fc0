"""Requeues without the machine: which jobs are victims, how often, and what a kill between two steps leaves."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ground.files import write_json
from health.jobs import parse, requeue
from health.jobs.explain import explain
from health.jobs.model import World
from health.jobs.requeue import MOST_JOBS, MOST_LOOKED, Requeuer, find_guilty_nodes, load, recall_reason
from init.slurm.client import SlurmError

NOW = 1_800_000_000
BROKEN = "minivm: xid[reboot]@9f2c: XID 79"


def node(name: str, reason: str = "", since: int = NOW - 70) -> dict[str, Any]:
    state = ["IDLE", "DRAIN"] if reason else ["IDLE"]
    more = {"reason": reason, "reason_changed_at": since, "reason_set_by_user": "root"} if reason else {}
    return {"name": name, "state": state, "partitions": ["main"], "cpus": 8, "real_memory": 16384, **more}


def dead(number: int = 12, **more: object) -> dict[str, Any]:
    return {
        "job_id": number, "user_name": "alice", "partition": "main", "job_state": ["FAILED"], "nodes": "w0", "cpus": 2,
        "state_reason": "NonZeroExitCode", "start_time": NOW - 3600, "end_time": NOW - 60, "restart_cnt": 0,
        "excluded_nodes": "", "required_nodes": "", "batch_flag": True, "requeue": True, "admin_comment": "",
        "exit_code": {"return_code": {"set": True, "number": 1}}, "node_count": 1, **more,
    }  # fmt: skip


class Killed(BaseException):
    """The service was killed here."""


class Slurm:
    """slurmctld 24.11 as scontrol showed it: an ended job takes no change, a requeue is held and counted."""

    def __init__(self, *jobs: dict[str, Any], nodes: Sequence[dict[str, Any]] = ()) -> None:
        self.jobs = {str(job["job_id"]): job for job in jobs}
        self.nodes = list(nodes) or [node("w0", BROKEN), node("w1")]
        self.changes: list[tuple[str, ...]] = []
        self.notes: list[str] = []
        self.killed_after = -1  # changes
        self.shown = 0  # jobs in JSON

    def __call__(self, argv: Sequence[str]) -> str:
        words = list(argv[1:])
        if words[:3] == ["--json", "show", "nodes"]:
            return json.dumps({"nodes": self.nodes})
        if argv[0].endswith("squeue"):
            jobs = self.queue(words)
            if "--noheader" in words:
                assert "--Format=jobarrayid:|,username:|,restartcnt:|" in words
                return "".join(f"{job['job_id']}|{job['user_name']}|{job['restart_cnt']}|\n" for job in jobs)
            self.shown += len(jobs)
            return json.dumps({"jobs": jobs})
        if len(self.changes) == self.killed_after:
            raise Killed
        self.change(words)
        self.changes.append(tuple(words))
        return ""

    def queue(self, words: list[str]) -> list[dict[str, Any]]:
        options = dict(word.partition("=")[::2] for word in words[1:])
        states, ids = options["--states"].split(","), options.get("--jobs", "").split(",")
        return [
            job
            for number, job in self.jobs.items()
            if (states == ["all"] or set(states) & set(job["job_state"])) and (ids == [""] or number in ids)
        ]

    def change(self, words: list[str]) -> None:
        if words[0] == "notify":
            self.notes.append(words[2])
            return
        job = self.jobs.get(words[1].removeprefix("jobid="))
        if job is None:
            raise refused("Invalid job id specified")
        ended = job["job_state"] != ["PENDING"]
        if words[0] == "requeuehold":
            if not ended or not job["requeue"]:
                raise refused("Requested operation is presently disabled")
            held = {"job_state": ["PENDING"], "state_reason": "JobHeldUser", "hold": True}
            job |= {**held, "restart_cnt": job["restart_cnt"] + 1}
        elif words[0] == "release":
            job |= {"state_reason": "BeginTime", "hold": False}
        elif ended:
            raise refused("Job has already finished")
        elif any("[" in name or name == "gone" for name in words[2].partition("=")[2].split(",")):
            raise refused("Invalid node name specified")
        else:
            pairs = dict(word.partition("=")[::2] for word in words[2:])
            job["excluded_nodes"] = pairs["excnodelist"]
            job["admin_comment"] = pairs.get("admincomment", job["admin_comment"])

    def run_again(self, number: str, **more: object) -> None:
        self.jobs[number] |= {"job_state": ["RUNNING"], "state_reason": "None", "nodes": "w1", **more}


def refused(text: str) -> SlurmError:
    error = SlurmError("ask slurmctld", text)
    error.output = text
    return error


def turn(slurm: Slurm, path: Path, acts: bool = True, most: int = 2) -> list[str]:
    lines: list[str] = []
    Requeuer(slurm, acts, most, NOW, path / "jobs.json", lines.append).turn()
    return lines


def told_by_page(job: dict[str, Any]) -> int:
    (shown,) = parse.parse_queue(json.dumps({"jobs": [job]}))
    return sum("runs again without w0" in fact.text for fact in explain(shown, World(), NOW).answer.evidence)


def test_a_job_that_died_by_its_machine_runs_again_without_it_and_is_told(tmp_path: Path) -> None:
    slurm = Slurm(dead(excluded_nodes="w7"))
    (line,) = turn(slurm, tmp_path)
    assert "12 runs again without w0 (requeue 1 of at most 2): w0: minivm: xid" in line
    job = slurm.jobs["12"]
    assert job["excluded_nodes"] == "w7,w0" and job["state_reason"] == "BeginTime" and job["restart_cnt"] == 1
    assert "without w0: w0: minivm: xid" in recall_reason("12", NOW, tmp_path / "jobs.json")
    assert not recall_reason("12", NOW + 4000, tmp_path / "jobs.json"), "a later requeue is not the service's"
    assert told_by_page(job) == 1
    slurm.run_again("12")
    assert told_by_page(job) == 1
    for _ in range(2):
        turn(slurm, tmp_path)
    assert [note for note in slurm.notes if "runs again without w0" in note] == slurm.notes and len(slurm.notes) == 1


def test_by_default_it_is_only_proposed_once(tmp_path: Path) -> None:
    slurm = Slurm(dead())
    assert "would run again without w0" in turn(slurm, tmp_path, acts=False)[0]
    assert turn(slurm, tmp_path, acts=False) == [] and slurm.changes == []
    assert turn(slurm, tmp_path, acts=True), "the operator switches it on"
    assert load(tmp_path / "jobs.json")["12"].number == 1


@pytest.mark.parametrize("step", range(3))
def test_a_kill_at_any_step_requeues_once_and_keeps_the_count(tmp_path: Path, step: int) -> None:
    slurm = Slurm(dead())
    slurm.killed_after = step
    with pytest.raises(Killed):
        turn(slurm, tmp_path)
    slurm.killed_after = -1
    for _ in range(3):
        turn(slurm, tmp_path)
    assert [words[0] for words in slurm.changes] == ["requeuehold", "update", "release"]
    assert slurm.jobs["12"]["restart_cnt"] == 1 and load(tmp_path / "jobs.json")["12"].number == 1


@pytest.mark.parametrize("saves", range(2))
def test_a_kill_before_a_record_is_kept_requeues_once(
    tmp_path: Path, saves: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm, done = Slurm(dead()), [0]

    def write(*arguments: Any) -> None:
        if done[0] == saves:
            done[0] += 1
            raise Killed
        done[0] += 1
        write_json(*arguments)

    monkeypatch.setattr("health.jobs.requeue.write_json", write)
    with pytest.raises(Killed):
        turn(slurm, tmp_path)
    for _ in range(3):
        turn(slurm, tmp_path)
    assert slurm.jobs["12"]["restart_cnt"] == 1 and slurm.jobs["12"]["state_reason"] == "BeginTime"
    assert [words[0] for words in slurm.changes].count("requeuehold") == 1
    assert load(tmp_path / "jobs.json")["12"].number == 1


def test_a_job_is_requeued_no_more_often_than_allowed(tmp_path: Path) -> None:
    slurm = Slurm(dead())
    slurm.nodes += [node("w2"), node("w3")]
    for round_, name in enumerate(("w0", "w1", "w2")):
        slurm.nodes = [node(each, BROKEN if each == name else "") for each in ("w0", "w1", "w2", "w3")]
        slurm.jobs["12"] |= {"job_state": ["FAILED"], "state_reason": "NonZeroExitCode", "nodes": name}
        lines = turn(slurm, tmp_path)
        assert slurm.jobs["12"]["restart_cnt"] == min(round_ + 1, 2)
    assert "it was requeued 2 times already" in lines[-1]
    assert turn(slurm, tmp_path) == [], "told once"


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"requeue": False}, "--no-requeue"),
        ({"required_nodes": "w0"}, "requires w0"),
        ({"cpus": 32, "node_count": 2}, "cannot run it"),
    ],
)
def test_a_job_that_cannot_run_elsewhere_is_left_alone_and_that_is_told(
    tmp_path: Path, more: dict[str, Any], why: str
) -> None:
    slurm = Slurm(dead(**more))
    assert why in turn(slurm, tmp_path)[0] and slurm.changes == []
    assert turn(slurm, tmp_path) == []


@pytest.mark.parametrize(
    ("job", "nodes"),
    [
        (dead(), [node("w0")]),  # fails on a good machine, however often
        (dead(nodes="w1"), None),  # another machine is broken
        (dead(), [node("w0", "looks odd to me")]),  # a person's word
        (dead(), [node("w0", "Kill task failed")]),  # Slurm's own: a user's process may hang
        (dead(), [node("w0", "minivm: pod stops")]),
        (dead(), [node("w0", "minivm: fleet: xid[reboot]@9f2c: x")]),
        (dead(), [node("w0", "minivm: disk[user]@9f2c: /tmp is full")]),
        (dead(), [node("w0", "minivm: prolog.d_10-x[node]@9f2c: exit code 1")]),
        (dead(), [node("w0", BROKEN, since=NOW - 4000)]),  # before it started
        (dead(end_time=NOW - 600), [node("w0", BROKEN)]),  # long after it ended
        (dead(job_state=["TIMEOUT"]), None),
        (dead(job_state=["OUT_OF_MEMORY"]), None),
        (dead(job_state=["CANCELLED"]), None),
        (dead(exit_code={"return_code": {"set": True, "number": 125}}), None),
        (dead(batch_flag=False), None),
        (dead(het_job_id={"set": True, "number": 12}, het_job_offset={"set": True, "number": 0}), None),
    ],
)
def test_no_machine_is_blamed_without_a_verdict_in_the_jobs_time(
    tmp_path: Path, job: dict[str, Any], nodes: list[dict[str, Any]] | None
) -> None:
    slurm = Slurm(job, nodes=[*(nodes or [node("w0", BROKEN)]), node("w9")])
    assert turn(slurm, tmp_path) == [] and slurm.changes == []


def test_a_job_that_slurmctld_has_forgotten_is_told(tmp_path: Path) -> None:
    slurm = Slurm(dead())
    slurm.killed_after = 0
    with pytest.raises(Killed):
        turn(slurm, tmp_path)
    slurm.killed_after, slurm.jobs = -1, {}
    assert "slurmctld does not know it any more" in turn(slurm, tmp_path)[0]
    assert turn(slurm, tmp_path) == []


def test_without_a_broken_machine_one_question_is_all(tmp_path: Path) -> None:
    asked: list[str] = []
    slurm = Slurm(dead(), nodes=[node("w0")])

    def run(argv: Sequence[str]) -> str:
        asked.append(argv[0])
        return slurm(argv)

    Requeuer(run, True, 2, NOW, tmp_path / "jobs.json").turn()
    assert len(asked) == 1


def test_a_refused_change_of_one_users_job_holds_up_no_other_job(tmp_path: Path) -> None:
    """A job that its user changed meanwhile, or a node that was deleted: slurmctld refuses the exclusion for ever."""
    slurm = Slurm(dead(12, excluded_nodes="gone"), dead(13, user_name="bob"))
    lines = turn(slurm, tmp_path)
    assert slurm.jobs["13"]["excluded_nodes"] == "w0" and slurm.jobs["13"]["state_reason"] == "BeginTime"
    assert slurm.jobs["12"]["state_reason"] == "BeginTime", "it waits on no hold of the service"
    assert "job 12 does not exclude w0: Invalid node name" in lines[0]


def test_a_list_of_nodes_that_is_too_long_is_not_cut_in_the_middle_of_a_name(tmp_path: Path) -> None:
    slurm = Slurm(dead(12, excluded_nodes="w7," * 1364 + "w[100-200]"), dead(13, user_name="bob"))
    lines = turn(slurm, tmp_path)
    assert "its list of nodes has more than 4096 characters" in lines[0]
    assert slurm.jobs["12"]["job_state"] == ["FAILED"] and slurm.jobs["13"]["excluded_nodes"] == "w0"


def test_one_users_many_failed_jobs_keep_no_other_user_s_job_from_its_second_run(tmp_path: Path) -> None:
    many = [dead(number, user_name="mallory") for number in range(10_000, 10_000 + 2 * MOST_LOOKED)]
    slurm = Slurm(*many, dead(1000, user_name="bob"))
    turn(slurm, tmp_path, acts=False)
    records = load(tmp_path / "jobs.json")
    assert "1000" in records and len(records) == MOST_JOBS and slurm.shown == MOST_LOOKED
    turn(slurm, tmp_path, acts=False)
    assert len(load(tmp_path / "jobs.json")) == 2 * MOST_JOBS, "the next turn takes the next ones"


def test_many_victims_fill_no_disk_and_no_started_requeue_is_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requeue, "MOST_RECORDS", 3)
    slurm = Slurm(dead(1))
    slurm.killed_after = 1
    with pytest.raises(Killed):
        turn(slurm, tmp_path)
    for number in range(2, 7):
        victim = Slurm(slurm.jobs["1"], dead(number))
        Requeuer(victim, False, 2, NOW + number, tmp_path / "jobs.json", lambda line: None).turn()
    records = load(tmp_path / "jobs.json")
    assert set(records) == {"1", "5", "6"} and requeue.is_unfinished(records["1"])


def test_a_damaged_record_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "jobs.json").write_text('{"1": 5, "2": {"step": "x"}, "3": {"step": "over"}}')
    assert load(tmp_path / "jobs.json") == {}
    assert find_guilty_nodes(parse.parse_queue(json.dumps({"jobs": [dead(start_time=0)]}))[0], ()) == ()


def test_only_the_node_with_the_verdict_is_excluded(tmp_path: Path) -> None:
    nodes = [node("w0", BROKEN), node("w1", "looks odd to me"), node("w2"), node("w3")]
    slurm = Slurm(dead(nodes="w[0-1]", node_count=2), nodes=nodes)
    assert turn(slurm, tmp_path) and slurm.jobs["12"]["excluded_nodes"] == "w0"


def test_a_job_that_a_person_ran_again_meanwhile_is_not_requeued_for_the_run_before(tmp_path: Path) -> None:
    slurm = Slurm(dead())
    slurm.killed_after = 0
    with pytest.raises(Killed):
        turn(slurm, tmp_path)
    slurm.killed_after = -1
    slurm.nodes = [node("w0"), node("w1")]
    slurm.jobs["12"] |= {"restart_cnt": 1, "nodes": "w1"}
    assert turn(slurm, tmp_path) == [] and slurm.changes == []
