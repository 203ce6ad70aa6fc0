"""Copy the state of a running controller, as a kill of slurmctld at one moment would leave it, and its database.

The accounting pod has no slurmctld: its copies are of the database alone.

slurmctld is never stopped or asked to wait. It publishes its state files by rename, so a file that is open keeps the
content of its moment: all files are opened, then the directory is read again, and if it names other files by then, all
are opened anew. It saves a change within seconds; jobs that stay the same from 15 seconds before that moment
until after it are therefore in the copy, and the manifest counts them.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import json
import os
import re
import shutil
import stat
import subprocess
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ground.commands import ran
from ground.files import locked, read_plain, sync_directory
from init.fields import number
from init.pod.pod import Pod
from init.slurm import accounting, client
from init.slurm.client import SlurmError
from init.slurm.conf import setting
from init.slurm.files import PRIVATE, TARGET, read
from init.slurm.place import (
    CONFIGURATION,
    HEAD,
    JOBS,
    NEW,
    OLD,
    WHOLE_HEAD,
    find_state_directory,
    list_submitted_jobs,
    read_next_job,
    read_release,
)
from init.state import copies
from init.state.copies import ACCOUNTING, CONFIG, JOBS_LIST, MANIFEST, STATE_TAR, CopyError, Manifest

SETTLE = 15.0  # seconds after which slurmctld has saved a change, on a busy machine too
TRIES = 50
TRY_PAUSE = 0.1
LOCK = ".lock"
STAMP = ".minivm-database"  # which database the state belongs to: init.prepare.database
DUMP = "/usr/bin/mariadb-dump"
DATA = "/var/lib/mysql"
TABLES = f"{DATA}/slurm_acct_db"
COMPLETED = b"-- Dump completed"
JOB_USERS = ("/usr/bin/squeue", "--all", "--noheader", "--format=%u")
RESERVATIONS = ("/usr/bin/scontrol", "--oneliner", "show", "reservation")
RESERVATION_USERS = re.compile(r" Users=(\S+)")
USER_NAME = re.compile(r"(?!-)[A-Za-z0-9_.@-]{1,128}", re.ASCII)
MOST_USERS = 10_000
USERS_WITHIN = 60.0  # a directory may hang
COUNT = "SELECT COUNT(*) FROM `{cluster}_job_table`"
# A directory that is 95 % full is reported (init.helpers.pod_checks): a copy must not bring that about.
SPARE_PERCENT = 5
LARGEST_SCRIPT = 256 << 20
CHUNK = 1 << 20


@contextlib.contextmanager
def only_one(directory: Path) -> Iterator[None]:
    """Hold the lock of a directory of copies: one save, restore or proof at a time."""
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        directory.chmod(0o700)
        fd = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise CopyError(
            "use the directory of copies",
            error.strerror or str(error),
            file=str(directory),
            hint="mount a writable volume there, or name another directory",
        ) from error
    try:
        if not locked(fd, within=5.0):
            raise CopyError(
                "use the directory of copies",
                "another save, restore or proof is running",
                file=str(directory),
                hint="try again when it has ended",
            )
        yield
    finally:
        os.close(fd)


def save(
    pod: Pod,
    directory: Path,
    keep: int,
    *,
    records_only: bool = False,
    pause: Callable[[float], None] = time.sleep,
    now: Callable[[], float] = time.time,
) -> Manifest:
    """Make a copy, then remove the superfluous ones; CopyError if there is none to make or no room for it.

    `records_only`: in a pod without slurmctld.
    """
    with only_one(directory):
        _clear(directory)
        state = None if records_only else find_state_directory(pod)
        if state is not None and not _has_saved(state / JOBS, pause):
            raise CopyError(
                "copy the state",
                "found no job_state, expected one",
                file=str(state / JOBS),
                hint="slurmctld has not saved yet: try again in a minute",
            )
        _check_room(pod, state, directory)
        name = copies.choose_name(directory, now())
        partial = directory / f".{name}.partial"
        partial.mkdir(mode=0o700)
        try:
            if state is None:
                manifest = _fill_records(pod, partial, name, now)
            else:
                manifest = _fill(pod, state, partial, name, pause, now)
            _write(partial / MANIFEST, [copies.dump_manifest(manifest).encode()])
            sync_directory(partial)
            partial.rename(directory / name)
            sync_directory(directory)
        except OSError as error:
            shutil.rmtree(partial, ignore_errors=True)
            raise CopyError(
                "copy the state", error.strerror or str(error), file=error.filename or str(partial)
            ) from error
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        retain(directory, keep)
        return manifest


def _has_saved(jobs: Path, pause: Callable[[float], None]) -> bool:
    """Tell if slurmctld has saved its jobs; one that has never done so is asked to."""
    if not jobs.is_file():
        try:
            client.save_jobs(client.address(os.environ))
        except SlurmError:
            return False
        for _ in range(round(SETTLE)):
            if jobs.is_file():
                break
            pause(1.0)
    return jobs.is_file()


def _fill(
    pod: Pod, state: Path, partial: Path, name: str, pause: Callable[[float], None], now: Callable[[], float]
) -> Manifest:
    conf = pod.text(CONFIGURATION) or ""
    cluster = setting(conf, "ClusterName")
    release = read_release(pod)
    before = _list_jobs()
    rows = _count_accounted(pod, cluster)
    if before is not None:
        with contextlib.suppress(SlurmError):
            client.save_jobs(client.address(os.environ))
        pause(SETTLE)
    files: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        dump = stack.enter_context(_dump(pod))
        at = now()
        opened = open_all(state, pause)
        for fd in opened.values():
            stack.callback(os.close, fd)
        files[STATE_TAR] = _archive(state, opened, partial / STATE_TAR)
        head = os.pread(opened[JOBS], WHOLE_HEAD, 0)
        why_not = dump.why_not
        if dump.process is not None:
            files[ACCOUNTING] = _store_dump(dump.process, partial / ACCOUNTING)
    after = _list_jobs() if before is not None else None
    around = copies.compare_listings(before or {}, after or {})
    if after is not None:
        listed = {"settled": dict(around.settled), "changing": sorted(around.changing), "users": _find_users()}
        files[JOBS_LIST] = _write(partial / JOBS_LIST, [json.dumps(listed, sort_keys=True).encode()])
    files[CONFIG] = _write_configuration(pod, partial)
    following = read_next_job(head, release) if release else None
    return Manifest(
        name=name,
        time=at,
        release=release.name if release else "",
        protocol=head[HEAD] if len(head) == WHOLE_HEAD else 0,
        cluster=cluster,
        jobs=around.by_state,
        listed=after is not None,
        changing=len(around.changing),
        highest=following - 1 if following else copies.find_highest((*(before or {}), *(after or {}))),
        accounting=why_not,
        accounted=(rows, _count_accounted(pod, cluster)) if ACCOUNTING in files else (0, 0),
        files=tuple(sorted(files.items())),
    )


def _fill_records(pod: Pod, partial: Path, name: str, now: Callable[[], float]) -> Manifest:
    cluster = setting(pod.text(CONFIGURATION) or "", "ClusterName")
    release = read_release(pod)
    before, at = _count_accounted(pod, cluster), now()
    with _dump(pod) as dump:
        if dump.process is None:
            raise CopyError("copy the records of accounting", dump.why_not, hint="see `minivm why mariadb`")
        digest = _store_dump(dump.process, partial / ACCOUNTING)
    return Manifest(
        name=name,
        time=at,
        release=release.name if release else "",
        protocol=release.protocol if release else 0,
        cluster=cluster,
        jobs=(),
        listed=False,
        changing=0,
        highest=0,
        accounting="",
        accounted=(before, _count_accounted(pod, cluster)),
        files=((ACCOUNTING, digest), (CONFIG, _write_configuration(pod, partial))),
    )


def _write_configuration(pod: Pod, partial: Path) -> str:
    """Copy slurm.conf and the files beside it that are no secrets."""
    texts = {
        file: data.decode("utf-8", "surrogateescape")
        for file, data in read(pod.path(TARGET)).items()
        if file not in PRIVATE
    }
    return _write(partial / CONFIG, [json.dumps(texts, sort_keys=True).encode()])


def _list_jobs() -> Mapping[str, str] | None:
    """Return slurmctld's unfinished jobs; None if it does not answer: the state is then as it stopped."""
    try:
        return copies.parse_jobs(client.run(copies.SQUEUE, client.address(os.environ), within=60.0))
    except SlurmError:
        return None


