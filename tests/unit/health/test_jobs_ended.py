"""Every way for a job to end or run: the sentence, the class of its cause, and how sure that is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from health.jobs.explain import as_json, explain, render_page, render_table, withhold
from health.jobs.model import Answer, Job, JobCause, JobNode, JobStep, Sure, World

NOW = 1_800_000_000.0
JOB = Job(
    id=12, shown="12", name="train", user="alice", account="physics", partition="main", submitted=NOW - 4000,
    eligible=NOW - 4000, started=NOW - 3700, ended=NOW - 100, limit=60, nodes="w0", node_count=1, cpus=2, memory="200M",
    memory_per_node=200, output="/home/alice/out.txt",
)  # fmt: skip
NODE = JobNode(name="w0", states=frozenset({"IDLE"}), partitions=frozenset({"main"}), cpus=8, memory=16384)
SICK = replace(
    NODE, states=frozenset({"IDLE", "DRAIN"}), reason="minivm: xid[reboot]@9f2c: XID 79", author="root", since=NOW - 60
)
ROWS: list[tuple[str, dict[str, Any], str, JobCause, Sure]] = [
    ("COMPLETED", {}, "It ended well", JobCause.NONE, Sure.CERTAIN),
    ("FAILED", {"exit_code": 3}, "Its own program ended with exit code 3.", JobCause.CODE, Sure.LIKELY),
    ("FAILED", {"signal": 1, "nodes": "", "reason": "BadConstraints"}, "refused it", JobCause.REQUEST, Sure.LIKELY),
    ("FAILED", {"exit_code": 127}, "a command was not found", JobCause.CODE, Sure.LIKELY),
    ("FAILED", {"exit_code": 139}, "died of SIGSEGV", JobCause.CODE, Sure.LIKELY),
    ("FAILED", {"signal": 7}, "died of SIGBUS", JobCause.CODE, Sure.LIKELY),
    ("FAILED", {"signal": 9}, "killed by SIGKILL", JobCause.UNKNOWN, Sure.POSSIBLE),
    ("FAILED", {"exit_code": 137}, "killed by SIGKILL", JobCause.UNKNOWN, Sure.POSSIBLE),
    ("FAILED", {"signal": 53}, "could not open its output file", JobCause.REQUEST, Sure.LIKELY),
    ("FAILED", {"exit_code": 1, "reason": "SystemFailure"}, "its own code did not run", JobCause.CLUSTER,
     Sure.LIKELY),
    (
        "FAILED", {"exit_code": 1, "steps": (JobStep("12.0", "OUT_OF_MEMORY", 0, 0),)},
        "Its step 12.0 was killed because the job used all of its memory, 200M", JobCause.REQUEST, Sure.LIKELY,
    ),
    (
        "FAILED", {"exit_code": 1, "steps": (JobStep("12.0", "OUT_OF_MEMORY", 0, 0, memory=20),)},
        "Its step 12.0 was killed because it used all of its own memory, 20M of the job's 200M.", JobCause.REQUEST,
        Sure.LIKELY,
    ),
    (
        "FAILED", {"exit_code": 1, "memory": "1.50G", "steps": (JobStep("12.0", "OUT_OF_MEMORY", 0, 0, memory=1536),)},
        "because the job used all of its memory, 1.50G", JobCause.REQUEST, Sure.LIKELY,
    ),
    ("FAILED", {"exit_code": 2, "steps": (JobStep("12.batch", "FAILED", 2, 0), JobStep("12.1", "FAILED", 2, 0))},
     "exit code 2, first in step 12.1", JobCause.CODE, Sure.LIKELY),
    ("FAILED", {"exit_code": 125}, "A container of it was not started", JobCause.REQUEST, Sure.LIKELY),
    ("OUT_OF_MEMORY", {}, "It used all of its memory, 200M in all", JobCause.REQUEST, Sure.CERTAIN),
    ("TIMEOUT", {}, "It reached its time limit of 1 h after 1 h.", JobCause.LIMIT, Sure.CERTAIN),
    ("TIMEOUT", {"reason": "InactiveLimit"}, "salloc or srun did not answer", JobCause.LIMIT, Sure.CERTAIN),
    ("NODE_FAIL", {"failed_node": "w0"}, "slurmctld lost w0", JobCause.MACHINE, Sure.CERTAIN),
    ("NODE_FAIL", {"nodes": "w[0-3]", "node_count": 4}, "lost one of w[0-3]", JobCause.MACHINE, Sure.LIKELY),
    ("PREEMPTED", {}, "preemption", JobCause.CLUSTER, Sure.CERTAIN),
    ("BOOT_FAIL", {"exit_code": 1, "reason": "JobLaunchFailure"}, "nodes could not be configured", JobCause.UNKNOWN,
     Sure.POSSIBLE),
    ("DEADLINE", {}, "before its --deadline", JobCause.REQUEST, Sure.CERTAIN),
    ("CANCELLED", {"killer": "alice"}, "Its own user, alice, cancelled it while it ran.", JobCause.PERSON,
     Sure.CERTAIN),
    ("CANCELLED", {"killer": "carol"}, "carol cancelled it", JobCause.PERSON, Sure.CERTAIN),
    ("CANCELLED", {"killer": "root"}, "an operator, or Slurm itself", JobCause.PERSON, Sure.POSSIBLE),
    ("CANCELLED", {"killer": "alice", "nodes": "", "started": 0}, "before it started", JobCause.PERSON, Sure.CERTAIN),
    ("CANCELLED", {}, "It was cancelled while it ran.", JobCause.PERSON, Sure.LIKELY),
    (
        "CANCELLED", {"killer": "root", "admin_comment": "minivm: the pod of node w0 stops: the job is requeued"},
        "minivm ended it: the pod of node w0 stops", JobCause.CLUSTER, Sure.CERTAIN,
    ),
    (
        "CANCELLED", {"killer": "root", "admin_comment": "minivm: the job was over its memory limit of 200 MiB"},
        "over its memory limit of 200 MiB", JobCause.REQUEST, Sure.CERTAIN,
    ),
    (
        "CANCELLED", {"killer": "alice", "admin_comment": "minivm: the pod of node w0 stops: the job is requeued"},
        "Its own user, alice, cancelled it", JobCause.PERSON, Sure.CERTAIN,
    ),
    (
        "CANCELLED", {"killer": "root", "nodes": "", "admin_comment": "minivm: its srun waited while"},
        "minivm ended it: its srun waited while", JobCause.CLUSTER, Sure.CERTAIN,
    ),
    (
        "CANCELLED",
        {"killer": "root", "nodes": "", "restarts": 1, "admin_comment": "minivm: the pod of node w0 stops"},
        "root cancelled it before it started", JobCause.PERSON, Sure.POSSIBLE,
    ),
    ("REVOKED", {}, "Another cluster", JobCause.NONE, Sure.CERTAIN),
]  # fmt: skip


def ended(state: str, world: World | None = None, **changes: Any) -> Answer:
    job = replace(JOB, states=frozenset({state}), **changes)
    return explain(job, world or World(nodes=(NODE,)), NOW).answer


def facts(answer: Answer) -> str:
    return "\n".join(fact.text for fact in answer.evidence)


@pytest.mark.parametrize(("state", "changes", "words", "cause", "sure"), ROWS)
def test_each_end(state: str, changes: dict[str, Any], words: str, cause: JobCause, sure: Sure) -> None:
    answer = ended(state, **changes)
    assert words in answer.headline and (answer.cause, answer.sure) == (cause, sure), answer
    assert facts(answer).startswith(f"state {state}, exit code")


@pytest.mark.parametrize(("since", "is_twice"), [(NOW, True), (NOW - 30, True), (NOW - 3600, False)])
def test_a_second_start_after_a_kill_of_slurmctld_is_no_person_s_doing(since: float, is_twice: bool) -> None:
    node = replace(NODE, states=frozenset({"IDLE", "DRAIN"}), reason="Duplicate jobid", author="slurm", since=since)
    answer = ended("CANCELLED", World(nodes=(node,)), killer="root", ended=NOW)
    assert ("slurmctld was killed just after it had started it" in answer.headline) is is_twice
    assert answer.cause is (JobCause.CLUSTER if is_twice else JobCause.PERSON)


def test_a_job_that_a_node_could_not_launch_was_cancelled_by_no_person() -> None:
    """slurmd cancels it as root. Accounting keeps no reason; its batch step has neither a code nor a signal."""
    began, never = JobStep("12.batch", "CANCELLED", 0, 15), JobStep("12.batch", "CANCELLED", 0, 0, has_code=False)
    for changes in ({"steps": (never,)}, {"reason": "Prolog"}):
        answer = ended("CANCELLED", World(nodes=(SICK,)), killer="root", started=JOB.ended - 2, **changes)
        assert (answer.cause, answer.sure) == (JobCause.MACHINE, Sure.LIKELY), answer
        assert "launch failed on w0" in answer.headline and "XID 79" in facts(answer)
        assert any("--exclude=w0" in text for text in answer.advice)
    assert ended("CANCELLED", killer="root", steps=(began,), started=JOB.ended - 2).cause is JobCause.PERSON
    # Its node went away while it ran.
    assert ended("CANCELLED", killer="root", steps=(never,)).cause is JobCause.PERSON
    ran = (never, JobStep("12.0", "CANCELLED", 0, 0, has_code=False))
    assert ended("CANCELLED", killer="root", steps=ran, started=JOB.ended - 2).cause is JobCause.PERSON
    assert "own user" in ended("CANCELLED", killer=JOB.user, steps=(never,)).headline


@pytest.mark.parametrize("changes", [{"exit_code": 3}, {"signal": 11}, {"exit_code": 137}])
def test_a_machine_found_broken_meanwhile_makes_the_program_s_fault_doubtful(changes: dict[str, Any]) -> None:
    answer = ended("FAILED", World(nodes=(SICK,)), **changes)
    assert (answer.cause, answer.sure) == (JobCause.MACHINE, Sure.POSSIBLE)
    assert "w0 was found broken while it ran" in answer.headline and "XID 79" in facts(answer)
    assert any("--exclude=w0" in text for text in answer.advice)


@pytest.mark.parametrize(
    "node",
    [
        NODE,
        replace(SICK, since=NOW - 5000),  # before the job
        replace(SICK, since=NOW + 5000),  # long after it
        replace(SICK, name="w1"),  # another's
        replace(SICK, reason="new disk on Monday"),  # a person's plan
        replace(SICK, reason="minivm: pod stops"),
    ],
)
def test_other_drains_blame_no_machine(node: JobNode) -> None:
    assert ended("FAILED", World(nodes=(node,)), exit_code=3).cause is JobCause.CODE
    assert ended("OUT_OF_MEMORY", World(nodes=(node,))).cause is JobCause.REQUEST


def test_a_user_s_fault_is_not_the_machine_s() -> None:
    """A drain beside an end that Slurm itself explains changes nothing."""
    for state in ("OUT_OF_MEMORY", "TIMEOUT", "CANCELLED"):
        assert ended(state, World(nodes=(SICK,)), killer="alice").cause is not JobCause.MACHINE


def test_a_node_s_failure_has_its_reason_or_says_that_there_is_none() -> None:
    down = replace(SICK, states=frozenset({"DOWN"}), reason="Not responding", since=NOW - 100)
    assert "w0 is down: Not responding" in facts(ended("NODE_FAIL", World(nodes=(down,)), failed_node="w0"))
    booted = replace(NODE, booted=NOW - 200)
    assert "w0 booted at" in facts(ended("NODE_FAIL", World(nodes=(booted,)), failed_node="w0"))
    assert any("keeps no reason" in text for text in ended("NODE_FAIL", failed_node="w0").unknown)


def test_a_site_s_own_comment_is_not_for_users() -> None:
    answer = ended("CANCELLED", killer="root", admin_comment="billed to Ann")
    assert "Ann" not in facts(answer) + answer.headline


@pytest.mark.parametrize(
    "comment",
    [
        "minivm: job 7 again, after a kill of slurmctld",
        "minivm: runs again without w3 (requeue 1)",
        "minivm: rate 9.5 MB/s",
    ],
)
def test_a_comment_that_ended_no_job_does_not_replace_the_cause(comment: str) -> None:
    """A job that minivm submitted again and that fails by its own code is not the cluster's fault."""
    assert ended("FAILED", exit_code=3, admin_comment=comment).cause is JobCause.CODE
    assert ended("FAILED", World(nodes=(SICK,)), exit_code=3, admin_comment=comment).cause is JobCause.MACHINE


