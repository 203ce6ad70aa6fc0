"""Rehearse another Slurm or slurm.conf: start it on a copy of the state, and tell what became of the jobs.

The daemons are those of a proof (init.state.prove): no network, no program of the site, an unprivileged user. Nothing
is written beside the copy, so a rehearsal may run in a container that has the copies read-only.

Two comparisons. The jobs that slurmctld listed while the copy was made must be there with the same state. And where
the files differ from the copy's, a second slurmctld of the same release starts with the copy's own: each job must be
the same in both, so a difference comes from the files and not from the rehearsal. What the throw-away has of its own
(places, keys, programs) is compared by init.slurm.change, without a daemon.
"""

from __future__ import annotations

import os
import pwd
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ground.errors import counted
from ground.files import read_plain
from init.errors import InitError
from init.pod.pod import Pod
from init.slurm import change, daemon
from init.slurm.conf import MAIN, Configuration, find_missing_includes
from init.slurm.conf import read as conf_of
from init.slurm.files import decode_given, list_mounted_files
from init.slurm.place import read_release
from init.state import copies, prove
from init.state.copies import CopyError, Manifest

WITHIN = 3600.0  # slurmdbd converts its tables before it answers
# Fields that no user may write; the reason, which an administrator may, is last.
JOBS = ("/usr/bin/squeue", "--all", "--noheader", "--states=all", "--format=%i|%T|%P|%N|%Q|%l|%r")
PARTITIONS = ("/usr/bin/sinfo", "--all", "--noheader", "--format=%R|%a|%l|%D")
NODES = ("/usr/bin/sinfo", "--all", "--noheader", "--Node", "--format=%R|%N")
RESERVATIONS = ("/usr/bin/scontrol", "--oneliner", "show", "reservation")
RESERVATION = re.compile(r"^ReservationName=(\S+)", re.MULTILINE)
# slurmctld logs this at its start for a waiting job whose feature no node has.
NO_FEATURE = re.compile(r"^[^\n]*?\bJobId=(\d+)\S* has invalid feature list: ", re.MULTILINE)
# Reasons for which a job waits its turn; for any other new one it waits for an administrator.
ORDINARY = frozenset({
    "BeginTime", "Cleaning", "Dependency", "JobArrayTaskLimit", "JobHeldUser", "Licenses", "None", "Priority",
    "Reservation", "Resources",
})  # fmt: skip
PRIORITY_TYPE = "priority/multifactor"  # Slurm's default
TERM = re.compile(rb"^(\s*StateSaveLocation\s*=\s*\S+?)/term-\d+[ \t]*$", re.MULTILINE | re.IGNORECASE)
LONGEST_LIMIT = float("inf")
MOST_TOLD = 20
LARGEST_FILE = 16 << 20
LARGEST_LOG = 64 << 20
MIB = 1 << 20
PASSWD = Path("/etc/passwd")


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """Outcome of a rehearsal: what this image's Slurm keeps of a copy."""

    release: str
    same: int
    # Sentences about jobs, partitions and reservations that would not be the same.
    losses: tuple[str, ...]
    # Sentences about the rest.
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ShadowJob:
    state: str
    partition: str
    nodes: str
    priority: int
    limit: str
    reason: str

    @property
    def waits(self) -> bool:
        return self.state in ("PENDING", "REQUEUE_HOLD", "REQUEUED", "RESV_DEL_HOLD", "SPECIAL_EXIT")


@dataclass(frozen=True, slots=True)
class ShadowPartition:
    state: str
    limit: str
    nodes: int


@dataclass(frozen=True, slots=True)
class Shadow:
    """Answers of a throw-away slurmctld."""

    jobs: Mapping[str, ShadowJob]
    partitions: Mapping[str, ShadowPartition]
    # Partition and node.
    nodes: frozenset[tuple[str, str]]
    reservations: frozenset[str]
    without_feature: frozenset[str]
    known_jobs: tuple[daemon.KnownJob, ...]
    # With each ended job and array task; None if a line cannot be read.
    count: int | None


