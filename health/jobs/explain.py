"""Explain a job: turn what Slurm shows of it, its nodes and the cluster into a page, as text and as JSON. Pure.

Every text that users or Slurm supply was made safe, or is made so here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace

from health.jobs import ended, machines, pending
from health.jobs.model import (
    Answer,
    Event,
    Fact,
    Job,
    JobCause,
    JobNode,
    Page,
    Sure,
    World,
    count,
    duration,
    list_briefly,
    minutes,
    moment,
    safe,
    size,
)
from init.slurm.conf import expand
from init.slurm.node import PREFIX

LOST = Answer(
    "Slurm has lost it: accounting has not seen its end, and slurmctld does not know it.",
    JobCause.CLUSTER,
    Sure.LIKELY,
    (Fact("Invalid job id", "squeue"),),
    ("submit it again: what it has written so far is still there", "tell an operator: sacctmgr show runawayjobs"),
    (
        "when it was lost: slurmctld forgets jobs that it accepted in its last seconds if it is killed",
        "whether its end has just not reached accounting yet: ask again in some minutes",
    ),
)
UNEXPLAINED = Answer(
    "It waits, as far as accounting knows; slurmctld, which knows what it waits for, does not answer.",
    JobCause.UNKNOWN,
    Sure.LIKELY,
    (Fact("its state is PENDING", "sacct"),),
    ("ask again in a minute: jobs stay in the queue while slurmctld is away",),
    ("whether it has started or ended since",),
)


def explain(job: Job, world: World, now: float) -> Page:
    part = pending.explain if job.is_pending else ended.explain if job.has_ended else explain_running
    silent = LOST if job.is_lost else UNEXPLAINED if job.is_unexplained else None
    answer = silent or part(job, world, now)
    if job.admin_comment.startswith(ended.AGAIN) and not (job.has_ended or job.is_pending):
        fact = Fact(safe(job.admin_comment.removeprefix(PREFIX)), "the job's AdminComment")
        answer = replace(answer, evidence=(*answer.evidence, fact))
    if world.missing:
        answer = replace(answer, unknown=(*answer.unknown, *world.missing))
    return Page(job, answer, list_events(job, world, now))


def withhold(job: Job) -> Page:
    """Describe another user's job: only what `squeue` shows to all, and nothing of its text or files."""
    shown = Job(
        id=job.id,
        shown=job.shown,
        user=job.user,
        partition=job.partition,
        states=job.states,
        reason=job.reason,
        nodes=job.nodes,
        submitted=job.submitted,
        started=job.started if not job.is_pending else 0,
        limit=job.limit,
    )
    head = f"It is a job of {safe(job.user, 40)}: {job.state.lower()}"
    if job.is_pending and job.reason not in ("", "None"):
        head += f", reason {safe(job.reason, 60)}"
    return Page(
        shown,
        Answer(
            f"{head}. You see only what squeue shows.", JobCause.UNKNOWN, advice=("its user or an operator sees more",)
        ),
        (),
    )


def list_events(job: Job, world: World, now: float) -> tuple[Event, ...]:
    first = min([run.submitted for run in world.history if run.submitted] or [job.submitted])
    events = [Event(first, "submitted")]
    if world.history and job.submitted > first:
        events.append(Event(job.submitted, "queued again"))  # slurmctld counts from each requeue
    if job.submitted + 1 < job.eligible <= (job.ended if job.has_ended else now):
        events.append(Event(job.eligible, "eligible to start"))
    for number, run in enumerate(world.history, 1):
        if run.started:
            events.append(Event(run.started, f"run {number} started on {safe(run.nodes, 120)}"))
        events.append(Event(run.ended, f"run {number} ended: {ended.run_state(run)}"))
    has_started = job.started and not job.is_pending and (job.nodes or not job.has_ended)
    if has_started:
        waited = duration(job.started - max(job.eligible, job.submitted))
        where = f" on {safe(job.nodes, 120)}" if job.nodes else ""
        events.append(Event(job.started, f"started{where} after waiting {waited}"))
    if job.has_ended and job.ended:
        ran = f" after {duration(job.ended - job.started)}" if has_started else ""
        events.append(Event(job.ended, f"ended{ran}: {safe(job.state, 40)}"))
    return tuple(sorted((event for event in events if event.at > 0), key=lambda event: event.at))


