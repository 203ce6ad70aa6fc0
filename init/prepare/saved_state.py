"""Steps on Slurm's saved state and database before slurmctld and slurmdbd start: guard, repair, compare releases.

- `state-guard` refuses a state that would lose the jobs which another one has; it only reads. slurmctld starts without
  any job from an absent or empty job_state, and says so in its log alone. It refuses another cluster's state itself,
  and is started twenty times before the pod ends.
- `saved-state` finishes interrupted saves, and sees that slurmctld gives no job number twice. slurmctld saves each file
  as NAME.new, then renames NAME to NAME.old and NAME.new to NAME. A kill between these renames leaves no NAME. From
  release 25.05 on slurmctld does not start without its state files where its `clustername` holds the cluster's number,
  and it first saves some of them after 300 seconds: a kill before that would be its last.
- `slurm-state`, `accounting-state` and `accounting-records` refuse what this Slurm cannot take over.
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
from init.errors import ConfigError, InitError
from init.fields import number
from init.pod import release as slurm
from init.pod.pod import Pod, run_as, user
from init.pod.release import Release
from init.slurm import lost_jobs
from init.slurm.conf import setting
from init.slurm.place import (
    ACCEPTED,
    BACKUPS,
    CONFIGURATION,
    JOBS,
    JOURNAL,
    LARGEST,
    NEW,
    NEXT,
    OLD,
    WHOLE_HEAD,
    find_state_directory,
    has_head,
    list_submitted_jobs,
    make_head,
    read_next_job,
    read_release,
)

START = "start slurmctld"
# The pod's own claim, where the state is on another one.
OWN_STATE = "/mnt/minivm/own-state"
# What moving the state leaves behind (docs/how-to/two-controllers.md, come-from-slinky.md).
MOVED = "moved-to-another-claim"
# The top of a claim that another operator's slurmctld has its state on; this cluster's is in a directory below.
CLAIM = "/mnt/minivm/claim"
OPENED_S = 10


def guard(pod: Pod) -> str:
    """Refuse to start slurmctld with a state that would lose the jobs which another one has."""
    conf = pod.text(CONFIGURATION) or ""
    state = find_state_directory(pod)
    _check_others(pod)
    if not state.is_dir():
        return "there is no state yet"
    if os.path.lexists(state / JOURNAL):
        from init.state.restore import find_pending

        hint = f"finish it: minivm state restore {find_pending(state)}"
        raise ConfigError(START, "a restore of its state was cut", file=str(state / JOURNAL), hint=hint)
    cluster = setting(conf, "ClusterName")
    _check_cluster(pod, state, cluster)
    return _check_jobs(pod, state, cluster)


def _check_others(pod: Pod) -> None:
    """Refuse a claim with the state of another operator's slurmctld: it may be running, or its jobs did not move."""
    top = pod.path(CLAIM)
    if _has_jobs(top):
        problem = "another operator's slurmctld has its state at the top of the claim"
        hint = "two controllers lose jobs: end that one, and move its state (docs/how-to/come-from-slinky.md, move.sh)"
        raise ConfigError(START, problem, file=str(top / JOBS), hint=hint)


def _check_cluster(pod: Pod, state: Path, cluster: str) -> None:
    file = state / "clustername"
    owner = (read_plain(file, 512) or b"").decode(errors="replace").strip().partition("|")[0]
    if owner and cluster and owner.lower() != cluster.lower():
        problem = f"found the state of the cluster {owner!r}, expected {cluster!r}"
        hint = f"mount that cluster's own volume, or set clusterName: {owner}; {way_back(pod, cluster)}"
        raise ConfigError(START, problem, file=str(file), hint=hint)


def _check_jobs(pod: Pod, state: Path, cluster: str) -> str:
    file = state / JOBS
    _check_owner(file)
    head = read_plain(file, WHOLE_HEAD)
    if head is None and _has_jobs(state):
        return "slurmctld reads the state that was saved before"
    if head is not None:
        if read_release(pod) is None or has_head(head):
            (state / ACCEPTED).unlink(missing_ok=True)  # it was for one start
            return "the state is this cluster's"
        problem = "found an empty file" if not head else "found a damaged file"
        hint = (
            f"{way_back(pod, cluster)}; or to start without any job: move that file away, then minivm state accept-loss"
        )
        raise ConfigError(START, f"{problem}, expected the cluster's jobs", file=str(file), hint=hint)
    if os.path.lexists(state / ACCEPTED):
        return "there are no jobs in the state, as an operator accepted"
    _check_claim(pod, state)
    lost = _newest(pod, cluster, with_jobs=True)
    if lost:
        problem = f"found no file, and the copy {lost} has unfinished jobs"
        hint = (
            f"minivm stop slurmctld && minivm state restore {lost}; or to start without them: minivm state accept-loss"
        )
        raise ConfigError(START, problem, file=str(file), hint=hint)
    return "there are no jobs yet"