def _find_users() -> dict[str, list[int]]:
    """Return the users of jobs and reservations, with their numbers: a rehearsal may run where no directory is.

    Without an answer there are none: the copy is good without them.
    """
    try:
        at = client.address(os.environ)
        names = set(client.run(JOB_USERS, at, within=60.0).split())
        for users in RESERVATION_USERS.findall(client.run(RESERVATIONS, at, within=60.0)):
            names |= {name.lstrip("-") for name in users.split(",")}
        plain = sorted(name for name in names - {"(null)"} if USER_NAME.fullmatch(name))[:MOST_USERS]
        found = ran(("/usr/bin/getent", "passwd", *plain), within=USERS_WITHIN) if plain else None
    except (SlurmError, OSError, subprocess.TimeoutExpired):
        return {}
    entries = (line.split(":") for line in (found.stdout.splitlines() if found else ()))
    return {
        cells[0]: [int(cells[2]), int(cells[3])]
        for cells in entries
        if len(cells) == 7 and cells[0] in names and cells[2].isdecimal() and cells[3].isdecimal()
    }


def open_all(state: Path, pause: Callable[[float], None] = time.sleep) -> dict[str, int]:
    """Open the state files of one moment; the caller closes the descriptors."""
    changed = "nothing"
    for _ in range(TRIES):
        opened: dict[str, int] = {}
        try:
            for name in _list_published(state):
                opened[name] = _open_plain(name, None, state)
            changed = _find_changed(state, opened)
            if not changed:
                previous, opened = opened, {}
                return previous
        except FileNotFoundError as error:
            changed = str(error.filename)
        finally:
            for fd in opened.values():
                os.close(fd)
        pause(TRY_PAUSE)
    raise CopyError("copy the state of one moment", f"{changed} changed in each of {TRIES} tries", file=str(state))


