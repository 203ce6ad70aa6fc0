"""Questions to Slurm's clients: which, how many, whose jobs are shown, and answers that are odd or absent."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from health.jobs import output, parse
from health.jobs.ask import MOST, Asker, explain_own_jobs, find_pages
from health.jobs.explain import render_page
from health.jobs.model import JobCause
from init.errors import InitError
from init.slurm.client import SlurmError

NOW = 1_800_000_000.0


def number(value: int) -> dict[str, object]:
    return {"set": True, "infinite": False, "number": value}


def queued(job: int, state: str = "PENDING", **more: object) -> dict[str, object]:
    return {
        "job_id": job, "job_state": [state], "user_name": "alice", "name": "train", "partition": "main",
        "state_reason": "Resources", "submit_time": number(int(NOW) - 600), "start_time": number(int(NOW) - 500),
        "node_count": number(1), "cpus": number(1), "time_limit": number(60), "restart_cnt": 0,
        "array_job_id": number(0), "array_task_id": {"set": False, "infinite": False, "number": 0},
        "het_job_id": number(0), "account": "physics", "qos": "normal",
    } | more  # fmt: skip


def recorded(job: int, state: str, **more: object) -> dict[str, object]:
    return {
        "job_id": job, "user": "alice", "name": "train", "nodes": "w0", "partition": "main",
        "state": {"current": [state], "reason": "None"}, "exit_code": {"return_code": number(0), "signal": {}},
        "time": {"submission": NOW - 600, "start": NOW - 500, "end": NOW - 100, "limit": number(60)},
        "array": {"job_id": 0, "task_id": {"set": False}}, "het": {"job_id": 0}, "steps": [],
    } | more  # fmt: skip


class Slurm:
    """Answers of Slurm's clients by program; each call is kept."""

    def __init__(self, **answers: object) -> None:
        self.answers = answers
        self.calls: list[list[str]] = []

    def __call__(self, argv: Sequence[str]) -> str:
        self.calls.append(list(argv))
        words = " ".join(argv)
        name = Path(argv[0]).name
        key = next(
            (part for part in ("nodes", "partitions", "reservations", "licenses", "assoc_mgr") if part in words), ""
        )
        answer = self.answers.get(key if name == "scontrol" else name)
        if isinstance(answer, Exception):
            raise answer
        if callable(answer):
            answer = answer(argv)
        if isinstance(answer, str):
            return answer
        return json.dumps({{"scontrol": key}.get(name, "jobs"): answer or []})

    def asked(self, name: str) -> int:
        return sum(1 for argv in self.calls if Path(argv[0]).name == name)


def asker(slurm: Callable[[Sequence[str]], str], user: str = "alice", is_root: bool = False) -> Asker:
    return Asker(run=slurm, user=user, is_root=is_root, now=NOW)


def invalid() -> SlurmError:
    error = SlurmError("ask slurmctld", "slurm_load_jobs error: Invalid job id specified")
    error.output = "slurm_load_jobs error: Invalid job id specified"
    return error


@pytest.mark.parametrize(
    ("wanted", "jobs", "shown"),
    [
        ("12", [queued(12)], ["12"]),
        ("12_3", [queued(15, "RUNNING", array_job_id=number(12), array_task_id=number(3))], ["12_3"]),
        ("12_3", [queued(12, array_job_id=number(12), array_task_string="1-9%2")], ["12_3"]),
        ("12_3", [queued(12, array_job_id=number(12), array_task_string="1-9:2,20")], ["12_3"]),
        ("12", [queued(12, array_job_id=number(12), array_task_string="4-9"),
                queued(13, "RUNNING", array_job_id=number(12), array_task_id=number(1))], ["12_[4-9]", "12_1"]),
        ("12+1", [queued(12, het_job_id=number(12), het_job_offset=number(0)),
                  queued(13, het_job_id=number(12), het_job_offset=number(1))], ["12+1"]),
        ("12", [queued(12, het_job_id=number(12), het_job_offset=number(0)),
                queued(13, het_job_id=number(12), het_job_offset=number(1))], ["12+0", "12+1"]),
        ("12.0", [queued(12)], ["12"]),
        ("12_3.batch", [queued(15, "RUNNING", array_job_id=number(12), array_task_id=number(3))], ["12_3"]),
        ("train", [queued(12), queued(13, name="other")], ["12"]),
        ("train", [queued(12), queued(13)], ["12", "13"]),
    ],
)  # fmt: skip
def test_a_job_is_found_by_id_task_component_and_name(wanted: str, jobs: list[object], shown: list[str]) -> None:
    assert [item.job.shown for item in find_pages(asker(Slurm(squeue=jobs)), wanted)] == shown


