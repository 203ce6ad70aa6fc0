"""Jobs that Slurm had acknowledged and not saved when slurmctld was killed: their scripts, kept until they are back.

slurmctld writes a job's script and environment before it answers `sbatch`, and the job's record up to 6 s later. Killed
in between, it forgets the job and removes both files at its next start. The next job's number in the saved `job_state`
tells exactly which jobs are lost: those with a script and that number or a later one.

Each lost job gets a directory with its two files and a ledger, `job.json`, written before each step of its way back.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from ground.errors import counted
from ground.files import read_json, read_plain, write_json, write_whole
from init.fields import number
from init.lean import record, replace
from init.pod.pod import Pod
from init.slurm.conf import setting, words
from init.slurm.files import DIRECTORY, LastGoodConfig
from init.slurm.place import CONFIGURATION, LARGEST, list_submitted_jobs

LOST = f"{DIRECTORY}/lost-jobs"  # on the volume of the state; root alone reads it
SCRIPT, ENVIRONMENT, LEDGER = "script", "environment", "job.json"
FILTER = "job_submit.lua"
# In the chart's job_submit.lua: by these the owner in an environment is slurmctld's own word, not the user's.
TRUSTED = (b"local has = {brings_back = true,", b'env["MINIVM_JOB_OWNER"] =')
NOT_TOLD = "without the chart's job_submit.lua and slurm.bringBackJobs their owners are unknown"
# Bounds of what is kept: a flood of submissions must not fill the state's volume.
MOST_JOBS = 5000
MOST_BYTES = 512 << 20
LARGEST_FILE = 32 << 20
SHARE = 4  # one owner gets this part of both: a quarter
FREE_BYTES = 256 << 20  # room that stays for slurmctld
KEPT_S = 14 * 86400.0
AT_ONCE = 16
_ENTRY = re.compile(r"job-([1-9][0-9]{0,9})-[0-9]{1,20}", re.ASCII)
_OWNER = re.compile(r"([0-9]{1,10}):([0-9]{1,10})", re.ASCII)


@record(frozen=True, slots=True)
class OwnedSubmission:
    """A job's own submission, as slurmctld wrote it into the job's environment."""

    uid: int
    gid: int
    directory: str
    name: str
    options: str  # of the chart's cli_filter.lua; "" if the job did not come by it
    again: int  # the lost job of which this one is the second submission; 0: none
    first: int = 0  # the lost job that was submitted by a person, if that second submission was lost, too


@record(frozen=True, slots=True)
class LostJob:
    place: Path
    job: int
    state: str  # kept, submitting, back, refused
    back_as: int = 0
    why: str = ""
    owner: int = -1  # a user id; -1: slurmctld did not tell

    def put(self, state: str, back_as: int = 0, why: str = "") -> LostJob:
        """Write the ledger before the step that it names, unless the job is back; return what the ledger has then.

        A controller that was frozen and wakes up may go on with this while the next one has brought the job back.
        """
        before = read_json(self.place / LEDGER)
        if before.get("state") == "back" and isinstance(before.get("backAs"), int):
            return replace(self, state="back", back_as=before["backAs"], why="")
        data = {"job": self.job, "state": state, "backAs": back_as, "why": why[:500], "time": time.time()}
        write_json(self.place / LEDGER, data | {"owner": self.owner}, 0o600)
        return replace(self, state=state, back_as=back_as, why=why)

    def drop_files(self) -> None:
        """Remove what a job that is back needs no more; its ledger stays."""
        for name in (SCRIPT, ENVIRONMENT):
            (self.place / name).unlink(missing_ok=True)


def entries(directory: Path) -> list[LostJob]:
    """Return the kept jobs by number; one whose ledger is damaged counts as being submitted."""
    kept = []
    with contextlib.suppress(OSError):
        for entry in directory.iterdir():
            if match := _ENTRY.fullmatch(entry.name):
                data = read_json(entry / LEDGER)
                state, back_as = data.get("state"), data.get("backAs")
                state = state if state in ("kept", "submitting", "back", "refused") else "submitting"
                back_as = back_as if isinstance(back_as, int) else 0
                owner = data.get("owner")
                owner = owner if isinstance(owner, int) else -1
                job, reason = number(match[1]) or 0, str(data.get("why", ""))
                kept.append(LostJob(entry, job, str(state), back_as, reason, owner))
    return sorted(kept, key=lambda lost: lost.job)


def find(state: Path, following: int) -> dict[int, str]:
    """Return job -> its directory below the state, of the jobs with a script and `following` or a later number.

    Numbers start again after MaxJobId: a far larger number is from before that.
    """
    end = min(following + LARGEST // 2, LARGEST)
    return {job: place for job, place in sorted(list_submitted_jobs(state)) if following <= job < end}


def keep(state: Path, following: int, directory: Path, owners_told: Callable[[], bool] = lambda: True) -> Iterator[str]:
    """Copy the lost jobs' files, and say what was kept and what was not. Safe to repeat after any cut.

    What slurmctld ran with tells now, and not later, if the owners in these files are its own word.
    """
    lost = find(state, following)
    if not lost:
        return
    from concurrent.futures import ThreadPoolExecutor  # imported late: an orderly start has no lost job

    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    forget(directory)
    shelf = Shelf(directory, owners_told())
    # Side by side: each file is synced to the volume, which takes ten times as long one after the other.
    with ThreadPoolExecutor(AT_ONCE) as pool:
        outcomes = dict(zip(lost, pool.map(lambda job: shelf.keep(job, state / lost[job]), lost), strict=True))
    kept_jobs = [job for job, error in outcomes.items() if not error]
    problems = [f"job {job}: {error}" for job, error in outcomes.items() if error]
    if kept_jobs:
        first, last = kept_jobs[0], kept_jobs[-1]
        number = counted(len(kept_jobs), "job")
        yield f"kept the scripts of {number}, from {first} to {last}, that slurmctld had not saved"
    if kept_jobs and not shelf.owners_told:
        yield f"none of them is brought back: {NOT_TOLD}"
    if problems:
        yield f"{len(problems)} lost jobs are not kept: {'; '.join(problems[:3])}"


class Shelf:
    """The directory of the kept jobs, with its bounds."""

    def __init__(self, directory: Path, owners_told: bool) -> None:
        self.directory = directory
        self.owners_told = owners_told
        self.there = {entry.name for entry in directory.iterdir()}
        self.jobs: Counter[int] = Counter()  # by owner, as the bytes
        self.used: Counter[int] = Counter()
        for lost in entries(directory):
            sizes = [path.stat().st_size for name in (SCRIPT, ENVIRONMENT) if (path := lost.place / name).is_file()]
            self.jobs[lost.owner] += bool(sizes)
            self.used[lost.owner] += sum(sizes)
        self.lock = threading.Lock()

    def keep(self, job: int, place: Path) -> str:
        """Copy one job's files; return why not, or ""."""
        try:
            files, stamp = _read(place)
            name = f"job-{job}-{stamp}"
            submission = parse_submission(variables(files[ENVIRONMENT])) if self.owners_told else None
            owner = submission.uid if submission else -1
            with self.lock:
                if name in self.there:
                    return ""
                self._take_room(sum(len(data) for data in files.values()), owner)
                self.there.add(name)
            refused = "" if self.owners_told else NOT_TOLD
            _put(LostJob(self.directory / name, job, "kept", why=refused, owner=owner), files)
        except OSError as error:
            return error.strerror or str(error)
        return ""

    def _take_room(self, size: int, owner: int) -> None:
        jobs, used = self.jobs.total(), self.used.total()
        if jobs >= MOST_JOBS or used + size > MOST_BYTES:
            raise OSError(f"{self.directory} has {counted(jobs, 'job')} of {used >> 20} MiB already")
        jobs, used = self.jobs[owner], self.used[owner]
        if jobs >= MOST_JOBS // SHARE or used + size > MOST_BYTES // SHARE:
            owner_text = "an owner that is not known" if owner < 0 else f"user {owner}"
            raise OSError(f"{self.directory} has {counted(jobs, 'job')} of {used >> 20} MiB of {owner_text} already")
        room = os.statvfs(self.directory)
        if room.f_bavail * room.f_frsize - size < FREE_BYTES:
            raise OSError(f"{self.directory} has less than {FREE_BYTES >> 20} MiB of room")
        self.jobs[owner] += 1
        self.used[owner] += size