def _list_published(state: Path) -> list[str]:
    """List the state files, without those that are being written or replaced."""
    with os.scandir(state) as entries:
        plain = {entry.name for entry in entries if entry.is_file(follow_symlinks=False)}
    for name in sorted(plain):
        # Between slurmctld's two renames there is no NAME.
        if name.endswith(NEW) and name.removesuffix(NEW) not in plain and name.removesuffix(NEW) + OLD in plain:
            raise FileNotFoundError(2, "is being replaced", name.removesuffix(NEW))
    return sorted(name for name in plain if not name.endswith((NEW, OLD)) and (name[0] != "." or name == STAMP))


def _find_changed(state: Path, opened: Mapping[str, int]) -> str:
    """Return a file that is another one by now; "" if none is."""
    names = set(_list_published(state))
    if names != opened.keys():
        return min(names ^ opened.keys())
    for name, fd in opened.items():
        now_open, published = os.fstat(fd), (state / name).lstat()
        if (now_open.st_ino, now_open.st_mtime_ns, now_open.st_size) != (
            published.st_ino,
            published.st_mtime_ns,
            published.st_size,
        ):
            return name
    return ""


def _open_plain(name: str, dir_fd: int | None, directory: Path | None = None) -> int:
    """Open without following a link: the Slurm user may have put anything there."""
    path = directory / name if directory else Path(name)
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=dir_fd)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(22, "wanted a plain file", str(path))
    return fd


class Hashed(io.RawIOBase):
    """A new private file that hashes what is written to it."""

    def __init__(self, path: Path) -> None:
        self.fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        self.digest = hashlib.sha256()

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data)
        self.digest.update(view)
        remaining = view
        while remaining:
            remaining = remaining[os.write(self.fd, remaining) :]
        return len(view)

    def finish(self) -> str:
        os.fsync(self.fd)
        return self.digest.hexdigest()

    def close(self) -> None:
        if not self.closed:
            os.close(self.fd)
        super().close()


def _write(path: Path, parts: list[bytes]) -> str:
    with Hashed(path) as file:
        for part in parts:
            file.write(part)
        return file.finish()


def _archive(state: Path, opened: Mapping[str, int], path: Path) -> str:
    """Write the files that are open, then the directories of scripts, to an archive; return its hash.

    Scripts come last: a job's script is written before the job's record, so each job of the copy has its script unless
    the job has ended meanwhile.
    """
    with Hashed(path) as file:
        with tarfile.open(fileobj=file, mode="w|", format=tarfile.PAX_FORMAT) as archive:
            for name, fd in opened.items():
                size = os.fstat(fd).st_size
                with os.fdopen(os.dup(fd), "rb") as source:
                    source.seek(0)
                    archive.addfile(_member(name, size), source)
            for name, data in _scripts(state):
                archive.addfile(_member(name, len(data)), io.BytesIO(data))
        return file.finish()


def _member(name: str, size: int) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.size, info.mode = size, 0o600
    return info


