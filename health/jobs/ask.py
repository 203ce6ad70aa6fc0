"""Ask Slurm's clients about jobs, with a fixed number of commands, and nothing about jobs of other users.

At most ten commands a page, usually three; a list takes one. Each is a client that people run themselves, with the
caller's rights. The pod's job snapshot may answer some of them: such an answer never proves that something is absent.
`add_node_reports` adds what the nodes of a running job say now: the use of its GPUs, what its tasks do, and problems
that checks found.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeVar

from health.jobs import limits, parse, pending
from health.jobs.explain import explain, withhold
from health.jobs.model import (
    ENDED,
    Answer,
    Fact,
    Job,
    JobCause,
    JobNode,
    Page,
    Partition,
    Sure,
    World,
    duration,
    list_briefly,
    safe,
    size,
)
from health.jobs.shared import WAITING_JOBS, Shared, is_unknown_job
from init.errors import InitError
from init.slurm.client import SACCTMGR, SCONTROL, SQUEUE, SlurmError
from init.slurm.conf import expand

if TYPE_CHECKING:
    from health.jobs import boxes

SACCT, SSTAT = "/usr/bin/sacct", "/usr/bin/sstat"
MOST = 10
IDENTITY = re.compile(r"(\d{1,10})(?:([_+])(\d{1,10}))?", re.ASCII)
STEP = re.compile(r"(\d{1,10}(?:[_+]\d{1,10})?)\.(?:\d{1,10}|batch|extern|interactive)", re.ASCII)
NO_ACCOUNTING = ("accounting storage is disabled", "accounting_storage/none")
SAMPLED = 60.0  # slurmstepd's figures are nonsense before its second sample
NAMED_DAYS = 7
OPERATORS = ("Operator", "Administrator")
Run = Callable[[Sequence[str]], str]
T = TypeVar("T")


@dataclass
class Asker:
    """One call of the command: its user, its budget of commands, and what could not be read."""

    run: Run
    user: str
    is_root: bool
    now: float
    is_operator: bool | None = None  # None: not requested yet
    calls: int = 0
    age: float = 0.0  # seconds since slurmctld answered the last question about jobs
    nodes_age: float = 0.0  # the same for nodes and partitions
    missing: list[str] = field(default_factory=list)
    records: list[Job] = field(default_factory=list)  # accounting's last answer
    fetch: boxes.Fetch | None = None  # reads the black boxes of a job's nodes
    fetched: tuple[boxes.Box, ...] = ()  # of the job that was explained last
    reads_output: bool = True  # False for a capsule: it goes to other people

    @property
    def is_old(self) -> bool:
        """True if the snapshot gave the last answer: some seconds old, with the nodes that `nobody` may see."""
        return isinstance(self.run, Shared) and self.run.is_old

    def may_read_output(self, job: Job) -> bool:
        """Tell if this process has the rights of the job's user alone: the user names the file."""
        return self.reads_output and not self.is_root and job.user == self.user

    @property
    def last_age(self) -> float:
        return self.run.age if isinstance(self.run, Shared) else 0.0

    def call(self, *argv: str, directly: bool = False) -> str:
        if self.calls >= MOST:
            raise SlurmError("ask Slurm", f"one page takes at most {MOST} commands")
        self.calls += 1
        if directly and isinstance(self.run, Shared):
            return self.run.ask_directly(argv)
        return self.run(argv)

    def optional(self, what: str, read: Callable[[str], T], *argv: str, directly: bool = False) -> T | None:
        """Return what the client shows, or None and a line for the page."""
        try:
            return read(self.call(*argv, directly=directly))
        except SlurmError as error:
            self.missing.append(f"{what}: {error.why}")
        except ValueError:
            self.missing.append(f"{what}: {argv[0].rpartition('/')[2]} gave no JSON")
        return None

    def queue(self, *options: str, directly: bool = False) -> list[Job]:
        try:
            text = self.call(SQUEUE, "--json", "--states=all", *options, directly=directly)
            self.age = self.last_age
            return parse.parse_queue(text)
        except SlurmError as error:
            if is_unknown_job(error):
                return []
            raise
        except ValueError as error:
            raise SlurmError("ask slurmctld", "squeue gave no JSON") from error


