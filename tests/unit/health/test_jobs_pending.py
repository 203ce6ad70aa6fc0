"""Every reason for which a job waits: the sentence, the class of its cause, the numbers and the nodes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from health.jobs.explain import explain, render_page
from health.jobs.model import (
    Answer,
    Job,
    JobCause,
    JobNode,
    License,
    Partition,
    Reservation,
    Sure,
    UsageLimit,
    WaitingJob,
    World,
)
from health.jobs.parse import parse_waiting

NOW = 1_800_000_000.0
# Every reason of Slurm 24.11 and 26.05 (job_state_reason.c) but those for invalid numbers.
REASONS = (Path(__file__).resolve().parents[2] / "recordings/jobs/reasons").read_text().split()
# Reasons of jobs that have ended or run.
OF_ENDS = {"NonZeroExitCode", "RaisedSignal", "InactiveLimit", "OutOfMemory"}
JOB = Job(
    id=12,
    shown="12",
    name="train",
    user="alice",
    account="physics",
    partition="main",
    qos="normal",
    states=frozenset({"PENDING"}),
    submitted=NOW - 600,
    eligible=NOW - 600,
    limit=60,
    node_count=1,
    cpus=2,
    memory_per_node=1024,
    memory="1G",
)
NODE = JobNode(
    name="w0",
    states=frozenset({"IDLE"}),
    partitions=frozenset({"main"}),
    cpus=8,
    memory=16384,
    features=frozenset({"h100"}),
    gres=(("gpu:h100", 4),),
)
SECOND = replace(NODE, name="w1")
DRAINED = replace(
    NODE,
    states=frozenset({"IDLE", "DRAIN"}),
    reason="minivm: gpu_count[rma]@9f2c: 7 of 8 GPUs answer",
    author="root",
    since=NOW - 3600,
)
MAIN = Partition(name="main", states=frozenset({"UP"}), max_minutes=600, max_nodes=2, min_nodes=1, total_nodes=2)


def why(reason: str, world: World | None = None, **changes: Any) -> Answer:
    job = replace(JOB, reason=reason, **changes)
    return explain(job, world or World(nodes=(NODE, SECOND), partitions=(MAIN,)), NOW).answer


def facts(answer: Answer) -> str:
    return "\n".join(fact.text for fact in answer.evidence)


@pytest.mark.parametrize("reason", [reason for reason in REASONS if reason not in OF_ENDS])
def test_every_reason_has_a_sentence_and_a_cause(reason: str) -> None:
    answer = why(reason)
    assert answer.cause is not JobCause.UNKNOWN and "does not know" not in answer.headline, answer
    assert answer.headline[0].isupper() and answer.headline.endswith(".")
    assert facts(answer).startswith(f"the reason is {reason}")


def test_a_wrong_account_is_answered_with_those_that_the_user_may_use() -> None:
    answer = why("InvalidAccount", World(accounts=("physics", "chem")), account="nope")
    assert "its account is nope" in facts(answer) and "user alice may use physics, chem" in facts(answer)
    assert answer.advice == ("choose another account: scontrol update jobid=12 account=...",)
    answer = why("AccountNotAllowed", World(accounts=()), account="nope")
    assert "user alice is in no account" in facts(answer) and answer.advice[-1].startswith("ask an operator")
    assert "may use" not in facts(why("InvalidAccount", World()))


def test_a_dependency_on_an_array_names_the_task_that_failed() -> None:
    """Every task has a job id of its own; the first that squeue lists may be one that ended well."""
    tasks = [replace(JOB, id=20 + task, shown=f"8_{task}", states=frozenset({"COMPLETED"})) for task in (1, 2, 4)]
    tasks.append(replace(JOB, id=8, shown="8_3", states=frozenset({"FAILED"}), exit_code=3))
    answer = why("DependencyNeverSatisfied", World(related_jobs=tuple(tasks)), dependency="afterok:8_*(failed)")
    assert "job 8_3 is failed with exit code 3" in facts(answer), answer
    gone = why("DependencyNeverSatisfied", World(related_jobs=()), dependency="afterok:8_*(failed)")
    assert "minivm job 8" in facts(gone)


def test_an_unknown_reason_is_said_to_be_unknown() -> None:
    answer = why("FromTheFuture")
    assert answer.cause is JobCause.UNKNOWN and "FromTheFuture" in answer.headline


@pytest.mark.parametrize("reason", ["Resources", "BadConstraints", "ReqNodeNotAvail", "Priority", "PartitionNodeLimit"])
def test_a_request_that_no_node_can_satisfy_names_the_nearest(reason: str) -> None:
    small = replace(NODE, name="small", memory=4096)
    answer = why(reason, World(nodes=(small, SECOND), partitions=(MAIN,)), memory_per_node=900 * 1024)
    assert answer.cause is JobCause.REQUEST and answer.sure is Sure.CERTAIN
    assert "No node of partition main can ever run it. The nearest, w1, has 16 GiB" in answer.headline
    assert "needs 900 GiB" in answer.headline
    assert any("--mem=16384M" in advice for advice in answer.advice), answer.advice
    assert (f"then scontrol release {JOB.shown}" in answer.advice) is (reason == "BadConstraints")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"cpus_per_task": 64}, "has 8 CPUs and the job needs 64"),
        ({"cpus": 64, "single_node": True}, "has 8 CPUs and the job needs 64"),
        ({"memory_per_node": 0, "memory_per_cpu": 8192, "cpus_per_task": 4}, "the job needs 32 GiB"),
        ({"gres_per_node": (("gpu", 8),)}, "has 4 of gpu and the job needs 8"),
        ({"gres_per_node": (("gpu:a100", 1),)}, "has 0 of gpu:a100"),
        ({"features": "h100&ib"}, "lacks the feature ib"),
        ({"node_count": 3}, "It needs 3 nodes, and partition main has 2"),
        ({"cpus": 17}, "It needs 3 nodes, and partition main has 2"),
        ({"required": "w7"}, "is not among the nodes that the job names"),
        ({"partition": "gpu"}, "partition gpu has no nodes"),
    ],
)
def test_what_the_nearest_node_lacks(changes: dict[str, Any], words: str) -> None:
    answer = why("Resources", **changes)
    assert words in answer.headline, answer


def test_a_request_that_fits_is_never_called_impossible() -> None:
    for changes in (
        {"gres_per_node": (("gpu", 4),)},
        {"gres_per_node": (("gpu:h100", 4),)},
        {"features": "h100"},
        {"cpus": 16},
        {"memory_per_node": 16384},
        {"node_count": 2},
        {"required": "w[0-1]"},
        {"excluded": "w0"},
        {"features": "h100|a100"},
        {"features": "[rack1*2&rack2*2]"},
    ):
        assert "waits until running jobs" in why("Resources", **changes).headline, changes


def test_a_drained_node_is_named_with_its_reason_and_is_the_machine_s_fault() -> None:
    world = World(nodes=(DRAINED, replace(SECOND, memory=100)))
    answer = why("ReqNodeNotAvail", world, detail="ReqNodeNotAvail, UnavailableNodes:w0")
    assert answer.cause is JobCause.MACHINE and answer.sure is Sure.CERTAIN
    assert "it needs 1, 0 of 1 that fit take jobs; w0 cannot be used now" in answer.headline
    assert "w0 is drained: minivm: gpu_count[rma]@9f2c: 7 of 8 GPUs answer (by root, since" in facts(answer)


@pytest.mark.parametrize(
    ("reason", "cause", "sure"),
    [
        ("new disk on Monday", JobCause.PERSON, Sure.LIKELY),
        ("minivm: pod stops", JobCause.CLUSTER, Sure.CERTAIN),
        ("minivm: fleet: cordon: spot notice", JobCause.CLUSTER, Sure.CERTAIN),
        ("Not responding", JobCause.MACHINE, Sure.LIKELY),
        ("Prolog error", JobCause.MACHINE, Sure.LIKELY),
    ],
)
def test_the_drain_s_author_decides_the_class(reason: str, cause: JobCause, sure: Sure) -> None:
    answer = why("Resources", World(nodes=(replace(DRAINED, reason=reason),)))
    assert (answer.cause, answer.sure) == (cause, sure) and reason in facts(answer)


def test_a_drained_node_is_not_blamed_while_another_fits() -> None:
    answer = why("Resources", World(nodes=(DRAINED, SECOND)))
    assert answer.cause is JobCause.CLUSTER and "running jobs free" in answer.headline


def test_an_elastic_pool_is_said_to_grow() -> None:
    asleep = replace(DRAINED, reason="minivm: fleet: idle: idle for 600 s, slurm-gpu grows again when jobs ask")
    answer = why("ReqNodeNotAvail", World(nodes=(asleep,)), detail="ReqNodeNotAvail, UnavailableNodes:w0")
    assert answer.cause is JobCause.CLUSTER and "the fleet starts" in answer.headline


@pytest.mark.parametrize(
    ("reason", "limit", "words"),
    [
        (
            "QOSMaxCpuPerUserLimit",
            UsageLimit("QOS normal for user alice", "MaxTRESPU", "cpu", 4, 3),
            "MaxTRESPU cpu is 4, in use 3; the job asks for 2",
        ),
        (
            "QOSGrpGRES",
            UsageLimit("QOS normal", "GrpTRES", "gres/gpu", 8, 8),
            "QOS normal: GrpTRES gres/gpu is 8, in use 8",
        ),
        (
            "AssocGrpMemLimit",
            UsageLimit("account physics", "GrpTRES", "mem", 2048, 1536),
            "is 2 GiB, in use 1.5 GiB; the job asks for 1G",
        ),
        (
            "AssocMaxJobsLimit",
            UsageLimit("user alice in account physics", "MaxJobs", "", 1, 1),
            "MaxJobs is 1, in use 1",
        ),
        (
            "QOSMaxWallDurationPerJobLimit",
            UsageLimit("QOS normal", "MaxWallPJ", "", 30),
            "MaxWallPJ is 30 min; the job asks for 1 h",
        ),
        (
            "AssocGrpCPUMinutesLimit",
            UsageLimit("account physics", "GrpTRESMins", "cpu", 100, 99),
            "GrpTRESMins cpu is 100, in use 99",
        ),
        (
            "MaxGRESPerAccount",
            UsageLimit("QOS normal for account physics", "MaxTRESPA", "gres/gpu", 2, 2),
            "MaxTRESPA gres/gpu is 2",
        ),
    ],
)
def test_a_limit_is_told_with_its_number_and_its_use(reason: str, limit: UsageLimit, words: str) -> None:
    other = UsageLimit("QOS normal", "GrpTRES", "node", 1, 1)
    answer = why(reason, World(limits=(other, replace(limit, key="MaxOther", limit=77777), limit)))
    assert answer.cause is JobCause.LIMIT and words in facts(answer), answer
    assert "GrpTRES node" not in facts(answer) and "77777" not in facts(answer) and "MaxOther" not in facts(answer)
    assert any("number" in text for text in why(reason, World(limits=())).unknown)


def test_a_limit_of_one_job_can_not_be_waited_for() -> None:
    assert why("QOSMaxCpuPerJobLimit").headline.startswith("It cannot start as it is")
    assert why("QOSGrpCpuLimit").headline.startswith("It waits")


@pytest.mark.parametrize(
    ("reason", "changes", "world", "words", "cause"),
    [
        (
            "Dependency",
            {"dependency": "afterok:7(unfulfilled)"},
            World(related_jobs=(replace(JOB, id=7, states=frozenset({"RUNNING"})),)),
            "It waits for job 7.",
            JobCause.REQUEST,
        ),
        (
            "DependencyNeverSatisfied",
            {"dependency": "afterok:7(failed)"},
            World(),
            "a job that it depends on did not end as required (afterok:7).",
            JobCause.REQUEST,
        ),
        (
            "Dependency",
            {"dependency": "afterok:7(failed),afterany:8(unfulfilled)"},
            World(),
            "never start",
            JobCause.REQUEST,
        ),
        (
            "Dependency",
            {"dependency": "singleton(unfulfilled)"},
            World(),
            "earlier jobs of the same name",
            JobCause.REQUEST,
        ),
        (
            "Dependency",
            {"dependency": "after:43+5(unfulfilled)"},
            World(),
            "It waits for 5 min after the start of job 43.",
            JobCause.REQUEST,
        ),
        ("JobHeldUser", {}, World(), "held by its user (alice)", JobCause.PERSON),
        ("JobHeldAdmin", {}, World(), "held by an operator", JobCause.PERSON),
        (
            "JobHeldAdmin",
            {"detail": "launch failed requeued held"},
            World(nodes=(DRAINED,), history=(replace(JOB, nodes="w0"),)),
            "its launch failed on w0",
            JobCause.MACHINE,
        ),
        (
            "JobHeldAdmin",
            {"detail": "launch failed requeued held"},
            World(nodes=(replace(DRAINED, reason="Duplicate jobid"),), history=(replace(JOB, nodes="w0"),)),
            "slurmctld was killed just after it had started it on w0, started it again",
            JobCause.CLUSTER,
        ),
        (
            "JobHeldUser",
            {"admin_comment": "minivm: job 51 again, held: slurmctld was killed before it had saved that job"},
            World(),
            "slurmctld was killed before it had saved job 51, which may have run.",
            JobCause.CLUSTER,
        ),
        ("JobHeldUser", {"detail": "job_requeued_in_held_state"}, World(), "held after a requeue", JobCause.PERSON),
        ("BeginTime", {"eligible": NOW + 7200}, World(), "(in 2 h) because of --begin", JobCause.REQUEST),
        ("BeginTime", {"started": NOW + 100, "restarts": 1}, World(), "It was requeued and waits", JobCause.CLUSTER),
        (
            "PartitionTimeLimit",
            {"limit": 900},
            World(partitions=(MAIN,)),
            "longer than the partition allows",
            JobCause.LIMIT,
        ),
        (
            "PartitionDown",
            {},
            World(partitions=(replace(MAIN, states=frozenset()),)),
            "switched off partition main",
            JobCause.PERSON,
        ),
        (
            "PartitionNodeLimit",
            {"node_count": 2},
            World(nodes=(NODE, SECOND), partitions=(replace(MAIN, max_nodes=1),)),
            "more or fewer nodes",
            JobCause.LIMIT,
        ),
        (
            "Reservation",
            {"reservation": "course"},
            World(reservations=(Reservation("course", "w0", NOW + 3600, NOW + 7200),)),
            "begins in 1 h",
            JobCause.REQUEST,
        ),
        (
            "Reservation",
            {"reservation": "course"},
            World(reservations=(Reservation("course", "w0", NOW - 3600, NOW + 7200),)),
            "free nodes in its reservation",
            JobCause.CLUSTER,
        ),
        ("Reservation", {"reservation": "gone"}, World(reservations=()), "does not exist", JobCause.REQUEST),
        (
            "Licenses",
            {"licenses": "matlab:2"},
            World(licenses=(License("matlab", 4, 3),)),
            "asks for matlab:2",
            JobCause.LIMIT,
        ),
        ("JobArrayTaskLimit", {"task_limit": 2}, World(), "limits how many run (2 at a time)", JobCause.REQUEST),
        ("Priority", {}, World(nodes=(NODE,)), "higher priority", JobCause.CLUSTER),
        ("None", {}, World(nodes=(NODE,)), "has not looked", JobCause.CLUSTER),
        (
            "None",
            {"states": frozenset({"PENDING", "COMPLETING"}), "nodes": "w1"},
            World(nodes=(NODE,)),
            "until its last run is cleaned up on w1",
            JobCause.CLUSTER,
        ),
        ("InvalidQOS", {}, World(), "its QOS does not exist", JobCause.REQUEST),
    ],
)
def test_each_other_way_to_wait(
    reason: str, changes: dict[str, Any], world: World, words: str, cause: JobCause
) -> None:
    answer = why(reason, world, **changes)
    assert words in answer.headline and answer.cause is cause, answer


def waits(number: int, priority: int, partitions: str = "main", reason: str = "Priority") -> WaitingJob:
    return WaitingJob(number, str(number), priority, frozenset(partitions.split(",")), reason)


def test_the_jobs_before_one_are_those_that_slurm_takes_first() -> None:
    before = (waits(3, 100), waits(20, 70, reason="Resources"), waits(11, 50, "big,main"), waits(13, 90, "other"))
    behind = (waits(13, 50), waits(2, 10), waits(4, 900, reason="Dependency"), waits(5, 0, reason="JobHeldUser"))
    world = World(nodes=(NODE,), waiting=(*behind, waits(12, 50), *before))
    text = "3 waiting jobs are before it: the next is 11 with priority 50, the first 3 with 100; its own is 50"
    assert text in facts(why("Priority", world))
    alone = why("Priority", replace(world, waiting=(waits(12, 50), *behind)))
    assert "which jobs are before it: none that waits in partition main" in alone.unknown
    # As where PrivateData hides jobs, or of a job that is younger than the list.
    for hidden in ((), before):
        answer = why("Priority", replace(world, waiting=hidden))
        assert "before it:" not in facts(answer) and any("hidden" in text for text in answer.unknown)
    assert not [text for text in why("Priority", replace(world, waiting=None)).unknown if "before it" in text]


def test_hostile_lines_of_the_queue_are_left_out_or_harmless() -> None:
    lines = ["12|12|50|main|Priority", "7|7_[\x1b[31m]|60|main|Priority", "x|1|1|main|Priority", "8|8|9|main", "|" * 9]
    listed = parse_waiting("\n".join(lines))
    assert [job.id for job in listed] == [12, 7]
    assert "\x1b" not in facts(why("Priority", World(nodes=(NODE,), waiting=listed)))


def test_what_minivm_noted_is_shown_and_a_site_s_own_comment_is_not() -> None:
    assert "the pod of node w0 stops" in facts(why("BeginTime", admin_comment="minivm: the pod of node w0 stops"))
    assert "Ann" not in facts(why("BeginTime", admin_comment="billed to Ann"))


def test_nodes_reserved_for_maintenance() -> None:
    world = World(nodes=(NODE,), reservations=(Reservation("service", "w[0-1]", NOW, NOW + 3600),))
    answer = why("ReqNodeNotAvail", world, detail="ReqNodeNotAvail, Reserved for maintenance")
    assert "are reserved" in answer.headline and "reservation service: w[0-1]" in facts(answer)


def test_numbers_stand_in_the_evidence() -> None:
    licences = World(licenses=(License("matlab", 4, 3, 1), License("other", 1, 1)))
    assert "matlab: 3 of 4 in use, 1 reserved" in (text := facts(why("Licenses", licences, licenses="matlab:2")))
    assert "other" not in text
    assert "allows 10 h; it asks for 15 h" in facts(why("PartitionTimeLimit", limit=900))
    answer = why("Dependency", World(related_jobs=()), dependency="afterok:7(unfulfilled)")
    assert "job 7 has ended and left" in facts(answer)


def test_the_start_is_told_where_slurm_has_an_estimate() -> None:
    assert "in 2 h" in facts(why("Resources", started=NOW + 7200))
    assert not any("no estimate" in text for text in why("Resources", started=NOW + 7200).unknown)
    assert any("no estimate" in text for text in why("Resources").unknown)
    endless = why("Resources", started=NOW + 40 * 366 * 86400)
    assert "expects" not in facts(endless) and any("without time limit" in text for text in endless.unknown)


def test_hostile_text_reaches_no_terminal() -> None:
    bad = "\x1b]0;owned\x07\x1b[2J\u202e\r\n  Cause: a person" + "A" * 100_000
    job = replace(
        JOB,
        name=bad,
        detail=bad,
        dependency=bad,
        licenses=bad,
        partition="main",
        account=bad,
        user=bad,
        required=bad,
    )
    node = replace(DRAINED, name="w0", reason=bad, author=bad)
    for reason in REASONS:
        shown = render_page(explain(replace(job, reason=reason), World(nodes=(node,), partitions=(MAIN,)), NOW))
        assert all(letter.isprintable() or letter == "\n" for letter in shown)
        assert len(shown) < 10_000 and shown.count("\n  Cause: ") == 1


def test_a_partition_that_refuses_the_job_says_what_it_refuses() -> None:
    closed = replace(MAIN, accounts="chem,bio")
    answer = why("PartitionConfig", World(partitions=(closed,)))
    assert answer.headline == "It cannot start: partition main does not take its account, physics."
    assert "partition main: AllowAccounts chem,bio" in facts(answer) and answer.cause is JobCause.REQUEST
    for partition, words in (
        (replace(MAIN, denied_accounts="physics"), "does not take its account"),
        (replace(MAIN, allowed_qos="fast"), "does not take its QOS, normal"),
        (replace(MAIN, accounts="physics", allowed_qos="normal", denied_accounts="phys"), "does not allow the request"),
    ):
        assert words in why("PartitionConfig", World(partitions=(partition,))).headline


def test_a_reservation_of_other_nodes_does_not_hide_a_drained_node_that_the_job_names() -> None:
    later = Reservation("later", "w1", NOW + 3600, NOW + 7200)
    world = World(nodes=(DRAINED, SECOND), reservations=(later,))
    detail = "ReqNodeNotAvail, May be reserved for other job"
    answer = why("ReqNodeNotAvail", world, detail=detail, required="w0")
    assert "nodes that take no jobs" in answer.headline and answer.cause is JobCause.MACHINE
    assert "are reserved" in why("ReqNodeNotAvail", world, detail=detail, required="w1").headline


def test_a_held_job_has_no_time_of_start() -> None:
    """Slurm keeps the estimate from before the hold, such as the end of a requeued job's pause."""
    waits = why("Priority", World(), started=NOW + 60)
    held = why("JobHeldUser", World(), started=NOW + 60, detail="launch failed requeued held")
    assert "expects to start" in str(waits.evidence)
    assert "expects to start" not in str(held.evidence) and "when it starts" not in str(held.unknown)
