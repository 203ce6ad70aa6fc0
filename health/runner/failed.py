"""Tell users in their output files why their batch jobs failed, and count the causes.

The resident runner notes each job that may have failed as its epilog begins (`FailedJobs`). Some seconds later a fork
of the runner asks slurmctld about all of them at once, appends a note of two lines to each job's output file, with no
other rights than those of the job's user, and adds the causes to a metrics file (`tell`).

It cannot happen in the epilog: Slurm forbids its commands there, and the job's end waits for it. A note may be lost
with the runner, and is never written twice.
"""

from __future__ import annotations

import errno
import os
import pwd
import re
import select
import signal
import stat
import time
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING

from ground.files import write_if_possible
from ground.metrics import family
from health.checks import failed_jobs
from health.places import Places
from health.policy import PROPOSALS, load_broker_policy, read_broker_policy
from health.runner import record
from health.verdict import Class, Result, read_verdicts
from init.errors import InitError
from init.slurm.conf import expand

if TYPE_CHECKING:
    from health.jobs.model import Job

WAIT_S = 1.0
# The nodes of a large array that fails ask slurmctld one after the other, each at a moment of its own.
SPREAD_S = 10.0
APART_S = 5.0
CHECKED_S = 12.0  # for the checks of the node that follow a job: they may find the machine guilty
# A node asks slurmctld once in five seconds, about at most 8 jobs; jobs beyond those that wait get no
MOST = 8
MOST_WAITING = 64
MOST_RUNNING = 4096
ASK_S = 5.0
WRITE_S = 5.0
# Series that exist from the start: increase() does not see the first failure of a series that appears with it.
SERIES = (
    ("FAILED", "your code"), ("FAILED", "your code or the machine"), ("FAILED", "the request"),
    ("FAILED", "the cluster"), ("FAILED", "not known"), ("OUT_OF_MEMORY", "the request"), ("TIMEOUT", "a limit"),
    ("NODE_FAIL", "the machine"), ("BOOT_FAIL", "not known"), ("DEADLINE", "the request"),
    ("CANCELLED", "a person"), ("CANCELLED", "the cluster"), ("PREEMPTED", "the cluster"),
)  # fmt: skip
MOST_SERIES = 40
OTHER = ("OTHER", "not known")
MAYBE_THE_MACHINE = frozenset({"your code", "not known", "the machine"})
MOST_ANSWER = 4 << 20
FAILED_TOTAL, UNEXPLAINED_TOTAL = "minivm_jobs_failed_total", "minivm_jobs_unexplained_total"
_SAMPLE = re.compile(
    rf'{FAILED_TOTAL}\{{state="([A-Z_]{{1,40}})",cause="([a-z ]{{1,40}})"\}} ([0-9]{{1,15}})', re.ASCII
)
_UNEXPLAINED = re.compile(rf"^{UNEXPLAINED_TOTAL} ([0-9]{{1,15}})$", re.ASCII | re.MULTILINE)


@dataclass(frozen=True, slots=True)
class EndedJob:
    id: int
    uid: int
    gid: int
    at: float = 0.0  # when its epilog began; its processes had ended


class FailedJobs:
    """Jobs of this node that may have failed: the exit code says so, or the time limit was reached."""

    def __init__(self) -> None:
        self._limits: dict[int, float] = {}  # when the running jobs reach their time limits
        self._waiting: dict[int, EndedJob] = {}
        self._due_at = -inf
        self._pid = 0
        self.dropped = 0  # jobs beyond MOST_WAITING

    def note_start(self, env: Mapping[str, str]) -> None:
        """Keep the time limit of a job whose prolog begins."""
        job, end = _number(env, "SLURM_JOB_ID"), _number(env, "SLURM_JOB_END_TIME")
        if job and end:
            while len(self._limits) >= MOST_RUNNING:
                del self._limits[next(iter(self._limits))]
            self._limits[job] = end

    def note_end(self, env: Mapping[str, str], now: float, wall: float) -> None:
        """Note a job whose epilog begins, if its batch script ran here."""
        number, uid, gid = (_number(env, f"SLURM_JOB_{name}") for name in ("ID", "UID", "GID"))
        job = EndedJob(number, uid, gid, wall)
        limit = self._limits.pop(job.id, inf)
        # slurmctld sends a job that reached its limit to its epilog with exit code 0.
        if not job.id or not job.uid or (env.get("SLURM_JOB_EXIT_CODE", "0") == "0" and wall < limit - 1):
            return
        first = expand(env.get("SLURM_JOB_NODELIST", "")[:65536])[:1]
        node = env.get("SLURMD_NODENAME", "")
        if first != [node]:
            return
        if len(self._waiting) >= MOST_WAITING and job.id not in self._waiting:
            self.dropped += 1
            return
        if not self._waiting:
            self._due_at = max(now + WAIT_S + choose_delay(node), self._due_at)
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

    def set_fork(self, pid: int) -> None:
        self._pid = pid

    def forget_fork(self, pid: int) -> None:
        if pid == self._pid:
            self._pid = 0