def explain_own_jobs(asker: Asker) -> list[Page]:
    """Explain the caller's jobs in one line each, from one command."""
    jobs = asker.queue("--me")
    if not jobs and asker.is_old:
        jobs = asker.queue("--me", directly=True)
    age = asker.age
    return [replace(explain(job, World(), asker.now), age=age) for job in jobs if job.user == asker.user]


def find_pages(asker: Asker, wanted: str) -> list[Page]:
    """Explain one job, or list the jobs that the id or the name means."""
    if step := STEP.fullmatch(wanted):  # as sacct and error messages name it: its job is meant
        wanted = step[1]
    match = IDENTITY.fullmatch(wanted)
    jobs = _find_by_id(asker, wanted, match[1]) if match else _find_by_name(asker, wanted)
    if not jobs:
        what = f"job {wanted}" if match else f"job named {wanted!r} of yours"
        reason = "neither slurmctld nor accounting knows it"
        if asker.missing:
            reason = "slurmctld does not know it (any more); " + "; ".join(asker.missing)
        if match and "_" in wanted and (array := _find_by_id(asker, match[1], match[1])):
            tasks = list_briefly(job.shown for job in array)
            forgotten = ", and keeps nothing of a task that was cancelled while it waited"
            problem = f"; {'; '.join(dict.fromkeys(asker.missing))}" if asker.missing else forgotten
            reason = f"Slurm knows {tasks} of its array{problem}"
        raise InitError(f"explain {what}", reason)
    age = 0.0 if any(job.source == "sacct" for job in jobs) else asker.age  # before the requests for other jobs
    if len(jobs) > 1:
        pages = [explain(job, World(), asker.now) if is_visible(asker, job) else withhold(job) for job in jobs]
    else:
        pages = [explain_job(asker, jobs[0]) if is_visible(asker, jobs[0]) else withhold(jobs[0])]
    return [replace(each, age=0.0 if each.job.source == "sacct" else age, nodes_age=asker.nodes_age) for each in pages]


def explain_job(asker: Asker, job: Job) -> Page:
    if job.is_lost or job.is_unexplained:
        world = World()
    elif job.has_ended:
        job, world = _read_ended_world(asker, job)
    elif job.is_pending:
        world = _read_pending_world(asker, job)
    else:
        world = _read_running_world(asker, job)
    shown, error = explain(job, replace(world, missing=tuple(asker.missing)), asker.now), None
    if job.has_ended and job.state != "COMPLETED" and asker.may_read_output(job):
        from health.jobs import output  # imported late, as below: its patterns cost a list of jobs more than squeue

        error = output.read(job)
        answer = output.add(shown.answer, error, job) if error else output.add_full_disk(shown.answer, job)
        shown = replace(shown, answer=answer)
    if asker.fetch is None or job.is_pending or job.is_lost or not job.nodes:
        return shown
    from health.jobs import boxes

    asker.fetched = asker.fetch(job, world.nodes or ())
    was_requeued = bool(job.restarts or world.history)
    fetched = [boxes.keep_last_run(box, job, was_requeued=was_requeued) for box in asker.fetched]
    facts, unknown = boxes.explain(fetched, job)
    if not job.has_ended or job.state == "COMPLETED":
        unknown = []  # only of a job that failed do people miss what a node recorded
    answer = add_node_reports(boxes.add_failures(shown.answer, fetched, job), fetched, job, world, asker.now)
    if error is not None and error.is_about_a_network:
        answer = boxes.add_links(answer, fetched)
    answer = replace(answer, evidence=(*answer.evidence, *facts), unknown=(*answer.unknown, *unknown))
    return replace(shown, answer=answer)