@pytest.mark.parametrize("wanted", ["12_4", "99", "12+7", "nothing", "--all", "12;id", "a,b", "1" * 500])
def test_what_is_not_there_is_an_error_and_reaches_no_command(wanted: str) -> None:
    slurm = Slurm(squeue=[queued(12, array_job_id=number(12), array_task_string="1-3")] if wanted == "12_4" else [])
    with pytest.raises(InitError, match="keeps nothing" if wanted == "12_4" else "knows it"):
        find_pages(asker(slurm), wanted)
    assert all(wanted not in argv for argv in slurm.calls)  # never an argument of its own


def test_the_number_of_commands_is_bounded() -> None:
    reasons = ("Resources", "Dependency", "QOSGrpCpuLimit", "Licenses", "Reservation", "Priority")
    for reason in reasons:
        slurm = Slurm(
            squeue=[
                queued(12, state_reason=reason, restart_cnt=2, dependency="afterok:7(unfulfilled)", user_name="bob")
            ],
            sacctmgr="Operator\n",
        )
        find_pages(asker(slurm), "12")
        assert len(slurm.calls) <= MOST, (reason, slurm.calls)
    slurm = Slurm(squeue=[queued(job) for job in range(1, 500)])
    assert len(explain_own_jobs(asker(slurm))) == 499 and len(slurm.calls) == 1
    slurm = Slurm(squeue=[queued(12)])
    find_pages(asker(slurm), "12")
    assert len(slurm.calls) == 3
    limited = asker(Slurm())
    with pytest.raises(SlurmError, match="at most"):
        for _ in range(MOST + 1):
            limited.call("squeue")


def test_another_user_s_job_is_withheld_unless_the_caller_is_an_operator() -> None:
    secret = queued(12, user_name="bob", name="secret", admin_comment="minivm: x", standard_output="/home/bob/secret")
    slurm = Slurm(squeue=[secret], sacctmgr="None\n")
    (item,) = find_pages(asker(slurm), "12")
    assert "secret" not in render_page(item) and "bob" in render_page(item)
    assert not slurm.asked("sacct") and not slurm.asked("scontrol")
    assert "secret" in render_page(find_pages(asker(Slurm(squeue=[secret], sacctmgr="Operator\n")), "12")[0])
    assert "secret" in render_page(find_pages(asker(Slurm(squeue=[secret]), "root", True), "12")[0])
    # Without accounting nobody but root is an operator.
    assert "secret" not in render_page(
        find_pages(asker(Slurm(squeue=[secret], sacctmgr=SlurmError("a", "b"))), "12")[0]
    )
    ended = recorded(12, "FAILED", user="bob", name="secret")
    assert "secret" not in render_page(find_pages(asker(Slurm(squeue=invalid(), sacct=[ended], sacctmgr="")), "12")[0])
    assert [each.job.name for each in explain_own_jobs(asker(Slurm(squeue=[secret, queued(13)])))] == ["train"]


def test_an_ended_job_comes_from_accounting_also_when_slurmctld_has_forgotten_it() -> None:
    record = recorded(12, "CANCELLED", kill_request_user="root")
    (item,) = find_pages(asker(slurm := Slurm(squeue=invalid(), sacct=[record])), "12")
    assert "root cancelled it" in item.answer.headline and slurm.asked("sacct") == 1
    (item,) = find_pages(asker(Slurm(squeue=[queued(12, "CANCELLED")], sacct=[record])), "12")
    assert "root cancelled it" in item.answer.headline
    assert {fact.source for fact in item.answer.evidence if "state " in fact.text} == {"sacct"}
    # slurmdbd may lag behind.
    lagging = recorded(12, "RUNNING")
    (item,) = find_pages(asker(Slurm(squeue=[queued(12, "TIMEOUT")], sacct=[lagging])), "12")
    assert item.answer.cause is JobCause.LIMIT
    assert {fact.source for fact in item.answer.evidence if "state " in fact.text} == {"squeue"}