def test_the_timeline_has_earlier_runs() -> None:
    run = replace(
        JOB, states=frozenset({"NODE_FAIL"}), submitted=NOW - 5000, started=NOW - 4900, ended=NOW - 4001, nodes="w1",
        admin_comment="minivm: the pod of node w1 was replaced",
    )  # fmt: skip
    item = explain(replace(JOB, states=frozenset({"COMPLETED"})), World(history=(run,)), NOW)
    assert [event.text for event in item.timeline] == [
        "submitted", "run 1 started on w1", "run 1 ended: NODE_FAIL", "queued again",
        "started on w0 after waiting 5 min", "ended after 1 h: COMPLETED",
    ]  # fmt: skip
    assert item.timeline[0].at == NOW - 5000 and "the pod of node w1 was replaced" in facts(item.answer)
    waits = replace(JOB, states=frozenset({"PENDING"}), reason="BeginTime", restarts=1)
    cleaned = replace(waits, submitted=run.submitted)  # slurmctld counts anew once the nodes are cleaned up
    assert "queued again" not in [event.text for event in explain(cleaned, World(history=(run,)), NOW).timeline]
    assert "the pod of node w1 was replaced" in facts(explain(waits, World(history=(run,)), NOW).answer)


def running(world: World, **changes: Any) -> Answer:
    job = replace(JOB, states=frozenset({"RUNNING"}), started=NOW - 600, ended=NOW + 3000, **changes)
    return explain(job, world, NOW).answer