def is_visible(asker: Asker, job: Job) -> bool:
    """Tell if the caller may see all of the job: its user, root, and operators of Slurm."""
    if job.user == asker.user or asker.is_root:
        return True
    if asker.is_operator is None:
        try:
            level = asker.call(SACCTMGR, "-nP", "show", "user", f"name={asker.user}", "format=adminlevel")
        except SlurmError:
            level = ""
        asker.is_operator = level.strip() in OPERATORS
    return asker.is_operator


def _find_by_id(asker: Asker, wanted: str, number: str) -> list[Job]:
    # The snapshot answers for a whole array; squeue itself shows one task of thousands.
    queued = _ask_queue(asker, number if isinstance(asker.run, Shared) or "+" in wanted else wanted)
    is_old = asker.is_old
    if jobs := _select_jobs(queued or [], wanted):
        return jobs
    # A task that was cancelled while it waited is in the record of its whole array.
    recorded = _keep_latest(_read_accounting(asker, f"--jobs={number if '_' in wanted else wanted}"), wanted)
    if is_old and not any(job.has_ended for job in recorded):
        queued = _ask_queue(asker, number, directly=True)
        if jobs := _select_jobs(queued or [], wanted):
            return jobs
    if queued is not None and not any(job.has_ended for job in recorded) and (back := _find_resubmitted(asker, number)):
        return back
    return [replace(job, is_lost=queued is not None and not job.has_ended) for job in recorded]


def _ask_queue(asker: Asker, number: str, *, directly: bool = False) -> list[Job] | None:
    try:
        return asker.queue(f"--jobs={number}", directly=directly)
    except SlurmError as error:
        asker.missing.append(f"the queue: {error.why}")
        return None


def _find_resubmitted(asker: Asker, number: str) -> list[Job]:
    """Return the caller's job that was submitted again for one that slurmctld had lost; its page names the lost one."""
    try:
        jobs = asker.queue("--me", directly=True)
    except SlurmError:
        return []
    back = ((job, pending.BACK_FOR.match(job.admin_comment)) for job in jobs if job.user == asker.user)
    return [job for job, match in back if match and number in match.groups()]


def _find_by_name(asker: Asker, name: str) -> list[Job]:
    jobs = _keep_named(asker.queue("--me"), name, asker.user)
    if not jobs and asker.is_old:
        jobs = _keep_named(asker.queue("--me", directly=True), name, asker.user)
    if jobs or "," in name:
        return jobs
    recorded = _read_accounting(asker, f"--name={name}", f"--user={asker.user}", f"--starttime=now-{NAMED_DAYS}days")
    # slurmctld has just said that it does not know them.
    named = _keep_named(_keep_latest(recorded, ""), name, asker.user)
    return [replace(job, is_lost=not job.has_ended) for job in named]


def _keep_named(jobs: Sequence[Job], name: str, user: str) -> list[Job]:
    return [job for job in jobs if job.name == name and job.user == user]


def _select_jobs(jobs: Sequence[Job], wanted: str) -> list[Job]:
    """Pick the jobs that an id means: 12 all tasks or components, 12_3 the task, also within 12_[1-9]."""
    if wanted.isdigit():
        return list(jobs)
    exact = [job for job in jobs if job.shown == wanted]
    task = wanted.partition("_")[2]
    if task and not exact:
        exact = [replace(job, shown=wanted) for job in jobs if "[" in job.shown and _has_task(job.shown, int(task))]
    return exact


def _has_task(shown: str, task: int) -> bool:
    """Tell if 12_[1-3,7,10-20:2%4] has the task. slurmctld shortens a long list with "...", which has any."""
    inside = shown.partition("[")[2].rstrip("]").partition("%")[0]
    if "..." in inside:
        return True
    for part in inside.split(","):
        if match := re.fullmatch(r"(\d{1,10})(?:-(\d{1,10})(?::(\d{1,10}))?)?", part, re.ASCII):
            first, last, step = int(match[1]), int(match[2] or match[1]), max(1, int(match[3] or 1))
            if first <= task <= last and (task - first) % step == 0:
                return True
    return False