def _scripts(state: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the files below the state's directories; those that vanish meanwhile are of jobs that are gone."""
    top = os.open(state, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for below, directories, files, dir_fd in os.fwalk(".", dir_fd=top):
            directories[:] = sorted(name for name in directories if name[0] != ".")
            for name in sorted(files) if below != "." else ():
                with contextlib.suppress(OSError):
                    fd = _open_plain(name, dir_fd)
                    with os.fdopen(fd, "rb") as source:
                        yield f"{below[2:]}/{name}", source.read(LARGEST_SCRIPT)
    finally:
        os.close(top)


class Dump:
    def __init__(self, process: subprocess.Popen[bytes] | None, why_not: str = "") -> None:
        self.process, self.why_not = process, why_not


@contextlib.contextmanager
def _dump(pod: Pod) -> Iterator[Dump]:
    """Begin a dump of the embedded database: its transaction begins now, and it waits while nothing reads it."""
    mode = pod.accounting
    if mode != "embedded" or not pod.has(accounting.SOCKET):
        yield Dump(
            None,
            {
                "pod": "the database is in the accounting pod",
                "external": "the database is external",
                "none": "there is no accounting",
            }.get(mode, "the database does not run"),
        )
        return
    argv = [
        DUMP,
        "--no-defaults",
        f"--socket={accounting.SOCKET}",
        "--user=root",
        "--single-transaction",
        "--quick",
        "slurm_acct_db",
    ]
    with subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8"},
    ) as process:
        try:
            yield Dump(process)
        finally:
            if process.poll() is None:
                process.kill()


def _store_dump(process: subprocess.Popen[bytes], path: Path) -> str:
    last = b""
    assert process.stdout is not None and process.stderr is not None
    with Hashed(path) as file:
        packed = gzip.GzipFile(filename="", mode="wb", compresslevel=1, fileobj=file, mtime=0)
        with packed:
            while chunk := process.stdout.read(CHUNK):
                packed.write(chunk)
                last = (last + chunk)[-200:]
        digest = file.finish()
    errors = process.stderr.read(2000).decode(errors="replace").strip()
    if process.wait() or COMPLETED not in last:
        raise CopyError(
            "dump the accounting database",
            errors or "the dump ended early",
            file=str(path),
            hint="see `minivm why mariadb`",
        )
    return digest


def _count_accounted(pod: Pod, cluster: str) -> int:
    """Count the rows of the cluster's jobs; 0 without a database."""
    if pod.accounting != "embedded":
        return 0
    name = cluster.lower()
    if not name.replace("-", "").replace("_", "").isalnum():
        return 0
    return number(accounting.ask(pod.text(accounting.CONFIGURATION) or "", COUNT.format(cluster=name))) or 0


def _check_room(pod: Pod, state: Path | None, directory: Path) -> None:
    needed = (measure_size(state) if state else 0) + measure_size(pod.path(TABLES))
    check_room(directory, needed, "copy the state")


def check_room(directory: Path, needed: int, what: str) -> None:
    """Refuse to fill the volume to more than 95 %."""
    volume = os.statvfs(directory)
    spare = volume.f_blocks * volume.f_frsize * SPARE_PERCENT // 100
    free = volume.f_bavail * volume.f_frsize
    if free < needed + spare:
        raise CopyError(
            what,
            f"found {_mib(free)} MiB free, expected {_mib(needed)} and {_mib(spare)} that stay free",
            file=str(directory),
            hint="remove old copies, or use a larger volume",
        )


def _mib(count: int) -> int:
    return -(-count >> 20)


def measure_size(directory: Path) -> int:
    """Add up the files below a directory, as far as they can be read, without hidden directories."""
    total = 0
    if not directory.is_dir():
        return 0
    for _, directories, files, dir_fd in os.fwalk(directory):
        directories[:] = [name for name in directories if name[0] != "."]
        for name in files:
            with contextlib.suppress(OSError):
                total += os.stat(name, dir_fd=dir_fd, follow_symlinks=False).st_size  # in a descriptor
    return total


def retain(directory: Path, keep: int) -> None:
    known_copies = [
        (manifest.name, (proof := copies.load_proof(directory, manifest.name)) is not None and proof.ok)
        for manifest in copies.load_readable(directory)
    ]
    for name in copies.select_superfluous(known_copies, keep):
        remove(directory, name)


def remove(directory: Path, name: str) -> None:
    """Remove a copy in two steps, so that a half of it never looks like a copy."""
    doomed = directory / f".{name}.partial"
    with contextlib.suppress(OSError):
        (directory / name).rename(doomed)
        shutil.rmtree(doomed)


def _clear(directory: Path) -> None:
    """Remove what killed saves left; the lock is held, so none is running."""
    for path in directory.glob(".*.partial"):
        shutil.rmtree(path, ignore_errors=True)


def find_next_job(state: Path, pod: Pod) -> int:
    """Return the lowest job number that no trace in this state has used."""
    release = read_release(pod)
    following = [1]
    for name in (JOBS, f"{JOBS}{NEW}", f"{JOBS}{OLD}"):
        head = read_plain(state / name, WHOLE_HEAD)
        if head is not None and release is not None:
            following.append(read_next_job(head, release) or 1)
    following += [job + 1 for job, _ in list_submitted_jobs(state)]
    return max(following)
