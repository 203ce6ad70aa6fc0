"""Periodic service `requeue` of the acting controller: runs a job again without the machine that it died of.

python3 -I -m health.jobs.requeue

A job counts as a machine's victim if its page blames a machine, and the broker drained a node of the job for a check's
verdict while the job ran or just after. A job that fails on nodes without such a verdict is never blamed on a machine.
MINIVM_REQUEUE=propose only logs what it would do; act does it, at most MINIVM_REQUEUE_MOST times a job.

slurmctld takes no changes of a job that has ended, so the steps are: keep a record, requeue the job held, exclude the
nodes, release the job, and, when it runs, say so in its output. A turn continues where a killed one stopped: the record
has the count and the number of restarts before the requeue, and slurmctld shows what was done.
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path

from ground.files import read_json, write_json
from health.jobs import ended, machines, parse
from health.jobs.model import Job, JobCause, JobNode, World, list_briefly, safe
from health.jobs.shared import is_unknown_job
from init.errors import InitError
from init.slurm import client
from init.slurm.client import SCONTROL, SQUEUE, SlurmError
from init.slurm.conf import expand
from init.slurm.node import PREFIX

FILE = Path("/var/lib/minivm/requeue/jobs.json")
STATES = ("FAILED", "NODE_FAIL")
RECENT_S = 900.0  # age of a verdict; slurmctld forgets ended jobs after five minutes
JUST_S = 120.0  # of a verdict after the job's end: a check of the node follows each failed job
KEEP_S = 30 * 86400.0
MOST_RECORDS = 10_000  # a turn reads and writes them all
MOST_JOBS = 200  # victims in one turn: a machine with many small jobs
MOST_LOOKED = 1000  # ended jobs in one turn: each costs squeue and this program 20 KiB
LONGEST_LIST = 4096  # of nodes that a job's user names
Run = Callable[[Sequence[str]], str]


class Step(StrEnum):
    PROPOSED = "proposed"
    RECORDED = "recorded"
    RELEASED = "released"
    OVER = "over"


@dataclass(frozen=True, slots=True)
class Requeue:
    """The last requeue of a job, or the proposal of one."""

    job: str  # as people name it: 12, 12_3
    restarts: int  # of the run that died
    nodes: str  # that are excluded: w0,w3
    reason: str
    number: int  # of requeues by this service, with this one
    at: float
    step: Step


def find_guilty_nodes(job: Job, nodes: Iterable[JobNode]) -> tuple[JobNode, ...]:
    """Return the job's nodes that a check's verdict names as broken, if the job died by a machine."""
    if not job.batch or job.state not in STATES or "+" in job.shown or not job.started:
        return ()
    hosts = set(expand(job.nodes[:65536]))
    guilty = tuple(
        node
        for node in nodes
        if node.name in hosts
        and not node.is_usable
        and machines.has_verdict(node)
        and job.started <= node.since <= job.ended + JUST_S
    )
    return guilty if guilty and ended.explain(job, World(nodes=guilty), job.ended).cause is JobCause.MACHINE else ()


def find_obstacle(job: Job, guilty: Sequence[JobNode], nodes: Sequence[JobNode], done: int, most: int) -> str:
    """Return why the job is not run again without these nodes; "" if it can be."""
    names = {node.name for node in guilty}
    if not job.requeues:
        return "it was submitted with --no-requeue"
    if max(len(job.excluded), len(job.required)) > LONGEST_LIST:
        return f"its list of nodes has more than {LONGEST_LIST} characters"
    if done >= most:
        return f"it was requeued {done} times already"
    if names & set(expand(job.required)):
        return f"it requires {list_briefly(sorted(names))} by --nodelist"
    if machines.judge(replace(job, excluded=exclude_nodes(job, names)), nodes).never:
        return "the other nodes cannot run it"
    return ""


def exclude_nodes(job: Job, names: Iterable[str]) -> str:
    return ",".join(dict.fromkeys([*expand(job.excluded), *sorted(names)]))


def take_turns(jobs: Iterable[tuple[str, str]]) -> list[str]:
    """Order jobs, given with their users, so that each user's first one comes before any user's second one."""
    before: Counter[str] = Counter()
    ordered = []
    for job, user in jobs:
        ordered.append((before[user], job))
        before[user] += 1
    return [job for _, job in sorted(ordered, key=lambda pair: pair[0])]


class Requeuer:
    def __init__(
        self, run: Run, acts: bool, most: int, now: float, file: Path = FILE, log: Callable[[str], None] = print
    ) -> None:
        self.run, self.acts, self.most, self.now, self.file, self.log = run, acts, most, now, file, log
        self.records = load(file)

    def turn(self) -> None:
        nodes = parse.parse_nodes(self.run((SCONTROL, "--json", "show", "nodes")))
        recent = [node for node in nodes if machines.has_verdict(node) and self.now - node.since <= RECENT_S]
        unfinished = [each for each in self.records.values() if is_unfinished(each)]
        if unfinished:
            ids = ",".join(each.job for each in unfinished)
            jobs = {job.shown: job for job in self._queue("--states=all", f"--jobs={ids}")}
            for each in unfinished:
                self._try_to_continue(each, jobs.get(each.job))
        if recent:
            dead_ids = self._find_dead_jobs(",".join(node.name for node in recent))
            place = {job: number for number, job in enumerate(dead_ids)}
            dead = self._queue("--states=all", f"--jobs={','.join(dead_ids)}") if dead_ids else []
            judged = 0
            for job in sorted(dead, key=lambda job: place.get(job.shown, len(place))):
                judged += self._judge(job, nodes)
                if judged >= MOST_JOBS:
                    break

    def _find_dead_jobs(self, names: str) -> list[str]:
        """Return jobs that died on these nodes and that no turn has decided about, in the users' turns."""
        shape = "--Format=jobarrayid:|,username:|,restartcnt:|"
        text = self.run((SQUEUE, "--noheader", f"--states={','.join(STATES)}", f"--nodelist={names}", shape))
        rows = [[field.strip() for field in line.split("|")] for line in text.splitlines()]
        jobs = ((row[0], row[1]) for row in rows if len(row) >= 3 and not self._is_known(row[0], row[2]))
        return take_turns(jobs)[:MOST_LOOKED]

    def _is_known(self, job: str, restarts: str) -> bool:
        """Tell if a turn has decided about this run of the job."""
        last = self.records.get(job)
        return last is not None and str(last.restarts) == restarts and not (last.step is Step.PROPOSED and self.acts)

    def _queue(self, *options: str) -> list[Job]:
        try:
            return parse.parse_queue(self.run((SQUEUE, "--json", *options)))
        except SlurmError as error:
            if is_unknown_job(error):
                return []
            raise

    def _judge(self, job: Job, nodes: Sequence[JobNode]) -> bool:
        """Decide about a job that no turn has decided about; return whether it is such a victim of a machine."""
        last = self.records.get(job.shown)
        guilty = find_guilty_nodes(job, nodes)
        if not guilty or self._is_known(job.shown, str(job.restarts)) or "COMPLETING" in job.states:
            return False
        done = last.number if last is not None else 0
        names = ",".join(sorted(node.name for node in guilty))
        reason = safe("; ".join(f"{node.name}: {node.reason}" for node in guilty), 300)
        record = Requeue(job.shown, job.restarts, names, reason, done, self.now, Step.OVER)
        if why_not := find_obstacle(job, guilty, nodes, done, self.most):
            self._save(record)
            self.log(f"job {job.shown} died by its machine and is not run again: {why_not} ({reason})")
        elif not self.acts:
            self._save(replace(record, step=Step.PROPOSED))
            self.log(f"job {job.shown} died by its machine: would run again without {names} ({reason})")
        else:
            record = replace(record, number=done + 1, step=Step.RECORDED)
            self._save(record)
            self._try_to_continue(record, job)
        return True

    def _try_to_continue(self, record: Requeue, job: Job | None) -> None:
        """Do the steps that are left; after a refusal the next turn tries again, and the other jobs go on."""
        try:
            self._continue(record, job)
        except SlurmError as error:
            if error.late:
                raise
            self.log(f"job {record.job} is not run again yet: {error.why}")

    def _continue(self, record: Requeue, job: Job | None) -> None:
        """Do the steps that are left."""
        over = replace(record, step=Step.OVER)
        if job is None or (job.restarts > record.restarts + 1):
            self._save(over)
            if job is None and record.step is Step.RECORDED:
                self.log(f"job {record.job} is not run again: slurmctld does not know it any more")
            return
        if record.step is Step.RELEASED:
            self._tell(record, job)
            return
        if job.has_ended:
            if job.restarts > record.restarts:  # it ran and ended since: a person requeued it, too
                self._save(over)
                return
            try:
                self.run((SCONTROL, "requeuehold", job.shown))
            except SlurmError as error:
                if error.late:
                    raise
                self._save(over)
                self.log(f"job {job.shown} is not run again: {error.why}")
                return
            job = replace(job, is_held=True, states=frozenset({"PENDING"}))
        if not job.is_pending:  # a person requeued it meanwhile, and it runs
            self._save(over)
            return
        self._exclude(record, job)
        if job.is_held:
            self.run((SCONTROL, "release", job.shown))
        self.log(f"job {job.shown} {comment(record, self.most).removeprefix(PREFIX).strip()}")
        self._save(replace(record, step=Step.RELEASED))

    def _exclude(self, record: Requeue, job: Job) -> None:
        names = record.nodes.split(",")
        if set(names) <= set(expand(job.excluded[:LONGEST_LIST])):
            return
        try:
            self.run(change(job, exclude_nodes(job, names), comment(record, self.most)))
        except SlurmError as error:  # the job need not wait for that: its broken nodes are drained
            if error.late:
                raise
            self.log(f"job {job.shown} does not exclude {record.nodes}: {error.why}")

    def _tell(self, record: Requeue, job: Job) -> None:
        """Write into the output of the job's new run, once it runs."""
        if "RUNNING" in job.states:
            try:
                self.run((SCONTROL, "notify", str(job.id), comment(record, self.most)))
            except SlurmError as error:
                self.log(f"the output of job {job.shown} does not tell of its requeue: {error.why}")
        if "RUNNING" in job.states or job.has_ended:
            self._save(replace(record, step=Step.OVER))

    def _save(self, record: Requeue) -> None:
        self.records[record.job] = record
        recent = [each for each in self.records.values() if self.now - each.at <= KEEP_S]
        recent.sort(key=lambda each: (is_unfinished(each), each.at))
        write_json(self.file, {each.job: asdict(each) for each in recent[-MOST_RECORDS:]}, 0o600)