def _read_accounting(asker: Asker, *options: str) -> list[Job]:
    records = asker.optional("its records", parse.parse_accounting, SACCT, "--json", "--duplicates", *options)
    if asker.missing and any(words in asker.missing[-1] for words in NO_ACCOUNTING):
        asker.missing[-1] = "its records: this cluster keeps no accounting, so ended jobs are forgotten after minutes"
    asker.records = records or []
    return asker.records


def _keep_latest(runs: Sequence[Job], wanted: str) -> list[Job]:
    """Keep the last run of each job."""
    last: dict[str, Job] = {}
    for run in runs:
        if run.submitted >= (last[run.shown].submitted if run.shown in last else 0):
            last[run.shown] = run
    jobs = list(last.values())
    return _select_jobs(jobs, wanted) if wanted else jobs


def _list_earlier_runs(runs: Sequence[Job], job: Job) -> tuple[Job, ...]:
    """Return the runs of the same job before this one, such as before a requeue, oldest first."""
    same = [run for run in runs if run.id == job.id and run.ended and run.started and run.started != job.started]
    return tuple(sorted(same, key=lambda run: run.started))


def _read_world_nodes(asker: Asker, job: Job) -> World:
    nodes = _read_nodes(asker)
    if asker.is_old and nodes is not None and not _shows_place(nodes, job):
        nodes = _read_nodes(asker, directly=True)
    return World(nodes=nodes)


def _read_nodes(asker: Asker, *, directly: bool = False) -> tuple[JobNode, ...] | None:
    nodes = asker.optional("the nodes", parse.parse_nodes, SCONTROL, "--json", "show", "nodes", directly=directly)
    asker.nodes_age = asker.last_age
    return nodes


def _read_partitions(asker: Asker, *, directly: bool = False) -> tuple[Partition, ...] | None:
    words = (SCONTROL, "--json", "show", "partitions")
    partitions = asker.optional("the partitions", parse.parse_partitions, *words, directly=directly)
    asker.nodes_age = max(asker.nodes_age, asker.last_age)
    return partitions


def _shows_place(nodes: Sequence[JobNode], job: Job) -> bool:
    """Tell if the nodes include those of the job and some of its partitions: the snapshot sees no hidden ones."""
    places = {name for node in nodes for name in node.partitions} | {node.name for node in nodes}
    return _list_partitions(job).union(expand(job.nodes[:65536])) <= places


def _list_partitions(job: Job) -> set[str]:
    return set(job.partition.split(",")) - {""}


def _read_pending_world(asker: Asker, job: Job) -> World:
    world, partitions = _read_world_nodes(asker, job), _read_partitions(asker)
    if asker.is_old and not _list_partitions(job) <= {each.name for each in partitions or ()}:
        world = World(nodes=_read_nodes(asker, directly=True))
        partitions = _read_partitions(asker, directly=True)
    world = replace(world, partitions=partitions)
    if job.restarts:
        world = replace(world, history=_list_earlier_runs(_read_accounting(asker, f"--jobs={job.id}"), job))
    if job.reason == "Priority":
        return _add_waiting_jobs(asker, world)
    if limits.parse_limit(job.reason):
        qos = sorted({job.qos, *(each.qos for each in world.partitions or () if each.name in job.partition)} - {""})
        argv = [SCONTROL, "show", "assoc_mgr", "flags=assoc,qos", f"accounts={job.account}"]
        argv += [f"qos={','.join(qos)}"] if qos else []
        return replace(
            world, limits=asker.optional("the limits", lambda text: parse.parse_limits(text, job.user), *argv)
        )
    if job.reason in pending.OF_ACCOUNTS:
        argv = [SACCTMGR, "-nP", "show", "associations", "where", f"user={job.user}", "format=account"]
        return replace(world, accounts=asker.optional("the user's accounts", parse.parse_lines, *argv))
    if job.reason in ("Dependency", "DependencyNeverSatisfied"):
        numbers = pending.list_dependencies(job)
        awaited = _read_dependencies(asker, numbers) if numbers else ()
        return replace(world, related_jobs=awaited)
    if job.reason == "Reservation" or (job.reason == "ReqNodeNotAvail" and "eserv" in job.detail):
        argv = [SCONTROL, "--json", "show", "reservations"]
        return replace(world, reservations=asker.optional("the reservations", parse.parse_reservations, *argv))
    if job.reason == "Licenses":
        argv = [SCONTROL, "--json", "show", "licenses"]
        return replace(world, licenses=asker.optional("the licences", parse.parse_licenses, *argv))
    return world


