"""Write pages for people and as JSON. Every text that users or Slurm supply was made safe, or is made so here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict

from health.jobs.model import Job, JobCause, Page, Sure, duration, moment, safe

LIST_NAME = 24


def page(item: Page) -> str:
    job, answer = item.job, item.answer
    head = f"Job {safe(job.shown, 60)}"
    if job.name:
        head += f" ({safe(job.name, 80)})"
    about = [f"user {safe(job.user, 40)}", f"partition {safe(job.partition, 80)}"]
    about += [f"account {safe(job.account, 40)}"] if job.account else []
    about += _ages(item)
    lines = [f"{head}: {safe(job.state, 40)}", f"  {', '.join(about)}", "", answer.headline, f"  Cause: {cause(item)}"]
    lines += _section("Timeline", (f"{moment(event.at)}  {event.text}" for event in item.timeline))
    lines += _section("Evidence", (f"{fact.text}  [{fact.source}]" for fact in answer.evidence))
    lines += _section("What to do", answer.advice)
    lines += _section("Not known", answer.unknown)
    return "\n".join(lines)


def _ages(item: Page) -> list[str]:
    """Say how old the facts are that the pod's job snapshot gave."""
    ages = [f"as of {duration(item.age)} ago"] if item.age >= 1 else []
    return ages + ([f"nodes as of {duration(item.nodes_age)} ago"] if item.nodes_age >= max(1, item.age + 1) else [])


def cause(item: Page) -> str:
    sure = (
        ""
        if item.answer.sure is Sure.CERTAIN or item.answer.cause in (JobCause.NONE, JobCause.UNKNOWN)
        else (f" ({item.answer.sure})")
    )
    return f"{item.answer.cause}{sure}"


def _section(title: str, lines: Iterable[str]) -> list[str]:
    rows = [f"  {safe(line, 600)}" for line in lines]
    return ["", f"{title}:", *rows] if rows else []


def table(pages: Sequence[Page]) -> str:
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