def test_a_requeued_job_that_is_cancelled_while_it_waits_had_started_before() -> None:
    run = replace(JOB, started=NOW - 900, ended=NOW - 600)
    answer = ended("CANCELLED", World(history=(run,)), killer="alice", nodes="", started=0)
    assert "alice, cancelled it while it waited to run again." in answer.headline


def test_a_running_job_has_time_nodes_use_and_output() -> None:
    world = World(nodes=(NODE,), usage=(("12.0", 190 << 20, 600.0),), output_age=30.0)
    answer = running(world)
    assert answer.headline == "It runs on w0 for 10 min." and answer.cause is JobCause.NONE
    assert "its time limit is 1 h: 50 min are left" in facts(answer)
    assert "it uses 190 MiB of memory now, of 200 MiB (95 %)" in facts(answer)
    assert "it has used 50 % of its 2 CPUs so far" in facts(answer) and "30 s ago" in facts(answer)
    assert any("nearly full" in text for text in answer.advice)


def test_a_running_job_s_node_that_drains_or_is_lost() -> None:
    answer = running(World(nodes=(SICK,)))
    assert "w0 takes no new jobs; this one may go on" in answer.headline and "XID 79" in facts(answer)
    lost = replace(NODE, states=frozenset({"DOWN", "NOT_RESPONDING"}), reason="Not responding")
    assert running(World(nodes=(lost,))).cause is JobCause.MACHINE
    assert "may hang" in running(World(nodes=(NODE,), output_age=7200.0)).headline
    assert running(World(nodes=(NODE,), output_age=7200.0)).sure is Sure.POSSIBLE