def forget(directory: Path) -> None:
    """Remove entries that are old, and what a cut has left."""
    for entry in directory.iterdir():
        with contextlib.suppress(OSError):
            if entry.name.startswith(".") or time.time() - entry.lstat().st_mtime > KEPT_S:
                shutil.rmtree(entry)


def _put(lost: LostJob, files: dict[str, bytes]) -> None:
    partial = lost.place.with_name(f".{lost.place.name}.{os.urandom(4).hex()}")
    partial.mkdir(mode=0o700)
    try:
        for file, data in files.items():
            write_whole(partial / file, data, 0o600)
        LostJob(partial, lost.job, "kept", owner=lost.owner).put("refused" if lost.why else "kept", why=lost.why)
        partial.rename(lost.place)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _read(place: Path) -> tuple[dict[str, bytes], int]:
    """Read a job's two files, through no link: the Slurm user writes to the state, and a copy of it may lie."""
    hashed = os.open(place.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        inside = os.open(place.name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=hashed)
    finally:
        os.close(hashed)
    files, stamp = {}, 0
    try:
        for name in (SCRIPT, ENVIRONMENT):
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            with os.fdopen(os.open(name, flags, dir_fd=inside), "rb") as file:
                status = os.fstat(file.fileno())
                if status.st_mode & 0o170000 != 0o100000 or status.st_size > LARGEST_FILE:
                    raise OSError(f"{name} is no file of at most {LARGEST_FILE >> 20} MiB")
                files[name] = file.read(LARGEST_FILE)
                stamp = stamp or status.st_mtime_ns
    finally:
        os.close(inside)
    count = int.from_bytes(files[ENVIRONMENT][:4], sys.byteorder)
    if not files[SCRIPT].endswith(b"\0") or files[ENVIRONMENT].count(b"\0", 4) < count:
        raise OSError("its files are not whole: sbatch had no answer yet")
    return files, stamp


# The environment that slurmctld saved: the number of variables in four bytes, then each with a NUL behind it.
def variables(data: bytes) -> list[bytes]:
    return [pair for pair in data[4:].split(b"\0") if b"=" in pair]


def find_value(pairs: list[bytes], name: str) -> str:
    """Return the first value: the one that job_submit.lua replaces, whatever a user's program sent after it."""
    start = name.encode() + b"="
    return next((pair[len(start) :].decode(errors="surrogateescape") for pair in pairs if pair.startswith(start)), "")


def parse_submission(pairs: list[bytes]) -> OwnedSubmission | None:
    owner = _OWNER.fullmatch(find_value(pairs, "MINIVM_JOB_OWNER"))
    if owner is None:
        return None
    again, _, first = find_value(pairs, "MINIVM_JOB_AGAIN").partition(" ")
    directory, name, options = (find_value(pairs, f"MINIVM_JOB_{what}") for what in ("DIR", "NAME", "OPTIONS"))
    return OwnedSubmission(
        int(owner[1]), int(owner[2]), directory, name, options, number(again) or 0, number(first) or 0
    )


def tells_owners(pod: Pod) -> bool:
    """Tell if slurmctld ran, and will run, with the chart's job_submit.lua: without, any user could name any owner.

    Where nothing tells what slurmctld ran with, that is no.
    """
    good = LastGoodConfig(pod).read() or {}
    installed = {
        "slurm.conf": read_plain(pod.path(CONFIGURATION), 1 << 20) or b"",
        FILTER: read_plain(pod.path(CONFIGURATION).with_name(FILTER), 1 << 20) or b"",
    }
    return all(
        "lua" in words(setting(files.get("slurm.conf", b"").decode(errors="replace"), "JobSubmitPlugins"))
        and all(line in files.get(FILTER, b"") for line in TRUSTED)
        for files in (installed, good)
    )


def parse_options(text: str) -> dict[str, object] | None:
    """Return the options that cli_filter.lua sent; None if there are none."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) else None
