"""Rehearse an upgrade: start this image's Slurm on a copy of another's state, and tell what became of the jobs.

The daemons are those of a proof (init.state.prove): no network, no program of the site, an unprivileged user. Nothing
is written beside the copy, so a rehearsal may run in a container that has the copies read-only.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ground.errors import counted
from ground.files import read_plain
from init.errors import InitError
from init.pod.pod import Pod
from init.slurm.conf import read as conf_of
from init.slurm.place import read_release
from init.state import copies, prove
from init.state.copies import CopyError, Manifest

WITHIN = 3600.0  # slurmdbd converts its tables before it answers
PARTITIONS = ("/usr/bin/sinfo", "--all", "--noheader", "--format=%R")
MOST_TOLD = 20
LARGEST_FILE = 16 << 20
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """Outcome of a rehearsal: what this image's Slurm keeps of a copy."""

    release: str
    same: int
    # Sentences about jobs and partitions that would not be the same.
    losses: tuple[str, ...]
    # Sentences about the rest.
    notes: tuple[str, ...]


def rehearse(
    pod: Pod, directory: Path, manifest: Manifest, conf: Mapping[str, bytes] | None = None, *, within: float = WITHIN
) -> Rehearsal:
    """Start the copy with this image's Slurm; CopyError if a daemon does not start. `conf`: slurm.conf and others."""
    if not manifest.has_state:
        problem = "the copy has records of accounting alone"
        raise CopyError(f"rehearse {manifest.name}", problem, hint="rehearse a copy of the controller's pod")
    copies.verify(directory, manifest)
    prove.check_here(manifest)
    if (expected := prove.listed_jobs(directory, manifest)) is None:
        problem = "slurmctld did not list its jobs while this copy was made, so nothing can be compared"
        raise CopyError(f"rehearse {manifest.name}", problem, hint="minivm state save, and rehearse that copy")
    with prove.throw_away(pod, directory, manifest, within, conf) as (daemons, _, until):
        restored = prove.restored_jobs(daemons, until)
        answer = daemons.ask(*PARTITIONS)
        database = sum(path.stat().st_size for path in (daemons.root / "mysql").rglob("*") if path.is_file())
        took = dict(daemons.took)
    if answer.returncode:
        raise CopyError(f"rehearse {manifest.name}", f"sinfo: {answer.stderr.strip()[-300:]}")
    jobs = _lost_jobs(expected, restored)
    before = conf_of(prove.copied_files(directory, manifest)).partitions
    removed = sorted(before.keys() - set(answer.stdout.split()))
    release = read_release(pod)
    return Rehearsal(
        release=release.name if release else "unknown",
        same=len(expected.settled) - len(jobs),
        losses=(*(f"partition {name} would be gone" for name in removed), *jobs),
        notes=tuple(_notes(manifest, expected, took, database)),
    )


def _lost_jobs(expected: copies.JobsAround, restored: Mapping[str, str]) -> list[str]:
    lost = []
    for job, state in expected.settled.items():
        if job not in restored:
            lost.append(f"job {job}, {state.lower()} now, would be gone")
        elif restored[job] != state:
            lost.append(f"job {job} would be {restored[job].lower()}, and is {state.lower()}")
    return lost


def _notes(manifest: Manifest, expected: copies.JobsAround, took: Mapping[str, float], database: int) -> list[str]:
    notes = []
    if expected.changing:
        notes.append(f"{counted(len(expected.changing), 'job')} changed while the copy was made: not compared")
    if manifest.has_accounting:
        notes.append(f"accounting: slurmdbd answered after {took['slurmdbd']:.1f} s; {database // MIB} MiB on disk")
    else:
        notes.append(f"accounting was not rehearsed: {manifest.accounting}")
    return [*notes, f"slurmctld answered after {took['slurmctld']:.1f} s"]


def read_conf(directory: Path) -> dict[str, bytes]:
    """Read the files of a directory that are to replace the copy's."""
    try:
        files = {path.name: read_plain(path, LARGEST_FILE) for path in sorted(directory.iterdir())}
    except OSError as error:
        raise CopyError("rehearse", str(error), file=str(directory)) from error
    read = {name: data for name, data in files.items() if data is not None}
    if "slurm.conf" not in read:
        raise CopyError("rehearse", "it has no slurm.conf", file=str(directory), hint="give the directory of all files")
    return read


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
        return manifest, rehearse(Pod(os.environ), directory, manifest, read_conf(conf) if conf else None)
    except InitError:
        raise
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise CopyError(f"rehearse {name}", str(error)) from error