def rehearse(
    pod: Pod,
    directory: Path,
    manifest: Manifest,
    candidates: Sequence[Mapping[str, bytes]] = (),
    *,
    within: float = WITHIN,
) -> Iterator[Rehearsal]:
    """Start the copy with this image's Slurm; CopyError if nothing can be compared.

    `candidates`: slurm.conf and the files beside it, a rehearsal for each; without one the copy's own.
    """
    if not manifest.has_state:
        problem = "the copy has records of accounting alone"
        raise CopyError(f"rehearse {manifest.name}", problem, hint="rehearse a copy of the controller's pod")
    copies.verify(directory, manifest)
    prove.check_here(manifest)
    if (expected := prove.read_listed_jobs(directory, manifest)) is None:
        problem = "slurmctld did not list its jobs while this copy was made, so nothing can be compared"
        raise CopyError(f"rehearse {manifest.name}", problem, hint="minivm state save, and rehearse that copy")
    own = prove.read_copied_files(directory, manifest)
    notes = []
    if unknown := _make_known(prove.read_listed_users(directory, manifest)):
        notes.append(f"{counted(unknown, 'user')} of the cluster are unknown here: their reservations may look lost")
    with prove.throw_away(pod, directory, manifest, within) as (daemons, _, until):
        baseline = None
        if any(files != own for files in candidates):
            try:
                prove.start_and_list_jobs(daemons, until)
                baseline = _look(daemons)
            except CopyError as error:
                notes.append(f"not compared with the copy's own slurm.conf, which does not start here: {error.why}")
        for files in candidates or [own]:
            prove.place_again(daemons, directory, manifest, files)
            yield _rehearse(_Stage(pod, daemons, manifest, expected, until), own, files, baseline, notes)


@dataclass(frozen=True, slots=True)
class _Stage:
    pod: Pod
    daemons: prove.Daemons
    manifest: Manifest
    expected: copies.JobsAround
    until: float


def _rehearse(
    stage: _Stage, own: Mapping[str, bytes], files: Mapping[str, bytes], baseline: Shadow | None, notes: Sequence[str]
) -> Rehearsal:
    """Start slurmctld with these files, and compare."""
    daemons, expected = stage.daemons, stage.expected
    release = read_release(stage.pod)
    name = release.name if release else "unknown"
    refusal = _refusal(files, stage.manifest) or prove.find_objection(daemons, files)
    if not refusal:
        try:
            restored = prove.start_and_list_jobs(daemons, stage.until)
            shadow = _look(daemons)
        except CopyError as error:
            refusal = error.why
    if refusal:
        everything = change.job_list(list(expected.settled))
        return Rehearsal(name, 0, (f"slurmctld would not start, and not serve {everything}: {refusal}",), tuple(notes))
    database = sum(path.stat().st_size for path in (daemons.root / "mysql").rglob("*") if path.is_file())
    notes = [*notes, *_notes(stage.manifest, expected, daemons.took, database)]
    lost = _find_lost_jobs(expected, restored, {job: row.state for job, row in shadow.jobs.items()})
    before, after = conf_of(own), conf_of(files)
    removed = sorted(before.partitions.keys() - shadow.partitions.keys())
    causes = [f"partition {partition} would be gone" for partition in removed]
    if files != own:
        known_jobs, count = (baseline.known_jobs, baseline.count) if baseline is not None else (None, None)
        effect = change.effect(_without_term(own), files, known_jobs, known=count)
        notes += [f"changes: {text}" for text in effect.changes[:MOST_TOLD]]
        notes += [f"restarts: {text}" for text in effect.restarts]
        if baseline is not None:
            causes += [str(loss) for loss in effect.losses]
            for job, sentence in compare_jobs(baseline, shadow):
                if job not in lost and job not in expected.changing:
                    lost[job] = sentence
            causes += compare_rest(baseline, shadow, before, after)
            gone = {node for _, node in baseline.nodes} - {node for _, node in shadow.nodes}
            notes += [f"node {node} would be gone" for node in sorted(gone)[:MOST_TOLD]]
    same = len(expected.settled.keys() - lost.keys())
    return Rehearsal(name, same, (*causes, *lost.values()), tuple(notes))


