"""The `minivm state` command: copies of the controller's state."""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ground.errors import counted
from ground.files import write_whole
from init.cli import JSON, Group, emit
from init.errors import ConfigError
from init.pod.client import Client, control_socket, service
from init.pod.pod import Pod, user
from init.prepare import saved_state
from init.slurm.client import is_slurmctld_installed
from init.slurm.place import ACCEPTED, BACKUPS, find_state_directory
from init.state import copies, prove, rehearse, restore, save
from init.state.copies import CopyError, Manifest
from init.view.status import duration

if TYPE_CHECKING:
    from init.state.copies import Proof

NAME = click.argument("name")
FROM = click.option(
    "--from",
    "directory",
    type=click.Path(path_type=Path),
    default=BACKUPS,
    show_default=True,
    help="Directory of copies.",
)

NO_ANSWER = (
    "slurmdbd does not answer: jobs that ended since the copy run again, and job numbers may be given again; better"
    " repeat this when it answers, or set slurm.config.FirstJobId above the highest job that you know"
)


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Save, list, prove and restore the state of slurmctld, in the controller's pod.

    In the accounting pod the same of its records.
    """
    if not is_slurmctld_installed():
        raise CopyError(
            "look at the state",
            "this pod runs no slurmctld",
            hint="run this in the pod of the controller or of accounting",
        )
    if os.geteuid():
        raise CopyError("look at the state", f"found user {os.geteuid()}, expected root")


@main.command("save")
@click.option(
    "--to",
    "directory",
    type=click.Path(path_type=Path),
    default=BACKUPS,
    show_default=True,
    help="Directory of copies.",
)
@click.option("--keep", type=click.IntRange(1), default=None, help="Keep so many copies  [default: as configured, 7]")
@JSON
def save_command(directory: Path, keep: int | None, as_json: bool) -> None:
    """Copy the state and the embedded database while slurmctld runs. Takes about 20 seconds.

    In the accounting pod the database alone, while slurmdbd runs.
    """
    from init.helpers.backups import settings

    pod = Pod(os.environ)
    manifest = save.save(pod, directory, keep or settings(pod)[1], records_only=not has_slurmctld())
    _publish(directory)
    if as_json:
        emit(_mapping(manifest, None))
        return
    if manifest.has_state:
        click.echo(f"{manifest.name}: {_jobs(manifest)}; accounting: {manifest.accounting or 'yes'}")
    else:
        click.echo(f"{manifest.name}: {manifest.accounted[0]} accounted jobs")


@main.command("list")
@FROM
@JSON
def list_command(directory: Path, as_json: bool) -> None:
    """List the copies, newest first: age, Slurm, unfinished jobs, and if a proof restored them."""
    rows: list[tuple[str, ...]] = [("NAME", "AGE", "SLURM", "JOBS", "ACCOUNTING", "PROVEN")]
    mappings = []
    for name in copies.list_names(directory):
        try:
            manifest = copies.load_manifest(directory, name)
        except CopyError as error:
            rows.append((name, "-", "-", "-", "-", f"damaged: {error.why}"))
            mappings.append({"name": name, "damaged": str(error)})
            continue
        proof = copies.load_proof(directory, name)
        mappings.append(_mapping(manifest, proof))
        rows.append(
            (
                name,
                duration(max(0.0, time.time() - manifest.time)),
                manifest.release or "-",
                str(manifest.unfinished) if manifest.listed else "-",
                "no" if manifest.accounting else "yes",
                _proven(proof),
            )
        )
    if as_json:
        emit(mappings)
        return
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    for row in rows:
        click.echo("  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[5]]))


@main.command()
@NAME
@FROM
@JSON
def show(name: str, directory: Path, as_json: bool) -> None:
    """Show one copy, after comparing its files with their hashes. Exit 1 if one differs."""
    manifest = copies.load_manifest(directory, name)
    damage = ""
    try:
        copies.verify(directory, manifest)
    except CopyError as error:
        damage = str(error)
    proof = copies.load_proof(directory, name)
    if as_json:
        emit({**_mapping(manifest, proof), "verified": not damage, "damage": damage})
    else:
        click.echo(
            f"{name}: cluster {manifest.cluster}, Slurm {manifest.release or 'unknown'}, "
            f"{duration(max(0.0, time.time() - manifest.time))} old"
        )
        if manifest.has_state:
            click.echo(f"jobs: {_jobs(manifest)}; highest number {manifest.highest}")
        click.echo(f"accounting: {manifest.accounting or counted(manifest.accounted[0], 'job')}")
        click.echo(f"files: {damage or 'each has the SHA-256 of the manifest'}")
        click.echo(f"proof: {_proven(proof)}" + (f" ({proof.text})" if proof and proof.ok else ""))
    sys.exit(1 if damage else 0)


@main.command()
@NAME
@FROM
@JSON
def verify(name: str, directory: Path, as_json: bool) -> None:
    """Restore a copy into a throw-away slurmctld without network, and compare its jobs. Exit 1 if they differ.

    Records are served by a throw-away slurmdbd, and their jobs counted.
    """
    with save.only_one(directory):
        proof = prove.prove(Pod(os.environ), directory, copies.load_manifest(directory, name))
    _publish(directory)
    if as_json:
        emit({"name": name, "ok": proof.ok, "text": proof.text})
    else:
        click.echo(f"{name}: {'proven: ' if proof.ok else 'cannot be restored: '}{proof.text}")
    sys.exit(0 if proof.ok else 1)


@main.command("rehearse")
@NAME
@FROM
@click.option(
    "--config",
    type=click.Path(exists=True, allow_dash=True, path_type=Path),
    help="A slurm.conf, ConfigMap or - for standard input, or a directory of all files, in place of the copy's.",
)
@JSON
def rehearse_command(name: str, directory: Path, config: Path | None, as_json: bool) -> None:
    """Start this image's Slurm on a copy without network, and tell what would be lost. Exit 1 if anything would.

    For an upgrade, run it as the command of a container of the newer image that has the copies.
    """
    manifest, rehearsal = rehearse.run(directory, name, config)
    if as_json:
        emit({"name": name, **dataclasses.asdict(rehearsal)})
    else:
        click.echo("\n".join(rehearse.lines(manifest, rehearsal)))
    sys.exit(1 if rehearsal.losses else 0)


@main.command("restore")
@NAME
@FROM
@click.option("--with-accounting", is_flag=True, help="Also replace the embedded accounting database by the copy's.")
def restore_command(name: str, directory: Path, with_accounting: bool) -> None:
    """Put a copy in the place of the present state, which is moved aside. slurmctld must be stopped by minivm.

    In the accounting pod: the records in the place of the present ones. slurmdbd must be stopped.
    """
    pod = Pod(os.environ)
    with save.only_one(directory):
        manifest = copies.load_manifest(directory, name)
        if not manifest.has_state:
            _check_stopped(name, "slurmdbd")
            click.echo(restore.restore_records(pod, directory, manifest))
            click.echo("start it: minivm start slurmdbd")
            return
        state = find_state_directory(pod)
        replaces_records = with_accounting or restore.replaces_accounting(state)  # of a restore that was cut
        _check_stopped(name, "slurmctld", *(["slurmdbd"] if replaces_records else []))
        since = restore.since(pod, manifest)  # before the database may be the copy's
        if not since.answered:
            click.echo(NO_ANSWER)
        steps = restore.restore(pod, state, directory, manifest, with_accounting=with_accounting, highest=since.highest)
        for line in steps:
            click.echo(line)
    both = "start both: minivm start slurmdbd, then minivm start slurmctld"
    click.echo(f"{_jobs(manifest)}; {both if replaces_records else 'start it: minivm start slurmctld'}")
    if since.ended:
        click.echo(restore.warn_of_second_runs(since.ended))


@main.command("accept-loss")
def accept_loss() -> None:
    """Let slurmctld start once without the jobs that a copy has. Nothing is removed."""
    accept(Pod(os.environ))
    click.echo("slurmctld may start without those jobs: minivm start slurmctld")


def accept(pod: Pod) -> None:
    """Record the acceptance; refuse it where nothing would be lost: it would count for a later loss."""
    file = find_state_directory(pod) / ACCEPTED
    if not file.exists():
        try:
            text = saved_state.guard(pod)
        except ConfigError:
            write_whole(file, f"{time.time():.0f}\n", mode=0o600, owner=user("slurm"))
        else:
            raise CopyError("accept a loss", f"there is none: {text}", hint="minivm why slurmctld")


def has_slurmctld() -> bool:
    """Tell if this pod runs slurmctld; the accounting pod does not."""
    with Client(control_socket()) as client:
        return service(client, "slurmctld") is not None


def _check_stopped(name: str, *daemons: str) -> None:
    with Client(control_socket()) as client:
        states = {view.name: view.state for view in client.snapshot().services}
    for daemon in daemons:
        if states.get(daemon) != "stopped":
            raise CopyError(
                f"restore {name}",
                f"{daemon} is {states.get(daemon, 'absent')}, expected stopped",
                hint=f"minivm stop {daemon}",
            )


def _publish(directory: Path) -> None:
    if directory == Path(BACKUPS):
        copies.publish_summary(copies.summarize(directory))


def _jobs(manifest: Manifest) -> str:
    if not manifest.listed:
        return "jobs unknown (slurmctld did not answer)"
    counts = ", ".join(f"{count} {state.lower()}" for state, count in manifest.jobs) or "no unfinished jobs"
    return counts + (f", {manifest.changing} changing" if manifest.changing else "")


def _proven(proof: Proof | None) -> str:
    if proof is None:
        return "not yet"
    age = duration(max(0.0, time.time() - proof.time))
    return f"{age} ago" if proof.ok else f"failed {age} ago: {proof.text}"


def _mapping(manifest: Manifest, proof: Proof | None) -> dict[str, Any]:
    return {
        "name": manifest.name,
        "time": manifest.time,
        "cluster": manifest.cluster,
        "release": manifest.release,
        "jobs": dict(manifest.jobs) if manifest.listed else None,
        "changing": manifest.changing,
        "highestJob": manifest.highest,
        "accounting": not manifest.accounting,
        "proof": None if proof is None else {"time": proof.time, "ok": proof.ok, "text": proof.text},
    }


if __name__ == "__main__":
    main(prog_name="minivm state")