def _check_owner(file: Path) -> None:
    """Refuse jobs that slurmctld may not read: it would start without them."""
    try:
        status = file.lstat()
    except OSError:
        return
    uid, group = user("slurm")
    if status.st_uid != uid and not _is_readable_by(uid, group, file):
        hint = f"set slurm.uid: {status.st_uid} if another operator's pods have that number, or chown it to {uid}"
        raise ConfigError(START, f"its jobs are uid {status.st_uid}'s, and slurm is {uid}", file=str(file), hint=hint)


def _is_readable_by(uid: int, group: int, file: Path) -> bool:
    """Open the file as that user. Its mode does not tell: a server of NFS may map all users to one."""
    if os.geteuid():
        return os.access(file, os.R_OK)
    reading, writing = os.pipe()

    def read() -> None:
        os.close(os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK))
        os.write(writing, b"1")

    try:
        run_as(uid, group, read, unused=uid, within=OPENED_S)
    finally:
        os.close(writing)
    with os.fdopen(reading, "rb") as answer:
        return answer.read() == b"1"


def _check_claim(pod: Pod, state: Path) -> None:
    """Refuse an empty state on one claim while the jobs are on another. The chart cannot see it without a cluster."""
    for directory in (state, state.parent):  # of several controllers each term has a directory below
        if os.path.lexists(directory / MOVED):
            problem = "the state was moved to another claim, or back to another operator"
            hint = (
                "name the claim in controller.persistence.existingClaim, or come over again (move.sh over); "
                "or to start without any job: remove that file"
            )
            raise ConfigError(START, problem, file=str(directory / MOVED), hint=hint)
    own = pod.path(OWN_STATE)
    if _has_jobs(own):
        problem = f"found no file, and the pod's own claim has one ({own / JOBS})"
        hint = "move the state (docs/how-to/two-controllers.md); or to start without any job: minivm state accept-loss"
        raise ConfigError(START, problem, file=str(state / JOBS), hint=hint)


def _has_jobs(state: Path) -> bool:
    return any(os.path.lexists(state / f"{JOBS}{end}") for end in ("", NEW, OLD))


def way_back(pod: Pod, cluster: str) -> str:
    """Name the newest good copy and the command, for a person."""
    name = _newest(pod, cluster)
    return f"minivm stop slurmctld && minivm state restore {name}" if name else "there is no good copy of its state"


def _newest(pod: Pod, cluster: str, *, with_jobs: bool = False) -> str:
    directory = pod.path(BACKUPS)
    if not directory.is_dir():
        return ""
    from init.state import copies  # imported late: a start without trouble reads no copy

    release = read_release(pod)
    reads = range(release.reads, release.protocol + 1) if release else None
    manifest = copies.find_newest_good(directory, cluster, reads)
    return manifest.name if manifest and (manifest.unfinished or not with_jobs) else ""


# May this Slurm take over an earlier Slurm's state and database?
#
# slurmdbd records the message version of each controller that has connected.
RELEASE_QUESTION = "SELECT MAX(rpc_version) FROM cluster_table WHERE deleted = 0"


def check_release(pod: Pod) -> str:
    """Check slurmctld's state, at the path in the installed slurm.conf."""
    release = read_release(pod)
    if release is None:
        return "this Slurm release is unknown: slurmctld checks its state itself"
    directory = find_state_directory(pod)
    # The volume belongs to the Slurm user, who may have put anything there.
    files = (*slurm.HEADED, *slurm.BARE)
    headers = {name: read_plain(directory / name, slurm.HEADER) or b"" for name in files}
    written_by = slurm.find_writer(headers)
    _refuse(release, written_by, "slurmctld's state", pod)
    return "no state yet" if written_by is None else f"the state is of Slurm {release.name_of(written_by)}"


def check_records(pod: Pod) -> str:
    """Check that the cluster's records are in this database, and not moved elsewhere."""
    from init.state import move

    return move.guard(pod)


