"""Append the cause to the output file of a batch job that failed, with no other rights than those of the job's user."""

from __future__ import annotations

import errno
import os
import pwd
import select
import signal
import stat
from contextlib import suppress

from health.jobs import render
from health.jobs.explain import explain
from health.jobs.model import Job, JobCause, World, safe

# Ends that Slurm's own line in the output ("CANCELLED AT ...") says whole, and good ones, get no note.
NOTED = frozenset({"FAILED", "OUT_OF_MEMORY", "TIMEOUT", "NODE_FAIL", "BOOT_FAIL", "DEADLINE"})
SUSPECT = "your code or the machine"  # the node has a problem now, and that may be why the program failed
LONGEST = 400
CLOCKS_S = 60.0  # by which a file server's clock may differ from the node's
LATER_S = 1.0  # after the job's epilog began, another job or the user writes to the file
TAIL = 4096
REFUSED = "not a plain file of the job's user that the job has written"


def words(job: Job, now: float, node: str = "", problem: str = "") -> str:
    """Return the two lines; "" for a job that gets none. `problem`: what is wrong with this node now.

    slurmctld shows no steps, and the other nodes are not looked at: the note says no more than it knows.
    """
    if not job.batch or not job.has_ended or job.state not in NOTED or _is_follower(job):
        return ""
    page = explain(job, World(), now)
    cause = f" Cause: {render.cause(page)}."
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
    if not job.batch or not job.has_ended or job.state == "COMPLETED" or _is_follower(job):
        return None
    cause = explain(job, World(), now).answer.cause
    return job.state, SUSPECT if job.state == "FAILED" and cause is JobCause.CODE and problem else str(cause)


def _is_follower(job: Job) -> bool:
    """Tell if the job is a component that shares the output of a heterogeneous job's first one."""
    return "+" in job.shown and not job.shown.endswith("+0")


def append(path: str, text: str, uid: int, gid: int, ran: tuple[float, float], within: float) -> str:
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
            code = _append(path, text.encode(), uid, ran)
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


def _append(path: str, text: bytes, uid: int, ran: tuple[float, float]) -> int:
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