def _add_waiting_jobs(asker: Asker, world: World) -> World:
    """Add all jobs that wait: from the snapshot for users, for whom slurmctld would pack its whole queue each."""
    if not isinstance(asker.run, Shared):
        waiting = asker.optional("the waiting jobs", parse.parse_waiting, *WAITING_JOBS) if asker.is_root else None
        return replace(world, waiting=waiting)
    answer = asker.run.ask_for_all(WAITING_JOBS)
    return (
        replace(world, waiting=parse.parse_waiting(answer[0]), waiting_age=answer[1]) if answer is not None else world
    )


def _find_jobs_on_nodes(asker: Asker, nodes: str) -> tuple[Job, ...] | None:
    """Return the jobs on these nodes, of all users as squeue shows them."""
    try:
        return tuple(asker.queue(f"--nodelist={nodes}", directly=True)) if nodes else ()
    except SlurmError as error:
        asker.missing.append(f"the job that took its place: {error.why}")
        return None


def _read_dependencies(asker: Asker, numbers: Sequence[str]) -> tuple[Job, ...] | None:
    try:
        jobs = asker.queue(f"--jobs={','.join(numbers)}")
        if asker.is_old and (absent := [number for number in numbers if not pending.find_jobs(number, jobs)]):
            jobs += asker.queue(f"--jobs={','.join(absent)}", directly=True)
        return tuple(jobs)
    except SlurmError as error:
        asker.missing.append(f"the jobs that it depends on: {error.why}")
        return None


def _read_running_world(asker: Asker, job: Job) -> World:
    world = _read_world_nodes(asker, job)
    if job.restarts:
        world = replace(world, history=_list_earlier_runs(_read_accounting(asker, f"--jobs={job.id}"), job))
    if asker.now - job.started >= SAMPLED and "RUNNING" in job.states:
        argv = [SSTAT, "--allsteps", "-nP", "--noconvert", f"--jobs={job.id}", "--format=JobID,TRESUsageInTot"]
        world = replace(world, usage=asker.optional("what it uses", parse.parse_usage, *argv))
    if job.output and asker.may_read_output(job):
        from health.jobs import output

        world = replace(world, output_age=output.age(job.output, job.started, asker.now))
    return world


def _read_ended_world(asker: Asker, job: Job) -> tuple[Job, World]:
    """Return an ended job and its surroundings, from accounting's record where slurmdbd has the end already.

    That record has the job's steps and the user that cancelled it; slurmdbd may lag behind slurmctld.
    """
    runs = asker.records if job.source == "sacct" else _read_accounting(asker, f"--jobs={job.shown}")
    records = [run for run in runs if run.id == job.id]
    world = replace(_read_world_nodes(asker, job), history=_list_earlier_runs(records, job))
    if "PREEMPTED" in job.states:
        world = replace(world, related_jobs=_find_jobs_on_nodes(asker, job.nodes))
    last = max(records, key=lambda run: (run.submitted, run.started), default=None)
    if last is None or not last.states & ENDED:
        return job, world
    combined = replace(
        last,
        shown=job.shown,
        output=last.output or job.output,
        errors=last.errors or job.errors,
        command=job.command,
        failed_node=last.failed_node or job.failed_node,
        admin_comment=last.admin_comment or job.admin_comment,
        memory=last.memory or job.memory,
        reason=job.reason if job.reason not in ("", "None") else last.reason,
    )
    return combined, world