def is_unfinished(record: Requeue) -> bool:
    return record.step in (Step.RECORDED, Step.RELEASED)


def change(job: Job, excluded: str, text: str) -> tuple[str, ...]:
    """Return the command that excludes nodes, and notes why where the site has no comment of its own."""
    is_free = not job.admin_comment or job.admin_comment.startswith(PREFIX)
    return (
        SCONTROL, "update", f"jobid={job.shown}", f"excnodelist={excluded}",
        *((f"admincomment={text}",) if is_free else ()),
    )  # fmt: skip


def comment(record: Requeue, most: int) -> str:
    return f"{ended.AGAIN} {record.nodes} (requeue {record.number} of at most {most}): {record.reason}"


def load(file: Path = FILE) -> dict[str, Requeue]:
    """Read the records; a damaged one is left out."""
    records = {}
    for name, data in read_json(file).items():
        try:
            records[name] = Requeue(**{**data, "step": Step(data["step"])})
        except (KeyError, TypeError, ValueError):
            continue
    return records


def recall_reason(job: str, at: float, file: Path = FILE) -> str:
    """Return why the service requeued the job at about that time; "" if it did not."""
    record = load(file).get(job)
    if record is None or record.step is Step.PROPOSED or abs(at - record.at) > JUST_S:
        return ""
    return f"minivm runs it again without {record.nodes}: {record.reason}"


def main(env: Mapping[str, str] = os.environ) -> int:
    controller = client.address(env)
    try:
        most = int(env.get("MINIVM_REQUEUE_MOST", "2"))
        acts = env.get("MINIVM_REQUEUE") == "act"
        Requeuer(lambda argv: client.run(argv, controller), acts, most, time.time()).turn()
    except (InitError, OSError, ValueError) as error:
        print(f"jobs of broken machines are not looked at: {safe(str(error), 300)}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