@pytest.mark.parametrize(
    ("states", "words"),
    [
        ({"RUNNING", "COMPLETING"}, "being cleaned up"),
        ({"RUNNING", "CONFIGURING"}, "run the prolog"),
        ({"SUSPENDED"}, "suspended"),
        ({"RUNNING"}, "It runs"),
    ],
)
def test_other_states_of_a_job_with_nodes(states: set[str], words: str) -> None:
    job = replace(JOB, states=frozenset(states), started=NOW - 600, ended=NOW + 3000)
    assert words in explain(job, World(nodes=(NODE,)), NOW).answer.headline


def test_a_page_is_complete_and_another_user_s_is_bare() -> None:
    job = replace(JOB, states=frozenset({"FAILED"}), exit_code=3)
    shown = render_page(explain(job, World(nodes=(NODE,)), NOW))
    assert shown.startswith("Job 12 (train): FAILED\n  user alice, partition main, account physics\n")
    for part in ("Cause: your code (likely)", "Timeline:", "Evidence:", "[squeue]", "What to do:"):
        assert part in shown
    bare = render_page(
        withhold(replace(job, states=frozenset({"PENDING"}), reason="Priority", admin_comment="minivm: x"))
    )
    assert "pending, reason Priority" in bare and "alice" in bare
    for secret in ("train", "physics", "out.txt", "minivm: x", "exit code"):
        assert secret not in bare
    data = as_json(explain(job, World(), NOW))
    assert (data["cause"], data["sure"]) == ("your code", "likely")
    assert "12   train  FAILED  Its own program" in render_table([explain(job, World(), NOW)])