# A running job: time left, its nodes, its use, its output.

SILENCE = 1800.0  # seconds without output after which the page says so first
NEARLY = 0.9
MIB = 1 << 20


def explain_running(job: Job, world: World, now: float) -> Answer:
    hosts = set(expand(job.nodes[:65536]))
    unusable = [node for node in world.nodes or () if node.name in hosts and not node.is_usable]
    facts, advice, unknown = _describe_use(job, world, now)
    facts = [*_describe_time(job, now), *machines.list_facts(unusable), *facts]
    if world.nodes is None:
        unknown.append("the state of its nodes")
    head, cause, sure = _write_head(job, unusable, world, now)
    return Answer(head, cause, sure, tuple(facts), tuple(advice), tuple(unknown))


def _write_head(job: Job, held: list[JobNode], world: World, now: float) -> tuple[str, JobCause, Sure]:
    where = f" on {safe(job.nodes, 120)}" if job.nodes else ""
    ran = f" for {duration(now - job.started)}" if 0 < job.started <= now else ""
    if "COMPLETING" in job.states:
        return f"It has ended; its nodes{where} are being cleaned up.", JobCause.NONE, Sure.CERTAIN
    if "CONFIGURING" in job.states or job.reason == "Prolog":
        return f"It has its nodes{where}; they boot or run the prolog before it starts.", JobCause.CLUSTER, Sure.CERTAIN
    if job.states & {"SUSPENDED", "STOPPED"}:
        return (
            f"It is suspended{where}: an operator or a job of higher priority stopped it.",
            JobCause.UNKNOWN,
            Sure.LIKELY,
        )
    lost = [node for node in held if node.states & {"DOWN", "NOT_RESPONDING"}]
    if lost:
        names = list_briefly(node.name for node in lost)
        return (
            f"It runs{where}{ran}, but {names} does not answer: it may end as NODE_FAIL.",
            JobCause.MACHINE,
            Sure.LIKELY,
        )
    if held:
        names = list_briefly(node.name for node in held)
        verb = "takes" if len(held) == 1 else "take"
        return f"It runs{where}{ran}. {names} {verb} no new jobs; this one may go on.", JobCause.NONE, Sure.CERTAIN
    if world.output_age is not None and world.output_age > SILENCE:
        return (
            f"It runs{where}{ran}, and has written nothing for {duration(world.output_age)}: it may hang.",
            JobCause.UNKNOWN,
            Sure.POSSIBLE,
        )
    return f"It runs{where}{ran}.", JobCause.NONE, Sure.CERTAIN


def _describe_time(job: Job, now: float) -> list[Fact]:
    if job.limit is None:
        return [Fact("it has no time limit", job.source)]
    remaining = job.started + job.limit * 60 - now
    state = f"{duration(remaining)} are left" if remaining > 0 else "which is over; Slurm ends it now"
    return [Fact(f"its time limit is {minutes(job.limit)}: {state} (until {moment(now + remaining)})", job.source)]


def _describe_use(job: Job, world: World, now: float) -> tuple[list[Fact], list[str], list[str]]:
    facts: list[Fact] = []
    advice: list[str] = []
    unknown: list[str] = []
    if world.output_age is not None:
        facts.append(Fact(f"its output was last written {duration(world.output_age)} ago", safe(job.output)))
    elif job.output:
        unknown.append(f"when its output was last written: {safe(job.output)} is not readable here")
    if not world.usage:
        unknown.append("what it uses: Slurm has figures from the second sample on, after a minute")
        return facts, advice, unknown
    used = sum(memory for _, memory, _ in world.usage) / MIB
    granted = (job.memory_per_node * max(1, job.node_count)) or job.memory_per_cpu * job.cpus
    share = f", of {size(granted)} ({100 * used / granted:.0f} %)" if granted else ""
    facts.append(Fact(f"it uses {size(used)} of memory now{share}", "sstat"))
    elapsed, cpu = now - job.started, sum(seconds for _, _, seconds in world.usage)
    if job.cpus and elapsed > 0:
        part = 100 * cpu / (elapsed * job.cpus)
        facts.append(Fact(f"it has used {part:.0f} % of its {count(job.cpus, 'CPU')} so far", "sstat"))
    if granted and used > NEARLY * granted:
        advice.append("its memory is nearly full: the kernel kills it at the limit")
    return facts, advice, unknown


