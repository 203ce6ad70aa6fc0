"""Put a copy in the place of the present state; a cut at any step leaves the old state, or a restore to run again.

The present state moves to a directory beside it and is never deleted. A journal in the state's directory is written
before the first file moves: while it is there slurmctld does not start (init.prepare.saved_state), and the same restore
continues where it was cut. Every step can run twice.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
import subprocess
import tarfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from ground.commands import ran
from ground.files import read_plain, sync_directory, write_whole
from init.fields import number
from init.lean import record
from init.pod import release as slurm
from init.pod.pod import Pod, user
from init.pod.release import Release
from init.slurm import accounting, client
from init.slurm.conf import setting
from init.slurm.place import (
    ACCEPTED,
    CONFIGURATION,
    JOBS,
    JOURNAL,
    LARGEST,
    NEXT,
    WHOLE_HEAD,
    read_next_job,
    read_release,
)
from init.state import copies
from init.state.copies import ACCOUNTING, STATE_TAR, CopyError, Manifest
from init.state.save import CHUNK, DATA, check_room, find_next_job

STAGE, ASIDE = ".minivm-restoring", ".minivm-before-"
UNPACKED = 8  # times the size of a compressed dump
DATABASE, LOADING = "slurm_acct_db", "slurm_acct_db_restoring"
# Jobs of a copy that have ended since: a later run that has not ended is of the same job.
ENDED_SINCE = (
    "SELECT DISTINCT id_job FROM `{cluster}_job_table` WHERE deleted = 0 AND time_submit <= {at} AND time_end > {at}"
    " AND id_job NOT IN (SELECT id_job FROM `{cluster}_job_table` WHERE deleted = 0 AND time_end = 0) ORDER BY id_job"
)
MOST_ENDED = 500
# The same question for slurmdbd, where its database is in another pod.
SACCT = (
    *("/usr/bin/sacct", "--allusers", "--allocations", "--duplicates", "--noheader", "--parsable2"),
    "--format=JobIDRaw,Submit,End",
)
SACCT_WITHIN = 120.0
# Names in the state's directory that a restore leaves where they are.
OURS = re.compile(rf"{re.escape(JOURNAL)}|{re.escape(STAGE)}|{re.escape(ASIDE)}.*|{re.escape(ACCEPTED)}|lost\+found")


def find_pending(state: Path) -> str:
    """Return the copy whose restore was cut after the first file moved; "" if there is none."""
    return str(_journal(state).get("copy", ""))


def replaces_accounting(state: Path) -> bool:
    """Tell if a restore that was cut replaces the accounting database, too."""
    return _journal(state).get("accounting") is True


@record(frozen=True, slots=True)
class Since:
    """Accounting's knowledge of the time since a copy was made."""

    ended: tuple[int, ...] = ()  # jobs that the copy has as waiting or running: slurmctld runs them again
    highest: int = 0  # job number; 0: the controller's next start asks the database itself
    answered: bool = True


def since(pod: Pod, manifest: Manifest) -> Since:
    cluster = manifest.cluster.lower()
    if not re.fullmatch(r"[a-z0-9_-]+", cluster):
        return Since()
    if pod.accounting == "pod":
        return _ask_slurmdbd(pod, int(manifest.time))
    question = ENDED_SINCE.format(cluster=cluster, at=int(manifest.time))
    answer = accounting.ask(pod.text(accounting.CONFIGURATION) or "", question)
    return Since(tuple(int(word) for word in answer.split() if word.isdecimal()))


def _ask_slurmdbd(pod: Pod, at: int) -> Since:
    start = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(at))
    env = client.environment(client.address(pod.env)) | {"TZ": "UTC", "SLURM_TIME_FORMAT": "%s"}
    try:
        done = ran([*SACCT, f"--starttime={start}"], within=SACCT_WITHIN, env=env)
    except (OSError, subprocess.TimeoutExpired):
        return Since(answered=False)
    return parse_since(done.stdout, at) if done.returncode == 0 else Since(answered=False)