def _without_term(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return the files with the StateSaveLocation that is configured: one of several controllers adds its term."""
    return {**files, MAIN: TERM.sub(rb"\1", files.get(MAIN, b""))}


def _refusal(files: Mapping[str, bytes], manifest: Manifest) -> str:
    """Return why slurmctld would not start with these files, as far as no daemon is needed to tell; else ""."""
    if missing := find_missing_includes(files):
        return f"slurm.conf includes {', '.join(missing)}, which is not among the files"
    conf = conf_of(files)
    errors = (
        change.impossible_settings(conf, manifest.cluster.lower()),
        change.find_missing_plugins(conf, change.plugins()),
        change.find_missing_topology(files),
    )
    return "; ".join(filter(None, errors))


def _make_known(users: Mapping[str, tuple[int, int]]) -> int:
    """Add the cluster's users to a container that has no other purpose; count those that stay unknown.

    slurmctld removes a reservation whose users it does not know, and holds its jobs. A pod of the cluster has its
    users from a directory: only the first process of a container of its own adds them.
    """
    missing = {name: ids for name, ids in users.items() if not _is_known(name)}
    if os.getpid() != 1:
        return len(missing)
    try:
        with PASSWD.open("a") as file:
            for name, (uid, gid) in missing.items():
                file.write(f"{name}:x:{uid}:{gid}::/:/usr/sbin/nologin\n")
    except OSError:  # a read-only container
        return len(missing)
    return 0


def _is_known(name: str) -> bool:
    try:
        pwd.getpwnam(name)
    except (KeyError, ValueError):
        return False
    return True


def _look(daemons: prove.Daemons) -> Shadow:
    def ask(argv: Sequence[str]) -> str:
        answer = daemons.ask(*argv, within=600.0)
        if answer.returncode:
            raise CopyError("rehearse", f"{argv[0]}: {answer.stderr.strip()[-300:]}")
        return answer.stdout

    log = read_plain(daemons.root / "slurmctld.out", LARGEST_LOG) or b""
    return Shadow(
        jobs=dict(_parse_jobs(ask(JOBS))),
        partitions=dict(_parse_partitions(ask(PARTITIONS))),
        nodes=frozenset((name, node) for name, _, node in (line.partition("|") for line in ask(NODES).split())),
        reservations=frozenset(RESERVATION.findall(ask(RESERVATIONS))),
        without_feature=frozenset(NO_FEATURE.findall(log.decode(errors="replace"))),
        known_jobs=tuple(daemon.jobs(ask(daemon.SHOW_JOBS))),
        count=daemon.count(ask(daemon.COUNT_JOBS)),
    )


def _parse_jobs(text: str) -> Iterator[tuple[str, ShadowJob]]:
    for line in text.splitlines():
        cells = line.strip().split("|", 6)
        if len(cells) == 7 and cells[4].isdecimal():
            job, state, partition, nodes, priority, limit, reason = cells
            yield job, ShadowJob(state, partition, nodes, int(priority), limit, reason)


def _parse_partitions(text: str) -> Iterator[tuple[str, ShadowPartition]]:
    nodes: dict[str, int] = {}
    for line in text.splitlines():  # one line for each state of nodes
        cells = line.strip().split("|")
        if len(cells) == 4 and cells[3].isdecimal():
            name, state, limit, count = cells
            nodes[name] = nodes.get(name, 0) + int(count)
            yield name, ShadowPartition(state, limit, nodes[name])


def compare_jobs(before: Shadow, after: Shadow) -> Iterator[tuple[str, str]]:
    """Yield each job that another configuration changes, with a sentence. Pure."""
    wanted = {job.id: job.wanted for job in before.known_jobs if job.wanted}
    for job, old in before.jobs.items():
        new = after.jobs.get(job)
        if sentence := _difference(job, old, new) if new else f"job {job}, {old.state.lower()} now, would be gone":
            yield job, sentence
        elif old.waits and _number(job) in after.without_feature - before.without_feature:
            yield job, f"job {job} would wait for a feature that no node has"
        elif old.waits and (partition := _too_short(old, before, after)):
            yield job, f"job {job} would wait: its time limit {old.limit} is above that of partition {partition}"
        elif old.waits and _has_all(old, wanted.get(job), before) and not _has_all(old, wanted.get(job), after):
            yield job, f"job {job} would wait for a node that partition {old.partition} has no more"


def _difference(job: str, old: ShadowJob, new: ShadowJob) -> str:
    if old.state != new.state:
        return f"job {job} would be {new.state.lower()}, and is {old.state.lower()}"
    if old.partition != new.partition:
        return f"job {job} would move from partition {old.partition} to {new.partition or 'none'}"
    if old.nodes != new.nodes:
        return f"job {job} would move from {old.nodes or 'no node'} to {new.nodes or 'no node'}"
    if old.waits and bool(old.priority) != bool(new.priority):
        return f"job {job} would be {'released' if new.priority else 'held'}: {new.reason}"
    if old.waits and old.reason != new.reason and re.split(r"[,(]", new.reason)[0] not in ORDINARY:
        return f"job {job} would wait: {new.reason}"
    return ""


def _number(job: str) -> str:
    return job.partition("_")[0].partition("+")[0]


def _has_all(job: ShadowJob, wanted: frozenset[str] | None, shadow: Shadow) -> bool:
    """Tell if a partition of the job has every node that it requests by name."""
    if wanted is None:
        return True
    return any(all((name, node) in shadow.nodes for node in wanted) for name in job.partition.split(","))


def _too_short(job: ShadowJob, before: Shadow, after: Shadow) -> str:
    """Return the partition whose lowered time limit keeps the job from its last one; "" if another lets it run."""
    names = [name for name in job.partition.split(",") if name in before.partitions and name in after.partitions]
    limit = seconds(job.limit)

    def let_in(shadow: Shadow) -> list[str]:
        return [name for name in names if limit <= seconds(shadow.partitions[name].limit)]

    return let_in(before)[0] if let_in(before) and not let_in(after) else ""


def seconds(limit: str) -> float:
    """Parse a time limit as squeue and sinfo print it: 2-00:00:00, 1:00:00, 30:00; infinite for words."""
    days, _, rest = limit.rpartition("-")
    parts = [days or "0", *(["0"] * (3 - len(rest.split(":")))), *rest.split(":")]
    if len(parts) != 4 or not all(part.isascii() and part.isdecimal() for part in parts):
        return LONGEST_LIMIT
    day, hour, minute, second = (int(part) for part in parts)
    return float(((day * 24 + hour) * 60 + minute) * 60 + second)


def compare_rest(before: Shadow, after: Shadow, old: Configuration, new: Configuration) -> Iterator[str]:
    """Yield a sentence for each reservation, each partition with jobs, and the order that a configuration changes."""
    for name in sorted(before.reservations - after.reservations):
        yield f"reservation {name} would be gone"
    for name in sorted(before.partitions.keys() & after.partitions.keys()):
        was, would_be = before.partitions[name], after.partitions[name]
        jobs = [job for job, row in before.jobs.items() if row.waits and name in row.partition.split(",")]
        if jobs and was.state == "up" != would_be.state:
            yield f"partition {name} would be {would_be.state}, and start no job: {change.job_list(jobs)}"
        if jobs and was.nodes and not would_be.nodes:
            yield f"partition {name} would have no nodes: {change.job_list(jobs)}"
    kinds = [conf.value("prioritytype") or PRIORITY_TYPE for conf in (old, new)]
    if kinds[0] != kinds[1] and (jobs := [job for job, row in before.jobs.items() if row.waits and row.priority]):
        # The new plug-in gives its own numbers only to jobs that it calculates later, which the rehearsal does not see.
        yield f"PriorityType {kinds[0]} becomes {kinds[1]}: another order of {change.job_list(jobs)}"


def _find_lost_jobs(
    expected: copies.JobsAround, restored: Mapping[str, str], ended: Mapping[str, str] | None = None
) -> dict[str, str]:
    lost = {}
    for job, state in expected.settled.items():
        if job not in restored:
            outcome = (ended or {}).get(job, "")
            more = f" ({outcome.lower()})" if outcome and outcome != state else ""
            lost[job] = f"job {job}, {state.lower()} now, would be gone{more}"
        elif restored[job] != state:
            lost[job] = f"job {job} would be {restored[job].lower()}, and is {state.lower()}"
    return lost


def _notes(manifest: Manifest, expected: copies.JobsAround, took: Mapping[str, float], database: int) -> Iterator[str]:
    if expected.changing:
        yield f"{counted(len(expected.changing), 'job')} changed while the copy was made: not compared"
    if manifest.has_accounting:
        yield f"accounting: slurmdbd answered after {took['slurmdbd']:.1f} s; {database // MIB} MiB on disk"
    else:
        yield f"accounting was not rehearsed: {manifest.accounting}"
    yield f"slurmctld answered after {took['slurmctld']:.1f} s"


def read_conf(path: Path, copied: Mapping[str, bytes]) -> dict[str, bytes]:
    """Read what replaces the copy's files: a directory all of them, a ConfigMap those it has, else slurm.conf.

    The path `-` is standard input.
    """
    try:
        if path.is_dir():
            read = {file.name: read_plain(file, LARGEST_FILE) for file in list_mounted_files(path)}
            files = {name: data for name, data in read.items() if data is not None}
        else:
            data = sys.stdin.buffer.read(LARGEST_FILE + 1) if str(path) == "-" else read_plain(path, LARGEST_FILE)
            if data is None or len(data) > LARGEST_FILE:
                problem = f"found no plain file of at most {LARGEST_FILE // MIB} MiB"
                raise CopyError("rehearse", problem, file=str(path), hint="name a slurm.conf, or a directory with it")
            files = {**copied, **decode_given(data)}
    except OSError as error:
        raise CopyError("rehearse", str(error), file=str(path)) from error
    if not files.get(MAIN, b"").strip():
        raise CopyError("rehearse", "it has no slurm.conf", file=str(path), hint="give the directory of all files")
    return files


def lines(manifest: Manifest, rehearsal: Rehearsal) -> list[str]:
    """Format a rehearsal for people: what is lost first."""
    before = f"Slurm {manifest.release}" if manifest.release else "an unknown Slurm"
    outcome = "it would lose or change" if rehearsal.losses else "nothing would be lost"
    same = counted(rehearsal.same, "job is", "jobs are")
    report = [f"Slurm {rehearsal.release} on the state of {before}: {same} the same; {outcome}"]
    report += [f"  {loss}" for loss in rehearsal.losses[:MOST_TOLD]]
    if len(rehearsal.losses) > MOST_TOLD:
        report.append(f"  and {len(rehearsal.losses) - MOST_TOLD} more")
    return [*report, *rehearsal.notes]


def run(directory: Path, name: str, conf: Path | None) -> tuple[Manifest, Rehearsal]:
    """Rehearse one copy; any failure is a CopyError that names the cause."""
    manifest = copies.load_manifest(directory, name)
    try:
        files = read_conf(conf, prove.read_copied_files(directory, manifest)) if conf else None
        (rehearsal,) = rehearse(Pod(os.environ), directory, manifest, [files] if files else [])
        return manifest, rehearsal
    except InitError:
        raise
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise CopyError(f"rehearse {name}", str(error)) from error