HUNG_S = 600.0  # without output and with unused GPUs
MOST_GPUS = 64


@dataclass(frozen=True, slots=True)
class GpuUse:
    minor: int
    use: int
    memory: int
    room: int
    idle: float  # seconds for which each sample saw it unused


def add_node_reports(answer: Answer, fetched: Sequence[boxes.Box], job: Job, world: World, now: float) -> Answer:
    """Add to the answer of a running job what its nodes say."""
    if "RUNNING" not in job.states:
        return answer
    from health.jobs import ranks

    nodes = {box.node: tuple(_parse_gpu_uses(box)) for box in fetched}
    facts = [_describe_gpu_uses(node, uses) for node, uses in nodes.items() if uses]
    answer = replace(answer, evidence=(*answer.evidence, *facts))
    problems = [f"{safe(box.node, 80)}: {safe(text, 160)}" for box in fetched for text in _list_problems(box)]
    # A node that does not answer is worse than a problem on another.
    if problems and answer.cause is not JobCause.MACHINE:
        head = f"{answer.headline} A check found a problem while it ran: {list_briefly(problems, 2)}."
        answer = replace(answer, headline=head, cause=JobCause.MACHINE, sure=Sure.POSSIBLE)
    answer = ranks.add(answer, fetched, job)
    used = [gpu for uses in nodes.values() for gpu in uses]
    idle = min((gpu.idle for gpu in used), default=0.0)
    if idle < HUNG_S:
        return answer
    silent = min(idle, world.output_age or 0.0)
    if silent >= HUNG_S and all(nodes.values()):
        head = f"{answer.headline} No output and 0 % of its GPUs for {duration(silent)}: hung?"
        cause = JobCause.UNKNOWN if answer.cause is JobCause.NONE else answer.cause
        return replace(answer, headline=head, cause=cause, sure=Sure.POSSIBLE)
    advice = f"its GPUs were unused for {duration(idle)}: see if it waits for data, or does not use them at all"
    return replace(answer, advice=(*answer.advice, advice))


def _parse_gpu_uses(box: boxes.Box) -> Iterator[GpuUse]:
    entry = box.entries[0] if box.entries and box.entries[0].get("kind") == "now" else {}
    rows, sampled = entry.get("gpus"), entry.get("sampled")
    if not isinstance(rows, list) or not isinstance(sampled, int | float):
        return
    for row in rows[:MOST_GPUS]:
        if isinstance(row, list) and len(row) == 5 and all(isinstance(part, int | float) for part in row):
            minor, use, memory, room, since = row
            if all(0 <= part < 1 << 40 for part in row):
                # Both times are the node's own.
                yield GpuUse(int(minor), int(use), int(memory), int(room), max(0.0, sampled - since) if since else 0.0)


def _describe_gpu_uses(node: str, uses: Sequence[GpuUse]) -> Fact:
    shown = list_briefly((f"GPU {gpu.minor} {gpu.use} %, {size(gpu.memory)} of {size(gpu.room)}" for gpu in uses), 8)
    return Fact(f"on {safe(node, 80)} it uses {shown}", "nvidia-smi")


def _list_problems(box: boxes.Box) -> list[str]:
    """Return the problems that came while the job ran and have not gone, by the broker's words in the box."""
    standing: dict[str, str] = {}
    for entry in box.last_run:
        text = entry.get("text")
        if entry.get("kind") != "seen" or not isinstance(text, str):
            continue
        if text.startswith("no longer: "):
            standing.pop(text.removeprefix("no longer: "), None)
        elif not text.startswith("drained by the broker") and ": " in text:
            standing[text.partition(": ")[0]] = text
    return list(standing.values())