def parse_since(text: str, at: int) -> Since:
    """Read sacct's lines JOB|SUBMITTED|ENDED. A job that was requeued has several: only the last may lack an end."""
    ended, unended, highest = set[int](), set[int](), 0
    for line in text.splitlines():
        job_text, _, times = line.partition("|")
        submitted, _, end = times.partition("|")
        job = number(job_text.partition("_")[0])  # 7_[3-9]: tasks of an array that wait
        if job is None or job >= LARGEST:
            continue
        highest = max(highest, job)
        end_at = number(end)
        if end_at is None:
            unended.add(job)
        elif (number(submitted) or 0) <= at < end_at:
            ended.add(job)
    return Since(tuple(sorted(ended - unended)), highest)


def warn_of_second_runs(ended: Sequence[int]) -> str:
    """Tell how to keep jobs from a second run."""
    shown = " ".join(str(job) for job in ended[:MOST_ENDED])
    more = f" (and {len(ended) - MOST_ENDED} more by sacct)" if len(ended) > MOST_ENDED else ""
    return (
        f"{len(ended)} of its jobs ended since; slurmctld counts them as unfinished and runs them again;"
        f" right after the start: scancel {shown}{more}"
    )


def _journal(state: Path) -> dict[str, object]:
    data = read_plain(state / JOURNAL, 4096)
    if data is None:
        return {}
    try:
        journal = json.loads(data)
    except ValueError as error:
        raise CopyError("read the journal of a restore", str(error), file=str(state / JOURNAL)) from error
    if not isinstance(journal, dict):
        raise CopyError("read the journal of a restore", "wanted an object", file=str(state / JOURNAL))
    return journal


def check_fits(manifest: Manifest, conf: str, release: Release | None, file: str) -> None:
    """Refuse a copy of another cluster, or of a Slurm that the installed one does not read."""
    what = f"restore {manifest.name}"
    cluster = setting(conf, "ClusterName")
    if manifest.cluster.lower() != cluster.lower():
        raise CopyError(
            what,
            f"found the state of the cluster {manifest.cluster!r}, expected {cluster!r}",
            file=file,
            field="cluster",
            hint="restore it in that cluster's controller",
        )
    if release is None:
        raise CopyError(what, "the image does not say which Slurm it has", file=slurm.FILE)
    reason, hint = slurm.refusal(release, manifest.protocol or None, "the copy")
    if reason:
        raise CopyError(what, reason, file=file, field="protocol", hint=hint)


def _check_request(state: Path, directory: Path, manifest: Manifest, *, with_accounting: bool) -> dict[str, object]:
    """Refuse a restore that the copy cannot give, and one beside a restore that was cut; return the journal."""
    file = str(directory / manifest.name / copies.MANIFEST)
    if with_accounting and not manifest.has_accounting:
        raise CopyError(
            f"restore {manifest.name} with its accounting",
            manifest.accounting or "the copy has none",
            file=file,
            hint="leave --with-accounting out",
        )
    if not manifest.has_state:
        problem = "the copy has records of accounting alone"
        raise CopyError(f"restore {manifest.name}", problem, file=file, hint="restore it in the accounting pod")
    journal = _journal(state)
    if journal and journal.get("copy") != manifest.name:
        raise CopyError(
            f"restore {manifest.name}",
            f"the restore of {journal.get('copy')} was cut",
            file=str(state / JOURNAL),
            hint=f"first finish it: minivm state restore {journal.get('copy')}",
        )
    return journal