LIST_NAME = 24


def render_page(item: Page) -> str:
    job, answer = item.job, item.answer
    head = f"Job {safe(job.shown, 60)}"
    if job.name:
        head += f" ({safe(job.name, 80)})"
    about = [f"user {safe(job.user, 40)}", f"partition {safe(job.partition, 80)}"]
    about += [f"account {safe(job.account, 40)}"] if job.account else []
    about += _describe_ages(item)
    lines = [
        f"{head}: {safe(job.state, 40)}",
        f"  {', '.join(about)}",
        "",
        answer.headline,
        f"  Cause: {render_cause(item)}",
    ]
    lines += _render_section("Timeline", (f"{moment(event.at)}  {event.text}" for event in item.timeline))
    lines += _render_section("Evidence", (f"{fact.text}  [{fact.source}]" for fact in answer.evidence))
    lines += _render_section("What to do", answer.advice)
    lines += _render_section("Not known", answer.unknown)
    return "\n".join(lines)


def _describe_ages(item: Page) -> list[str]:
    """Say how old the facts are that the pod's job snapshot gave."""
    ages = [f"as of {duration(item.age)} ago"] if item.age >= 1 else []
    return ages + ([f"nodes as of {duration(item.nodes_age)} ago"] if item.nodes_age >= max(1, item.age + 1) else [])


def render_cause(item: Page) -> str:
    sure = (
        ""
        if item.answer.sure is Sure.CERTAIN or item.answer.cause in (JobCause.NONE, JobCause.UNKNOWN)
        else (f" ({item.answer.sure})")
    )
    return f"{item.answer.cause}{sure}"


def _render_section(title: str, lines: Iterable[str]) -> list[str]:
    rows = [f"  {safe(line, 600)}" for line in lines]
    return ["", f"{title}:", *rows] if rows else []


def render_table(pages: Sequence[Page]) -> str:
    rows = [("JOB", "NAME", "STATE", "WHY")]
    rows += [
        (
            safe(each.job.shown, 30),
            safe(each.job.name, LIST_NAME),
            safe(each.job.state, 20),
            safe(each.answer.headline, 200),
        )
        for each in pages
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row[:3], widths, strict=True)), row[3]]) for row in rows
    ]
    age = max((each.age for each in pages), default=0.0)
    return "\n".join([*lines, *([f"As of {duration(age)} ago."] if age >= 1 else [])])


def as_json(item: Page) -> dict[str, object]:
    """Return the page for programs; texts stay as Slurm gave them, since JSON escapes them."""
    answer = item.answer
    return {
        "job": _job(item.job),
        "headline": answer.headline,
        "cause": str(answer.cause),
        "sure": str(answer.sure),
        "timeline": [asdict(event) for event in item.timeline],
        "evidence": [asdict(fact) for fact in answer.evidence],
        "advice": list(answer.advice),
        "unknown": list(answer.unknown),
        "age_s": item.age,
        "nodes_age_s": item.nodes_age,
    }


def _job(job: Job) -> dict[str, object]:
    return {
        "id": job.id,
        "shown": job.shown,
        "name": job.name,
        "user": job.user,
        "account": job.account,
        "partition": job.partition,
        "qos": job.qos,
        "state": job.state,
        "reason": job.reason,
        "nodes": job.nodes,
        "submitted": job.submitted,
        "started": job.started,
        "ended": job.ended if job.has_ended else 0,
        "exit_code": job.exit_code,
        "signal": job.signal,
        "restarts": job.restarts,
    }