@pytest.mark.parametrize("state", ["RUNNING", "PENDING"])
def test_a_job_that_slurmctld_has_forgotten_before_its_end_is_lost(state: str) -> None:
    """A killed slurmctld forgets what it accepted in its last seconds; accounting never learns of an end."""
    (item,) = find_pages(asker(slurm := Slurm(squeue=invalid(), sacct=[recorded(12, state)])), "12")
    text = render_page(item)
    assert "Job 12 (train): LOST" in text and "Slurm has lost it" in text and "nothing is wrong" not in text
    assert "submit it again" in text and len(slurm.calls) == 3
    (item,) = find_pages(asker(Slurm(squeue=[], sacct=[recorded(12, state)])), "train")
    assert "Job 12 (train): LOST" in render_page(item), "also by its name"
    # Without an answer from slurmctld nothing is known of that.
    away = SlurmError("ask slurmctld", "slurm-controller cannot be reached")
    (item,) = find_pages(asker(slurm := Slurm(squeue=away, sacct=[recorded(12, state)])), "12")
    assert "LOST" not in render_page(item) and "slurm-controller cannot be reached" in render_page(item)
    if state == "PENDING":
        text = render_page(item)
        assert "slurmctld, which knows what it waits for, does not answer" in text and "scheduler" not in text
        assert "[squeue]" not in text, "accounting said it"
        assert len(slurm.calls) == 2, "a page of a slurmctld that hangs waits for it once"


@pytest.mark.parametrize("records", [[], [recorded(12, "PENDING")]])
@pytest.mark.parametrize("again", ["job 12 again, held:", "job 21 again, first job 12, held:"])
def test_a_lost_job_that_was_submitted_again_is_shown_by_its_old_number(
    records: list[dict[str, object]], again: str
) -> None:
    comment = f"minivm: {again} slurmctld was killed before it had saved that job. Run it: scontrol release"
    mine = [
        queued(34, admin_comment=comment, state_reason="JobHeldUser"),
        queued(35, admin_comment="minivm: job 1 again,"),
        queued(36, admin_comment=comment, user_name="eve"),
    ]

    class Back(Slurm):
        def __call__(self, argv: Sequence[str]) -> str:
            self.answers["squeue"] = mine if "--me" in argv else invalid()
            return super().__call__(argv)

    (item,) = find_pages(asker(Back(sacct=records)), "12")
    assert item.job.shown == "34" and again in render_page(item)
    if records:
        (item,) = find_pages(asker(Back(sacct=[recorded(12, "COMPLETED")])), "12")
        assert item.job.shown == "12", "that one has ended"


def test_a_job_that_was_cancelled_before_it_started_had_no_run() -> None:
    never = {
        "submission": NOW - 600,
        "eligible": NOW + 3000,
        "start": 0xFFFFFFFE,
        "end": NOW - 590,
        "limit": number(60),
    }
    record = recorded(12, "CANCELLED", kill_request_user="alice", nodes="None assigned", time=never)
    (item,) = find_pages(asker(Slurm(squeue=[queued(12, "CANCELLED", start_time=number(0))], sacct=[record])), "12")
    assert [event.text for event in item.timeline] == ["submitted", "ended: CANCELLED"]
    assert "requeued" not in render_page(item)


def test_a_task_that_was_cancelled_while_it_waited_is_in_the_record_of_its_array() -> None:
    def sacct(argv: Sequence[str]) -> str:
        if "--jobs=12_5" in argv:
            return json.dumps({"jobs": []})
        tasks = {"job_id": 12, "task_id": {"set": False}, "task": "0x3F0"}  # as 24.11 and 26.05 record it
        done = recorded(13, "COMPLETED", array={"job_id": 12, "task_id": number(1), "task": ""})
        return json.dumps({"jobs": [recorded(12, "CANCELLED", kill_request_user="alice", array=tasks), done]})

    (item,) = find_pages(asker(Slurm(squeue=invalid(), sacct=sacct)), "12_5")
    assert item.job.shown == "12_5" and item.job.state == "CANCELLED"
    (item,) = find_pages(asker(Slurm(squeue=invalid(), sacct=sacct)), "12_1")
    assert item.job.state == "COMPLETED"
    assert [each.job.shown for each in find_pages(asker(Slurm(squeue=invalid(), sacct=sacct)), "12")] == [
        "12_[4-9]",
        "12_1",
    ]
    why = r"job 12_3: Slurm knows 12_\[4-9\], 12_1 of its array, and keeps nothing of a task that was cancelled"
    with pytest.raises(InitError, match=why):
        find_pages(asker(Slurm(squeue=invalid(), sacct=sacct)), "12_3")
    # Without an answer from slurmctld that is not known.
    away = SlurmError("ask slurmctld", "slurm-controller cannot be reached")
    with pytest.raises(InitError, match=r"12_1 of its array; the queue: slurm-controller cannot be reached$"):
        find_pages(asker(Slurm(squeue=away, sacct=sacct)), "12_3")