def restore(
    pod: Pod,
    state: Path,
    directory: Path,
    manifest: Manifest,
    *,
    with_accounting: bool = False,
    highest: int = 0,
    now: Callable[[], float] = time.time,
) -> Iterator[str]:
    """Restore; yield what was done. slurmctld is stopped, and the caller holds the lock of the copies.

    `highest`: a job number that accounting knows, if the database is in another pod: the next job's is above it.
    """
    release = read_release(pod)
    check_fits(manifest, pod.text(CONFIGURATION) or "", release, str(directory / manifest.name / copies.MANIFEST))
    assert release is not None
    journal = _check_request(state, directory, manifest, with_accounting=with_accounting)
    copies.verify(directory, manifest)
    if not journal:
        if with_accounting:
            _check_database_room(pod, directory, manifest)
        _stage(pod, state, directory, manifest, release, highest)
        stamp = _stamp(now())
        journal = {
            "copy": manifest.name,
            "aside": f"{ASIDE}{_free(state, stamp)}",
            "phase": "accounting",
            "accounting": with_accounting,
        }
        _write_journal(state, journal)
    else:
        yield f"continuing the restore of {manifest.name} that was cut"
    aside = state / str(journal["aside"])
    if journal["phase"] == "accounting":
        if journal["accounting"]:
            accounting_kept = _load_accounting(directory / manifest.name / ACCOUNTING, str(journal["aside"]))
            yield f"the accounting database is the copy's; the present one is the database {accounting_kept}"
        journal["phase"] = "aside"
        _write_journal(state, journal)
    if journal["phase"] == "aside":
        aside.mkdir(mode=0o700, exist_ok=True)
        _move(state, aside)
        journal["phase"] = "in"
        _write_journal(state, journal)
    if (state / STAGE).is_dir():  # its removal and the journal's are two steps
        _move(state / STAGE, state)
        (state / STAGE).rmdir()
    (state / JOURNAL).unlink()
    sync_directory(state)
    yield f"the state is that of {manifest.name}; the present one is in {aside}"


def restore_records(
    pod: Pod,
    directory: Path,
    manifest: Manifest,
    *,
    now: Callable[[], float] = time.time,
) -> str:
    """Put a copy's records in the place of the present ones, and say where those are. slurmdbd is stopped.

    Nothing has changed until the tables are exchanged, in one statement: a cut needs no journal.
    """
    check_fits(
        manifest, pod.text(CONFIGURATION) or "", read_release(pod), str(directory / manifest.name / copies.MANIFEST)
    )
    copies.verify(directory, manifest)
    _check_database_room(pod, directory, manifest)
    before = _load_accounting(directory / manifest.name / ACCOUNTING, _stamp(now()))
    return f"the accounting database is that of {manifest.name}; the present one is the database {before}"


def _check_database_room(pod: Pod, directory: Path, manifest: Manifest) -> None:
    """Refuse to fill the database's volume: the copy is loaded beside the present tables."""
    needed = UNPACKED * (directory / manifest.name / ACCOUNTING).stat().st_size
    check_room(pod.path(DATA), needed, f"restore {manifest.name}")


def _stamp(at: float) -> str:
    return time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(at))


def _free(state: Path, stamp: str) -> str:
    names = (stamp, *(f"{stamp}-{count}" for count in range(2, 1000)))
    return next(name for name in names if not os.path.lexists(state / f"{ASIDE}{name}"))


def _write_journal(state: Path, journal: dict[str, object]) -> None:
    write_whole(state / JOURNAL, json.dumps(journal), mode=0o600)
    sync_directory(state)


def _stage(pod: Pod, state: Path, directory: Path, manifest: Manifest, release: Release, highest: int) -> None:
    """Unpack beside the present state, with the next job's number above every one that either has used."""
    stage = state / STAGE
    if os.path.lexists(stage):
        shutil.rmtree(stage)
    archive = directory / manifest.name / STATE_TAR
    check_room(state, archive.stat().st_size, f"restore {manifest.name}")
    stage.mkdir(mode=0o700)
    unpack(archive, manifest, stage, user("slurm"))
    following = max(find_next_job(state, pod), find_next_job(stage, pod), manifest.highest + 1, highest + 1)
    head = read_plain(stage / JOBS, WHOLE_HEAD)
    if head is None or read_next_job(head, release) is None:
        raise CopyError(
            f"restore {manifest.name}", "its job_state has no head that this Slurm reads", file=str(archive)
        )
    with (stage / JOBS).open("r+b") as file:
        file.seek(NEXT)
        file.write(following.to_bytes(4, "big"))
        file.flush()
        os.fsync(file.fileno())
    os.sync()  # one flush for all unpacked files


