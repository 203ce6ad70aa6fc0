"""Prepare slurmctld's saved state before each start: finish interrupted saves, and give no job number twice.

slurmctld saves each file as NAME.new, then renames NAME to NAME.old and NAME.new to NAME. A kill between these renames
leaves no NAME. From release 25.05 on slurmctld does not start without its state files where its `clustername` holds the
cluster's number, and it first saves some of them after 300 seconds: a kill before that would be its last.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from stat import S_ISREG

from ground.files import read_plain, write_whole
from init.errors import InitError
from init.fields import number
from init.pod.pod import Pod, user
from init.pod.release import Release
from init.slurm import lost_jobs
from init.slurm.conf import setting
from init.slurm.place import (
    CONFIGURATION,
    JOBS,
    LARGEST,
    NEW,
    NEXT,
    OLD,
    WHOLE_HEAD,
    head_of,
    known,
    next_job,
    state_of,
    submitted_jobs,
)

QUESTION = "SELECT MAX(id_job) FROM `{cluster}_job_table` WHERE id_job < {largest}"


def run(pod: Pod) -> str:
    """Repair the state; never fails, since slurmctld itself reports what cannot be repaired here."""
    try:
        return "; ".join(_repaired(pod)) or "whole"
    except (InitError, OSError, ValueError) as error:
        return f"the saved state stays as it is: {error}"


def _repaired(pod: Pod) -> Iterator[str]:
    conf = pod.text(CONFIGURATION) or ""
    state = state_of(pod)
    if not state.is_dir():
        return
    for name in finish_saves(state):
        yield f"finished the save of {name}, which a kill had cut"
    release = known(pod)
    if release is not None:
        yield from _keep_lost_jobs(pod, state, release)
    accounted = setting(conf, "AccountingStorageType").endswith("slurmdbd")
    if release is not None and accounted and (highest := accounted_job(pod, conf)):
        yield from _continue_after(highest, "the accounting database knows", release, state)
    if release is not None and (highest := accepted_job(state)):
        yield from _continue_after(highest, "slurmctld had accepted, and not saved,", release, state)
    if allow_missing(state, setting(conf, "ClusterName"), release.needs_state if release and accounted else ()):
        yield "slurmctld had been killed before its first saves: it asks slurmdbd for the cluster's number again"


def _keep_lost_jobs(pod: Pod, state: Path, release: Release) -> Iterator[str]:
    """Keep the scripts of jobs that are not in the state, before their numbers are passed; never fails."""
    try:
        head = read_plain(state / JOBS, WHOLE_HEAD)
        unsaved = not any(os.path.lexists(state / f"{JOBS}{end}") for end in ("", OLD))
        following = next_job(head, release) if head is not None else 1 if unsaved else None
        if following is not None:
            owners_told = partial(lost_jobs.tells_owners, pod)
            yield from lost_jobs.keep(state, following, pod.path(lost_jobs.LOST), owners_told)
    except OSError as error:
        yield f"lost jobs are not kept: {error.strerror or error}"


def finish_saves(state: Path) -> list[str]:
    """Rename each NAME.new whose NAME is absent, and return the names.

    With NAME.old there, slurmctld had written and synced NAME.new before the kill. Without, it may be half a file.
    """
    finished = []
    for new in sorted(state.glob(f"*{NEW}")):
        name = new.name.removesuffix(NEW)
        if not os.path.lexists(state / name) and _is_file(new) and _is_file(state / f"{name}{OLD}"):
            new.rename(state / name)
            finished.append(name)
    return finished


def allow_missing(state: Path, cluster: str, needed: Sequence[str]) -> bool:
    """Remove the cluster's number from `clustername` if needed, so that slurmctld starts without the missing files.

    It then asks slurmdbd for the number, as at its first start, and reads the files that are there. A file that has a
    NAME.old was saved before and is lost: slurmctld refuses that, and an operator decides. An empty `clustername` comes
    from a kill, too. Returns True if the file was changed.
    """
    file = state / "clustername"
    text = read_plain(file, 512)
    if text is None:
        return False
    name, _, number_of_cluster = text.decode(errors="replace").strip().partition("|")
    missing = [needed_file for needed_file in needed if not os.path.lexists(state / needed_file)]
    lost = [needed_file for needed_file in missing if os.path.lexists(state / f"{needed_file}{OLD}")]
    if name and (not number_of_cluster or not missing or lost):
        return False
    if not (name or cluster):
        return False
    write_whole(file, name or cluster.lower(), mode=0o600, owner=user("slurm"))
    return True


def accounted_job(pod: Pod, conf: str) -> int | None:
    """Return the last job in the accounting database: the state may be older, or new."""
    cluster = setting(conf, "ClusterName").lower()
    if not re.fullmatch(r"[a-z0-9_-]+", cluster):
        return None
    from init.slurm.accounting import CONFIGURATION as DATABASE
    from init.slurm.accounting import ask

    return number(ask(pod.text(DATABASE) or "", QUESTION.format(cluster=cluster, largest=LARGEST)))


def accepted_job(state: Path) -> int:
    """Return the last job that has a script, or 0."""
    return max((job for job, _ in submitted_jobs(state) if job < LARGEST), default=0)


def _continue_after(highest: int, knows: str, release: Release, state: Path) -> Iterator[str]:
    """Raise the next job's number above this one."""
    head = read_plain(state / JOBS, WHOLE_HEAD)
    following = next_job(head, release) if head is not None else 0
    unsaved = not (os.path.lexists(state / JOBS) or os.path.lexists(state / f"{JOBS}{OLD}"))
    if following is None or (head is None and not unsaved):
        return
    # Numbers start again at FirstJobId after MaxJobId: a far larger number is from before that.
    if not following <= highest < following + LARGEST // 2:
        return
    if head is None:
        write_whole(state / JOBS, head_of(release, highest + 1, time.time()), mode=0o600, owner=user("slurm"))
    else:
        _put(state / JOBS, (highest + 1).to_bytes(4, "big"))
    yield f"the next job gets number {highest + 1}: {knows} job {highest}"


def _put(path: Path, following: bytes) -> None:
    """Write in place: the file may be large, and four bytes within one block are written whole or not at all."""
    fd = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(fd)
        if S_ISREG(status.st_mode) and status.st_uid == user("slurm")[0]:
            os.pwrite(fd, following, NEXT)
            os.fsync(fd)
    finally:
        os.close(fd)


def _is_file(path: Path) -> bool:
    with contextlib.suppress(OSError):
        return S_ISREG(path.lstat().st_mode)
    return False
