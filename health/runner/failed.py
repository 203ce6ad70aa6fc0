"""Tell users in their output files why their batch jobs failed, in rounds of the jobs that ended together.

Not in the epilog: Slurm forbids its commands there, and the job's end waits for it. A note may be lost with the runner,
and is never written twice.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf

from health.places import Places
from health.runner import record
from health.verdict import Class, Result, read_verdicts
from init.slurm.conf import expanded

WAIT_S = 1.0
APART_S = 5.0
CHECKED_S = 12.0  # for the checks of the node that follow a job: they may find the machine guilty
# One question to slurmctld a job, so a node asks at most 8 in 5 seconds; jobs beyond these get no note.
MOST = 8
MOST_WAITING = 64
MOST_RUNNING = 4096
ASK_S = 5.0
WRITE_S = 5.0


@dataclass(frozen=True, slots=True)
class EndedJob:
    id: int
    uid: int
    gid: int


class FailedJobs:
    """Jobs of this node that may have failed: the exit code says so, or the time limit was reached."""

    def __init__(self) -> None:
        self._limits: dict[int, float] = {}  # when the running jobs reach their time limits
        self._waiting: dict[int, EndedJob] = {}
        self._due_at = -inf
        self._pid = 0

    def started(self, env: Mapping[str, str]) -> None:
        job, end = _number(env, "SLURM_JOB_ID"), _number(env, "SLURM_JOB_END_TIME")
        if job and end:
            while len(self._limits) >= MOST_RUNNING:
                del self._limits[next(iter(self._limits))]
            self._limits[job] = end

    def ended(self, env: Mapping[str, str], now: float, wall: float) -> None:
        """Note a job whose epilog begins, if its batch script ran here."""
        job = EndedJob(_number(env, "SLURM_JOB_ID"), _number(env, "SLURM_JOB_UID"), _number(env, "SLURM_JOB_GID"))
        limit = self._limits.pop(job.id, inf)
        # slurmctld sends a job that reached its limit to its epilog with exit code 0.
        if not job.id or not job.uid or (env.get("SLURM_JOB_EXIT_CODE", "0") == "0" and wall < limit - 1):
            return
        first = expanded(env.get("SLURM_JOB_NODELIST", "")[:65536])[:1]
        if first == [env.get("SLURMD_NODENAME", "")] and len(self._waiting) < MOST_WAITING:
            if not self._waiting:
                self._due_at = max(now + WAIT_S, self._due_at)
            self._waiting[job.id] = job

    def times(self, is_checked: bool) -> list[float]:
        if not self._waiting or self._pid:
            return []
        return [self._due_at if is_checked else self._due_at + CHECKED_S]

    def is_due(self, now: float, is_checked: bool) -> bool:
        return any(now >= at for at in self.times(is_checked))

    def take(self, now: float) -> list[EndedJob]:
        self._due_at = now + APART_S
        return [self._waiting.pop(job) for job in list(self._waiting)[:MOST]]

    def began(self, pid: int) -> None:
        self._pid = pid

    def reaped(self, pid: int) -> None:
        if pid == self._pid:
            self._pid = 0


def _number(env: Mapping[str, str], name: str) -> int:
    text = env.get(name, "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 12 else 0


def tell(jobs: list[EndedJob], places: Places) -> None:
    """Write the notes, in a fork of the runner."""
    told: list[int] = []
    skipped: dict[str, str] = {}
    hung: set[int] = set()
    for job in jobs:
        try:
            why = "its user's file system hangs" if job.uid in hung else _tell(job, places, hung)
        except Exception as error:  # a defect, or slurmctld is away: it costs notes, and no job
            why = str(error) or repr(error)
        if why:
            skipped[str(job.id)] = why[:300]
        else:
            told.append(job.id)
    entry: dict[str, object] = {"at": round(time.time(), 3), "kind": "note", "job": "", "result": "ok", "told": told}
    record.append({**entry, "skipped": skipped} if skipped else entry)


def _tell(ended: EndedJob, places: Places, hung: set[int]) -> str:
    # Imported late, in the fork: most rounds have no job that failed.
    from health.jobs import note
    from health.jobs.ask import Asker
    from health.jobs.explain import explain
    from health.jobs.model import JobNode, World
    from init.slurm import client
    from init.slurm.node import PREFIX

    controller, now = client.address(os.environ), time.time()
    asker = Asker(lambda argv: client.run(argv, controller, within=ASK_S), "root", is_root=True, now=now)
    job = next((job for job in asker.queue(f"--jobs={ended.id}") if job.id == ended.id), None)
    if job is None:
        return "slurmctld does not know it any more"
    name = os.environ.get("MINIVM_POD_NAME", "")
    problems = [
        verdict
        for verdict in read_verdicts(places.verdicts).values()
        if verdict.result is Result.PROBLEM and verdict.class_ is not Class.USER and now < verdict.expires
    ]
    nodes = [
        JobNode(name, frozenset({"DRAIN"}), f"{PREFIX} {each.check}: {each.reason}", since=max(each.at, job.started))
        for each in problems
    ]
    text = note.words(explain(job, World(nodes=tuple(nodes[:1])), now))
    if not text:
        return "it gets none"
    why = note.append(job.errors or job.output, text, ended.uid, ended.gid, job.started, WRITE_S)
    if "does not answer" in why:
        hung.add(ended.uid)
    return why