def test_a_step_of_an_array_s_task_has_the_task_s_name() -> None:
    steps = (JobStep("43.batch", "FAILED", 1, 0), JobStep("43.0", "FAILED", 2, 0))
    answer = ended("FAILED", id=43, shown="8_3", exit_code=1, steps=steps)
    assert "first in step 8_3.0" in answer.headline and "step 8_3.batch: FAILED" in facts(answer)


def test_a_page_says_how_old_its_facts_are() -> None:
    new = explain(JOB, World(), NOW)
    assert "as of" not in render_page(new) + render_table([new])
    old = replace(new, age=4.2, nodes_age=12.0)
    assert ", as of 4 s ago, nodes as of 12 s ago\n" in render_page(old)
    assert render_table([new, old]).endswith("\nAs of 4 s ago.")
    assert as_json(old)["age_s"] == 4.2 and as_json(old)["nodes_age_s"] == 12.0


def test_hostile_text_reaches_no_terminal() -> None:
    bad = "\x1b]0;owned\x07\x9b2J\u202e\r\n  Cause: a person" + "A" * 100_000
    step = JobStep(bad, bad, 1, 0)
    job = replace(JOB, name=bad, user=bad, account=bad, output=bad, nodes=bad, killer=bad, memory=bad, steps=(step,),
                  failed_node=bad, admin_comment=f"minivm: {bad}", partition=bad)  # fmt: skip
    for state, changes, *_ in ROWS:
        for each in (
            replace(job, states=frozenset({state})),
            replace(job, states=frozenset({state}), admin_comment=""),
        ):
            item = explain(replace(each, **{key: changes[key] for key in changes if key in ("signal", "exit_code")}),
                           World(nodes=(SICK,), history=(each,)), NOW)  # fmt: skip
            for shown in (render_page(item), render_page(withhold(each))):
                assert all(letter.isprintable() or letter == "\n" for letter in shown)
                assert len(shown) < 10_000 and shown.count("\n  Cause: ") == 1
            assert render_table([item]).count("\n") == 1


def test_an_earlier_run_that_accounting_has_as_pending_was_requeued() -> None:
    run = replace(JOB, states=frozenset({"PENDING", "REQUEUED"}), ended=NOW - 3000)
    text = render_page(
        explain(replace(JOB, states=frozenset({"COMPLETED"}), started=NOW - 900), World(history=(run,)), NOW)
    )
    assert "run 1 ended: REQUEUED" in text and "as REQUEUED, and the job was requeued" in text


def test_a_preempted_job_names_the_job_that_started_on_its_nodes_after_their_epilog() -> None:
    def after(seconds: float, nodes: str = "w[0-1]") -> str:
        other = replace(JOB, id=13, shown="13", user="bob", partition="high", nodes=nodes, started=JOB.ended + seconds)
        world = World(nodes=(NODE,), related_jobs=(JOB, other))
        return explain(replace(JOB, states=frozenset({"PREEMPTED"})), world, NOW).answer.headline

    for seconds in (2, 95):
        assert after(seconds).endswith("(preemption): most likely job 13 of bob in partition high.")
    for seconds, nodes in ((600, "w0"), (-5, "w0"), (2, "w7")):
        assert "most likely" not in after(seconds, nodes)
