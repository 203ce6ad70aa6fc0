"""Data of the page's view of jobs: a row per job with the times of its life and why it waits or ended.

Slurm's own user asks for the jobs, so Slurm hides nothing of `PrivateData`. Names, owners and comments are shown only
where the policy says `jobNames`.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from fleet import FleetError
from fleet.decide.machines import line
from fleet.world.fields import Fields
from init.slurm.node import PREFIX

# The rows that are kept of one answer of Slurm, the latest first, and those that are sent of them.
KEPT, SENT = 20_000, 300
SHORT, LONG, SEARCHED = 64, 300, 80  # letters
# Reasons that say less than the exit code beside them.
SAID_BY_CODE = frozenset({"", "None", "NonZeroExitCode", "RaisedSignal"})
# Slurm tells their start and end in advance.
NOT_OVER = frozenset({"PENDING", "RUNNING", "SUSPENDED"})


@dataclass(frozen=True, slots=True)
class JobRow:
    """Times are seconds since 1970; 0: not known, or not yet."""

    job: str
    state: str
    why: str
    partition: str
    nodes: str
    count: int
    submitted: int
    eligible: int
    started: int
    ended: int
    limit: int  # minutes; 0: none
    name: str = ""
    user: str = ""

    def changed(self, now: float) -> int:
        """Return when the job was submitted, started or ended last."""
        return max(moment for moment in (0, self.submitted, self.started, self.ended) if moment <= now)

    def matches(self, words: Iterable[str]) -> bool:
        text = " ".join((self.job, self.state, self.why, self.partition, self.nodes, self.name, self.user)).lower()
        return all(word in text for word in words)


@dataclass(frozen=True, slots=True)
class JobTable:
    rows: tuple[JobRow, ...]  # the latest first
    states: Counter[str]  # of all jobs, not only of those with a row
    unread: int


def read_table(items: Iterable[object], now: float, *, names: bool) -> JobTable:
    """Read the jobs that slurmrestd lists. A job that cannot be read is counted and left out."""
    states: Counter[str] = Counter()
    unread = 0

    def rows() -> Iterator[JobRow]:
        nonlocal unread
        for item in items:
            try:
                row = read_row(item, names=names)
            except FleetError:
                unread += 1
            else:
                states[row.state] += 1
                yield row

    latest = heapq.nlargest(KEPT, rows(), key=lambda row: row.changed(now))
    return JobTable(tuple(latest), states, unread)


def read_row(item: object, *, names: bool) -> JobRow:
    job = Fields(item, "job")
    states = [str(state) for state in job.items("job_state")]
    state = line(" ".join(states).lower().replace("_", " "), SHORT)
    return JobRow(
        job=_number(job),
        state=state,
        why=_why(job, states, comments=names),
        partition=line(job.text("partition"), SHORT),
        nodes=line(job.text("nodes"), SHORT),
        count=max(0, job.number("node_count")),
        submitted=_moment(job, "submit_time"),
        eligible=_moment(job, "eligible_time"),
        started=_moment(job, "start_time") if "PENDING" not in states else 0,
        ended=_moment(job, "end_time") if NOT_OVER.isdisjoint(states) else 0,
        limit=max(0, job.number("time_limit")),
        name=line(job.text("name"), SHORT) if names else "",
        user=line(job.text("user_name") or str(job.number("user_id")), SHORT) if names else "",
    )


def _moment(job: Fields, key: str) -> int:
    return max(0, min(job.number(key), 1 << 40))


def _number(job: Fields) -> str:
    """Return the number as squeue writes it: 12, 12_3 or 12_[3-9] of an array, 12+1 of a heterogeneous job."""
    array, het = job.number("array_job_id"), job.number("het_job_id")
    waiting, task = job.text("array_task_string"), job.sub("array_task_id")
    if array and waiting:
        return line(f"{array}_[{waiting}]", SHORT)
    if array and task.flag("set"):
        return f"{array}_{task.number('number')}"
    return f"{het}+{job.number('het_job_offset')}" if het else str(job.number("job_id"))


def _why(job: Fields, states: list[str], *, comments: bool) -> str:
    """Say why the job waits or how it ended; minivm's own explanation, if it has one, says more than Slurm."""
    comment = job.text("admin_comment")
    if comments and comment.startswith(PREFIX):  # another comment is the site's own
        return line(comment.removeprefix(PREFIX), LONG)
    reason, code = job.text("state_reason"), job.sub("exit_code")
    # Slurm leaves a cancelled job the reason why it waited before.
    parts = [] if reason in SAID_BY_CODE or "CANCELLED" in states else [reason]
    signal = code.sub("signal")
    if number := signal.sub("id").number("number"):
        parts.append(f"signal {signal.text('name') or number}")
    elif status := code.number("return_code"):
        parts.append(f"exit code {status}")
    if restarts := job.number("restart_cnt"):
        parts.append("requeued once" if restarts == 1 else f"requeued {restarts} times")
    return line(", ".join(parts), LONG)


def report_jobs(table: JobTable | None, why_unknown: str, find: str) -> dict[str, Any]:
    """Return the data of the view: the latest jobs whose row has every word of `find`, and the states of all jobs."""
    if table is None:
        return {"known": False, "why": line(why_unknown, LONG), "rows": [], "found": 0, "states": {}, "unread": 0}
    words = find[:SEARCHED].lower().split()
    found = [row for row in table.rows if row.matches(words)]
    return {
        "known": True,
        "rows": [_filled(row) for row in found[:SENT]],
        "found": len(found),
        "states": dict(sorted(table.states.items())),
        "unread": table.unread,
    }


def _filled(row: JobRow) -> dict[str, Any]:
    """Return the row without its empty fields."""
    return {key: value for key in row.__slots__ if (value := getattr(row, key))}
