"""Explain a job: from what Slurm shows of it and its surroundings to a page. Pure."""

from __future__ import annotations

from dataclasses import replace

from health.jobs import ended, pending, running
from health.jobs.model import Answer, Event, Job, JobCause, Page, World
from health.jobs.text import duration, safe


def explain(job: Job, world: World, now: float) -> Page:
    part = pending if job.is_pending else ended if job.has_ended else running
    answer = part.explain(job, world, now)
    if world.missing:
        answer = replace(answer, unknown=(*answer.unknown, *world.missing))
    return Page(job, answer, timeline(job, world, now))


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


def timeline(job: Job, world: World, now: float) -> tuple[Event, ...]:
    events = [Event(min([run.submitted for run in world.history if run.submitted] or [job.submitted]), "submitted")]
    if world.history:
        events.append(Event(job.submitted, "queued again"))  # slurmctld counts from each requeue
    if job.eligible > job.submitted + 1 and (job.eligible <= now or not job.is_pending):
        events.append(Event(job.eligible, "eligible to start"))
    for number, run in enumerate(world.history, 1):
        if run.started:
            events.append(Event(run.started, f"run {number} started on {safe(run.nodes, 120)}"))
        events.append(Event(run.ended, f"run {number} ended: {safe(run.state, 40)}"))
    has_started = job.started and not job.is_pending and (job.nodes or not job.has_ended)
    if has_started:
        waited = duration(job.started - max(job.eligible, job.submitted))
        where = f" on {safe(job.nodes, 120)}" if job.nodes else ""
        events.append(Event(job.started, f"started{where} after waiting {waited}"))
    if job.has_ended and job.ended:
        ran = f" after {duration(job.ended - job.started)}" if has_started else ""
        events.append(Event(job.ended, f"ended{ran}: {safe(job.state, 40)}"))
    return tuple(sorted((event for event in events if event.at > 0), key=lambda event: event.at))