@pytest.mark.parametrize(
    ("recorded_as", "shown"),
    [
        ("0xEA", "1,3,5-7"),
        ("0x1", "0"),
        ("0x1fffffffffffffffe", "1-64"),
        ("0x0", "0x0"),
        ("0x", "0x"),
        ("0xEG", "0xEG"),
        ("4-9%2", "4-9%2"),
    ],
)
def test_accounting_s_mask_of_waiting_tasks_is_written_as_people_write_it(recorded_as: str, shown: str) -> None:
    record = recorded(12, "CANCELLED", array={"job_id": 12, "task_id": {"set": False}, "task": recorded_as})
    assert parse.parse_accounting(json.dumps({"jobs": [record]}))[0].shown == f"12_[{shown}]"


@pytest.mark.parametrize(
    ("hosts", "ordered"),
    [
        ("w-[1,0]", "w-[0-1]"),
        ("w-[3,1-2,7]", "w-[1-3,7]"),
        ("a[2,1]b-[10,9]", "a[1-2]b-[9,10]"),
        ("w[002,001]", "w[001-002]"),
        ("w-[8-11,7]", "w-[8-11,7]"),
        ("w-[1,0", "w-[1,0"),
        ("w-[x,0]", "w-[x,0]"),
        ("w-1", "w-1"),
        ("", ""),
    ],
)
def test_nodes_are_listed_in_order(hosts: str, ordered: str) -> None:
    assert parse.order_names(hosts) == ordered


def test_only_idle_nodes_have_room_for_an_exclusive_job() -> None:
    def node(name: str, used: int) -> dict[str, object]:
        return {"name": name, "state": ["MIXED" if used else "IDLE"], "partitions": ["main"], "cpus": 8,
                "real_memory": 16000, "alloc_cpus": used}  # fmt: skip

    nodes = json.dumps({"nodes": [node("w0", 1), node("w1", 0)]})
    for shared, room in (([], 2), (["none"], 1), (["user"], 2)):
        (item,) = find_pages(asker(Slurm(squeue=[queued(12, shared=shared)], nodes=nodes)), "12")
        assert f"2 nodes can run it and {room} have room for it now" in render_page(item)


def test_no_accounting_and_no_controller_are_said() -> None:
    off = SlurmError("ask slurmctld", "Slurm accounting storage is disabled")
    with pytest.raises(InitError, match="keeps no accounting"):
        find_pages(asker(Slurm(squeue=invalid(), sacct=off)), "12")
    away = SlurmError("ask slurmctld", "slurm-controller cannot be reached")
    with pytest.raises(InitError, match="cannot be reached"):
        find_pages(asker(Slurm(squeue=away, sacct=away)), "12")
    (item,) = find_pages(asker(Slurm(squeue=away, sacct=[recorded(12, "COMPLETED")], nodes=away)), "12")
    assert item.answer.cause is JobCause.NONE and any("cannot be reached" in text for text in item.answer.unknown)


@pytest.mark.parametrize("text", ["", "[]", "null", '{"jobs": 7}', '{"jobs": [7, null, {}]}', "{", "[" * 100_000])
def test_odd_answers_make_no_traceback(text: str) -> None:
    for slurm in (Slurm(squeue=text, sacct=text), Slurm(squeue=[queued(12)], nodes=text, partitions=text)):
        try:
            find_pages(asker(slurm), "12")
        except InitError:
            continue


def test_values_of_every_odd_type_are_unknown() -> None:
    odd: list[Any] = [None, 7, -1, 1e400, "x", [], {}, [None], {"set": True, "number": "x"}, True, 1 << 80]
    plain = queued(12, "RUNNING")
    for key in [*plain, "exit_code", "tres_req_str", "tres_per_node", "stdout_expanded", "memory_per_node"]:
        for value in odd:
            parse.parse_queue(json.dumps({"jobs": [plain | {key: value}]}))
    record = recorded(12, "FAILED")
    for key in [*record, "tres", "comment", "required"]:
        for value in odd:
            parse.parse_accounting(json.dumps({"jobs": [record | {key: value}]}))
    for value in odd:
        parse.parse_nodes(json.dumps({"nodes": [{"name": value, "state": value, "real_memory": value, "gres": value}]}))