def unpack(archive: Path, manifest: Manifest, target: Path, owner: tuple[int, int]) -> None:
    """Unpack plain files into a new directory; nothing outside of it can be named."""
    with copies.open_file(archive, manifest.name) as file, tarfile.open(fileobj=file, mode="r|") as tar:
        for member in tar:
            parts = member.name.split("/")
            if not member.isreg() or not all(parts) or {".", ".."} & set(parts):
                raise CopyError(
                    f"unpack {manifest.name}", f"found {member.name!r}, expected plain files", file=str(archive)
                )
            parent = target
            for part in parts[:-1]:
                parent = parent / part
                if not parent.is_dir():
                    parent.mkdir(mode=0o700)
                    os.chown(parent, *owner)
            fd = os.open(parent / parts[-1], os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
            with os.fdopen(fd, "wb") as out:
                source = tar.extractfile(member)
                assert source is not None
                shutil.copyfileobj(source, out, CHUNK)
                os.fchown(fd, *owner)


def _move(source: Path, target: Path) -> None:
    """Move everything but a restore's own files; slurmctld is stopped, so nothing new appears."""
    for path in sorted(source.iterdir()):
        if source.name != STAGE and OURS.fullmatch(path.name):
            continue
        path.rename(target / path.name)
    sync_directory(target)
    sync_directory(source)


def _load_accounting(dump: Path, aside: str) -> str:
    """Load the dump beside the present tables, then exchange all of them in one statement of the database."""
    before = f"{DATABASE}_before_{re.sub(r'[^0-9A-Za-z]', '', aside.removeprefix(ASIDE))}"
    if _tables(before):
        return before  # the exchange was made, and the restore was cut then
    _sql(f"DROP DATABASE IF EXISTS {LOADING}; CREATE DATABASE {LOADING};")
    argv = [accounting.CLIENT, "--no-defaults", f"--socket={accounting.SOCKET}", "--user=root", LOADING]
    with (
        gzip.open(dump, "rb") as file,
        subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as loader,
    ):
        assert loader.stdin is not None and loader.stderr is not None
        try:
            shutil.copyfileobj(file, loader.stdin, CHUNK)
            loader.stdin.close()
        except BrokenPipeError:
            pass  # its error says why
        errors = loader.stderr.read(2000).decode(errors="replace").strip()
    if loader.returncode:
        raise CopyError("load the accounting database", errors, file=str(dump), hint="nothing was exchanged")
    # A lost database is created again only when MariaDB starts.
    _sql(f"CREATE DATABASE IF NOT EXISTS {DATABASE}; CREATE DATABASE IF NOT EXISTS {before};")
    moves = [f"{DATABASE}.`{table}` TO {before}.`{table}`" for table in _tables(DATABASE)]
    moves += [f"{LOADING}.`{table}` TO {DATABASE}.`{table}`" for table in _tables(LOADING)]
    _sql(f"RENAME TABLE {', '.join(moves)};")
    _sql(f"DROP DATABASE {LOADING};")
    return before


def _tables(database: str) -> list[str]:
    rows = _sql(f"SELECT table_name FROM information_schema.tables WHERE table_schema = '{database}'")
    return [row for row in rows.split("\n") if row]


def _sql(statement: str) -> str:
    argv = [
        accounting.CLIENT,
        "--no-defaults",
        "--batch",
        "--skip-column-names",
        f"--socket={accounting.SOCKET}",
        "--user=root",
        f"--execute={statement}",
    ]
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CopyError("restore the accounting database", done.stderr.strip()[-400:], hint="see `minivm why mariadb`")
    return done.stdout