def choose_delay(node: str) -> float:
    """Return the node's own delay, from 0 to SPREAD_S."""
    return SPREAD_S * (zlib.crc32(node.encode()) & 0xFFFF) / 0x10000


def _number(env: Mapping[str, str], name: str) -> int:
    text = env.get(name, "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 12 else 0


def tell(jobs: list[EndedJob], places: Places, dropped: int = 0) -> None:
    """Write the notes and count the causes, in a fork of the runner. `dropped`: jobs that nothing looks up."""
    os.closerange(3, 1 << 20)  # a client of the runner sees its end only once no process holds its connection
    done: list[int] = []
    skipped: dict[str, str] = {}
    hung: set[int] = set()
    try:
        ended_jobs = _ask(jobs)
        beside = suspicion(places, time.time())
    except Exception as error:  # a defect, or slurmctld is away: it costs notes, and no job
        ended_jobs, beside, skipped = {}, "", {str(job.id): (str(error) or repr(error))[:300] for job in jobs}
    for job in jobs if not skipped else ():
        try:
            obstacle = (
                "its user's file system hangs" if job.uid in hung else _tell(job, ended_jobs.get(job.id), beside, hung)
            )
        except Exception as error:
            obstacle = str(error) or repr(error)
        if obstacle:
            skipped[str(job.id)] = obstacle[:300]
        else:
            done.append(job.id)
    entry: dict[str, object] = {"at": round(time.time(), 3), "kind": "note", "job": "", "result": "ok", "told": done}
    record.append({**entry, "skipped": skipped} if skipped else entry)
    count(metrics_path(places), jobs, ended_jobs, beside, dropped)
    with suppress(OSError):
        note_failures(jobs, ended_jobs, places.state / failed_jobs.FILE.name)


def note_failures(
    jobs: list[EndedJob], ended_jobs: Mapping[int, Job], path: Path, run: failed_jobs.Run | None = None
) -> str:
    """Note jobs that failed for what may be their code or this node, for the check `failing_jobs`."""
    failures: list[failed_jobs.FailedJob] = []
    for ended in jobs:
        job = ended_jobs.get(ended.id)
        state, cause = (job and classify(job, time.time())) or ("", "")
        if job is not None and state == "FAILED" and cause in MAYBE_THE_MACHINE:
            failures.append(failed_jobs.FailedJob(job.user, job.name, job.shown, ended.at))
            node = (expand(job.nodes[:65536]) or [""])[0]
    return failed_jobs.note(failures, node, time.time(), run or _ask_accounting, path) if failures else ""


def _ask_accounting(argv: Sequence[str]) -> str:
    from init.slurm import client

    return client.run(argv, client.address(os.environ), within=ASK_S, most=MOST_ANSWER)


def metrics_path(places: Places) -> Path:
    return places.metrics.with_name("jobs.prom")


def count(path: Path, jobs: list[EndedJob], ended_jobs: Mapping[int, Job], beside: str, dropped: int) -> None:
    """Add the ended jobs to the counters of the file; only one fork at a time writes it."""
    counts, unexplained = read_counts(path)
    unexplained += dropped
    for ended in jobs:
        job = ended_jobs.get(ended.id)
        if job is None:
            unexplained += 1
        elif key := classify(job, time.time(), beside):
            key = key if key in counts or len(counts) < MOST_SERIES else OTHER
            counts[key] = counts.get(key, 0) + 1
    write_counts(path, counts, unexplained)


def read_counts(path: Path) -> tuple[dict[tuple[str, str], int], int]:
    """Return the counters by state and cause, and that of unexplained jobs; zeros without a readable file."""
    counts = dict.fromkeys((*SERIES, OTHER), 0)
    try:
        text = path.read_text("ascii", "replace")
    except OSError:
        return counts, 0
    counts |= {(state, cause): int(number) for state, cause, number in _SAMPLE.findall(text)[:MOST_SERIES]}
    unexplained = _UNEXPLAINED.search(text)
    return counts, int(unexplained[1]) if unexplained else 0


def write_counts(path: Path, counts: Mapping[tuple[str, str], int], unexplained: int) -> None:
    failed = [({"state": state, "cause": cause}, str(number)) for (state, cause), number in counts.items()]
    about = "Batch jobs that ended badly, on their first node, by Slurm's state and the cause that minivm job gives."
    lines = [
        *family(FAILED_TOTAL, about, failed, "counter"),
        *family(
            UNEXPLAINED_TOTAL, "Batch jobs that may have ended badly and that slurmctld was not asked about or forgot.",
            [({}, str(unexplained))], "counter",
        ),
    ]  # fmt: skip
    write_if_possible(path, "\n".join(lines) + "\n")


def _ask(jobs: list[EndedJob]) -> dict[int, Job]:
    # Imported late, in the fork: most rounds have no job that failed.
    from health.jobs.ask import Asker
    from init.slurm import client

    controller, now = client.address(os.environ), time.time()
    asker = Asker(lambda argv: client.run(argv, controller, within=ASK_S), "root", is_root=True, now=now)
    return {job.id: job for job in asker.queue(f"--jobs={','.join(str(job.id) for job in jobs)}")}


def suspicion(places: Places, now: float) -> str:
    """Name the heaviest problem that this node has now; "" without one that may drain it."""
    try:
        ignored = (load_broker_policy(places.policy) or read_broker_policy(places.scripts)).checks
    except InitError:
        ignored = PROPOSALS
    problems = [
        verdict
        for verdict in read_verdicts(places.verdicts).values()
        if verdict.result is Result.PROBLEM and verdict.class_ is not Class.USER and now < verdict.expires
        and ignored.get(verdict.check) != "never"
    ]  # fmt: skip
    heaviest = max(problems, key=lambda verdict: verdict.class_.weight, default=None)
    return f"{heaviest.check}: {heaviest.reason}" if heaviest else ""


def _tell(ended: EndedJob, job: Job | None, beside: str, hung: set[int]) -> str:
    if job is None:
        return "slurmctld does not know it any more"
    text = note_text(job, time.time(), os.environ.get("MINIVM_POD_NAME", ""), beside)
    if not text:
        return "it gets none"
    obstacle = append_note(job.errors or job.output, text, ended.uid, ended.gid, (job.started, ended.at), WRITE_S)
    if "does not answer" in obstacle:
        hung.add(ended.uid)
    return obstacle


# Ends that Slurm's own line in the output ("CANCELLED AT ...") says whole, and good ones, get no note.
NOTED = frozenset({"FAILED", "OUT_OF_MEMORY", "TIMEOUT", "NODE_FAIL", "BOOT_FAIL", "DEADLINE"})
SUSPECT = "your code or the machine"  # the node has a problem now, and that may be why the program failed
LONGEST = 400
CLOCKS_S = 60.0  # by which a file server's clock may differ from the node's
LATER_S = 1.0  # after the job's epilog began, another job or the user writes to the file
TAIL = 4096
REFUSED = "not a plain file of the job's user that the job has written"


def note_text(job: Job, now: float, node: str = "", problem: str = "") -> str:
    """Return the two lines; "" for a job that gets none. `problem`: what is wrong with this node now.

    slurmctld shows no steps, and the other nodes are not read: the note says only what this node knows.
    """
    from health.jobs.explain import explain, render_cause  # imported late, in the fork, as in `_ask`
    from health.jobs.model import JobCause, World, safe

    if not job.batch or not job.has_ended or job.state not in NOTED or _is_follower(job):
        return ""
    page = explain(job, World(), now)
    cause = f" Cause: {render_cause(page)}."
    if job.state == "FAILED" and page.answer.cause in (JobCause.CODE, JobCause.UNKNOWN):
        cause = " Cause: your code, or one of its steps." if page.answer.cause is JobCause.CODE else ""
        if problem:
            cause = f" Cause: your code, or the machine: {safe(node, 80)} has a problem ({safe(problem, 120)})."
    return (
        f"minivm: job {safe(job.shown, 40)} failed: {safe(page.answer.headline, LONGEST)}{cause}\n"
        f"minivm: evidence and what to do: minivm job {safe(job.shown, 40)}\n"
    )


def classify(job: Job, now: float, problem: str = "") -> tuple[str, str] | None:
    """Return the state and the cause of a batch job that ended badly; None for any other job."""
    from health.jobs.explain import explain  # imported late, in the fork, as in `_ask`
    from health.jobs.model import JobCause, World

    if not job.batch or not job.has_ended or job.state == "COMPLETED" or _is_follower(job):
        return None
    cause = explain(job, World(), now).answer.cause
    return job.state, SUSPECT if job.state == "FAILED" and cause is JobCause.CODE and problem else str(cause)


def _is_follower(job: Job) -> bool:
    """Tell if the job is a component that shares the output of a heterogeneous job's first one."""
    return "+" in job.shown and not job.shown.endswith("+0")


def append_note(path: str, text: str, uid: int, gid: int, ran: tuple[float, float], within: float) -> str:
    """Append the text to the output file of a job that ran from and until then; return "" or why not.

    A child does it as the user, so that the kernel refuses what it refuses the user, and no file system can hang the
    caller. Nothing is created, and nothing but a plain file of the user is opened for writing.
    """
    if uid <= 0 or gid <= 0 or not path.startswith("/"):
        return REFUSED
    child = os.fork()
    if not child:
        code = errno.EIO
        try:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.closerange(3, 1 << 16)  # the caller's connections
            _become(uid, gid)
            code = _append_as_user(path, text.encode(), uid, ran)
        except OSError as error:
            code = error.errno or errno.EIO
        finally:
            os._exit(code)
    watched = os.pidfd_open(child)
    try:
        poll = select.poll()
        poll.register(watched, select.POLLIN)
        if not poll.poll(within * 1000):
            # It may be stuck in the kernel: PID 1 reaps it when the caller has ended.
            os.kill(child, signal.SIGKILL)
            return f"its file system does not answer within {within:g} s"
    finally:
        os.close(watched)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code == errno.EINVAL:
        return REFUSED
    return os.strerror(code) if code > 0 else "the child was killed" if code else ""


def _become(uid: int, gid: int) -> None:
    groups = [gid]
    with suppress(KeyError):
        groups = os.getgrouplist(pwd.getpwuid(uid).pw_name, gid)
    os.setgroups(groups)
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)


def _append_as_user(path: str, text: bytes, uid: int, ran: tuple[float, float]) -> int:
    """Return 0 or an errno. The file is looked at before it is opened: a device or FIFO may act on being opened."""
    earliest, latest = ran[0] - CLOCKS_S, ran[1] + LATER_S
    place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    status = os.fstat(place)
    # The node's path may be another file than the job's, which had its own view of /tmp; or the output of the next job.
    if not stat.S_ISREG(status.st_mode) or status.st_uid != uid or not earliest <= status.st_mtime <= latest:
        return errno.EINVAL
    way, flags = f"/proc/self/fd/{place}", os.O_APPEND | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    try:
        file = os.open(way, os.O_RDWR | flags)
        tail = os.pread(file, TAIL, max(0, status.st_size - TAIL))
    except PermissionError:
        file, tail = os.open(way, os.O_WRONLY | flags), b""
    if tail.endswith(text):
        return 0  # an epilog may run twice
    whole = text if not status.st_size or tail.endswith(b"\n") else b"\n" + text
    return 0 if os.write(file, whole) == len(whole) else errno.ENOSPC