def test_the_output_s_age_is_of_the_caller_s_own_file_alone(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_text("")
    os.utime(path, (NOW - 60, NOW - 60))
    assert output.age(str(path), NOW - 100, NOW) == 60
    assert output.age(str(path), NOW - 30, NOW) is None  # older than the job: another file
    for absent in (str(tmp_path / "none"), "", "a\0b", "x" * 10_000):
        assert output.age(absent, 0, NOW) is None
    os.mkfifo(tmp_path / "fifo")
    output.age(str(tmp_path / "fifo"), 0, NOW)  # is never opened, so it does not wait
    (tmp_path / "link").symlink_to(tmp_path / "out")
    assert output.age(str(tmp_path / "link"), NOW - 100, NOW) == 60


LIMITS = """\
Current Association Manager state

Association Records

ClusterName=c Account=physics UserName= Partition= Priority=0 ID=4
    SharesRaw/Norm/Level/Factor=1/0.50/2/0.00
    GrpJobs=2(1) GrpJobsAccrue=N(0)
    GrpSubmitJobs=N(3) GrpWall=60(12.50)
    GrpTRES=cpu=4(2),mem=N(100),gres/gpu=8(8)
    GrpTRESMins=cpu=N(1)
    MaxJobs= MaxJobsAccrue= MaxSubmitJobs= MaxWallPJ=
    MaxTRESPJ=cpu=2
    Comment=of GrpSubmitJobs=1(1)
ClusterName=c Account=physics UserName=alice(20001) Partition= Priority=0 ID=5
    MaxJobs=1(1) MaxWallPJ=30
ClusterName=c Account=physics UserName=bob(20002) Partition= Priority=0 ID=6
    MaxJobs=7(7)

QOS Records

QOS=normal(1)
    UsageRaw=0.000000
    GrpTRES=cpu=16(3)
    MaxTRESPJ=
    Account Limits
      physics
        MaxJobsPA=5(2) MaxTRESPA=cpu=6(2)
    User Limits
      alice(20001)
        MaxJobsPU=3(1) MaxTRESPU=cpu=4(3),mem=N(5)
      bob(20002)
        MaxJobsPU=3(2)
"""


def test_limits_are_read_with_their_use_and_none_of_another_user() -> None:
    found = {
        (each.holder, each.key, each.resource): (each.limit, each.used) for each in parse.parse_limits(LIMITS, "alice")
    }
    assert found == {
        ("account physics", "GrpJobs", ""): (2, 1),
        ("account physics", "GrpWall", ""): (60, 12),
        ("account physics", "GrpTRES", "cpu"): (4, 2),
        ("account physics", "GrpTRES", "gres/gpu"): (8, 8),
        ("account physics", "MaxTRESPJ", "cpu"): (2, None),
        ("user alice in account physics", "MaxJobs", ""): (1, 1),
        ("user alice in account physics", "MaxWallPJ", ""): (30, None),
        ("QOS normal", "GrpTRES", "cpu"): (16, 3),
        ("QOS normal for account physics", "MaxJobsPA", ""): (5, 2),
        ("QOS normal for account physics", "MaxTRESPA", "cpu"): (6, 2),
        ("QOS normal for user alice", "MaxJobsPU", ""): (3, 1),
        ("QOS normal for user alice", "MaxTRESPU", "cpu"): (4, 3),
    }


def test_the_figures_of_steps_are_read() -> None:
    text = "12.batch|cpu=00:01:30,energy=0,mem=8744960,pages=1\n12.0|cpu=1-00:00:00,mem=5\nbad\n12.1|\n"
    assert parse.parse_usage(text) == (("12.batch", 8744960, 90.0), ("12.0", 5, 86400.0))


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("gres/gpu:h100:2", (("gpu:h100", 2),)),
        ("gres:gpu:2", (("gpu", 2),)),
        ("gpu:h100:8(S:0-1),nvme:4", (("gpu:h100", 8), ("nvme", 4))),
        ("gres/gpu", (("gpu", 1),)),
        ("", ()),
        ("((((,:=", ()),
    ],
)
def test_generic_resources(text: str, parsed: object) -> None:
    assert parse.parse_gres(text) == parsed


def test_a_job_whose_account_is_wrong_shows_the_accounts_of_its_user() -> None:
    slurm = Slurm(squeue=[queued(12, state_reason="InvalidAccount")], sacctmgr="physics\nchem\nphysics\n")
    (item,) = find_pages(asker(slurm), "12")
    assert "user alice may use physics, chem" in [fact.text for fact in item.answer.evidence]
    assert ["/usr/bin/sacctmgr", "-nP", "show", "associations", "where", "user=alice", "format=account"] in slurm.calls