def check_database(pod: Pod) -> str:
    """Check the accounting database; if it does not answer now, slurmdbd waits for it."""
    release = read_release(pod)
    if release is None:
        return "this Slurm release is unknown: slurmdbd checks its database itself"
    from init.slurm.accounting import CONFIGURATION as DATABASE
    from init.slurm.accounting import ask

    answer = number(ask(pod.text(DATABASE) or "", RELEASE_QUESTION))
    served = answer >> 8 if answer else None
    _refuse(release, served, "the accounting database")
    return "no controller is known to it" if served is None else f"it served Slurm {release.name_of(served)}"


def _refuse(release: slurm.Release, left: int | None, what: str, pod: Pod | None = None) -> None:
    reason, hint = slurm.refusal(release, left, what)
    if reason and pod is not None:
        hint = f"{hint}; {way_back(pod, setting(pod.text(CONFIGURATION) or '', 'ClusterName'))}"
    if reason:
        raise ConfigError(f"start Slurm {release.name}", reason, hint=hint)


# Repair.

LAST_JOB_QUESTION = "SELECT MAX(id_job) FROM `{cluster}_job_table` WHERE id_job < {largest}"


def repair(pod: Pod) -> str:
    """Repair the state; never fails, since slurmctld itself reports what cannot be repaired here."""
    try:
        return "; ".join(_repair_files(pod)) or "whole"
    except (InitError, OSError, ValueError) as error:
        return f"the saved state stays as it is: {error}"


def _repair_files(pod: Pod) -> Iterator[str]:
    conf = pod.text(CONFIGURATION) or ""
    state = find_state_directory(pod)
    if not state.is_dir():
        return
    for name in finish_saves(state):
        yield f"finished the save of {name}, which a kill had cut"
    release = read_release(pod)
    if release is not None:
        yield from _keep_lost_jobs(pod, state, release)
    accounted = setting(conf, "AccountingStorageType").endswith("slurmdbd")
    if release is not None and accounted and (highest := find_accounted_job(pod, conf)):
        yield from _continue_after(highest, "the accounting database knows", release, state)
    if release is not None and (highest := find_accepted_job(state)):
        yield from _continue_after(highest, "slurmctld had accepted, and not saved,", release, state)
    if allow_missing(state, setting(conf, "ClusterName"), release.needs_state if release and accounted else ()):
        yield "slurmctld had been killed before its first saves: it asks slurmdbd for the cluster's number again"


def _keep_lost_jobs(pod: Pod, state: Path, release: Release) -> Iterator[str]:
    """Keep the scripts of jobs that are not in the state, before their numbers are passed; never fails."""
    try:
        head = read_plain(state / JOBS, WHOLE_HEAD)
        unsaved = not any(os.path.lexists(state / f"{JOBS}{end}") for end in ("", OLD))
        following = read_next_job(head, release) if head is not None else 1 if unsaved else None
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


def find_accounted_job(pod: Pod, conf: str) -> int | None:
    """Return the last job in the accounting database: the state may be older, or new."""
    cluster = setting(conf, "ClusterName").lower()
    if not re.fullmatch(r"[a-z0-9_-]+", cluster):
        return None
    from init.slurm.accounting import CONFIGURATION as DATABASE
    from init.slurm.accounting import ask

    return number(ask(pod.text(DATABASE) or "", LAST_JOB_QUESTION.format(cluster=cluster, largest=LARGEST)))


def find_accepted_job(state: Path) -> int:
    """Return the last job that has a script, or 0."""
    return max((job for job, _ in list_submitted_jobs(state) if job < LARGEST), default=0)


def _continue_after(highest: int, knows: str, release: Release, state: Path) -> Iterator[str]:
    """Raise the next job's number above this one."""
    head = read_plain(state / JOBS, WHOLE_HEAD)
    following = read_next_job(head, release) if head is not None else 0
    unsaved = not (os.path.lexists(state / JOBS) or os.path.lexists(state / f"{JOBS}{OLD}"))
    if following is None or (head is None and not unsaved):
        return
    # Numbers start again at FirstJobId after MaxJobId: a far larger number is from before that.
    if not following <= highest < following + LARGEST // 2:
        return
    if head is None:
        write_whole(state / JOBS, make_head(release, highest + 1, time.time()), mode=0o600, owner=user("slurm"))
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
