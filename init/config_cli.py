"""The `minivm config` command: preview what a slurm.conf does to the cluster, and accept one."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import click

from init.cli import JSON, Group, emit
from init.pod.pod import Pod
from init.slurm.change import (
    JUDGEMENT,
    LIVE,
    PENDING,
    Effect,
    SavedJudgement,
    SlurmConfigError,
    assess,
    list_ignored,
    load_judgement,
    objections,
)
from init.slurm.client import is_slurmctld_installed
from init.slurm.daemon import Slurmctld
from init.slurm.files import MAIN, LastGoodConfig, SlurmFiles, decode_given, digest, read
from init.slurm.place import place_files

TRIED = Path("/run/minivm/slurm-asked")  # not the directory where the mounted one is tested at the same time
PAUSE = 0.2
WITHIN = 300.0  # a slurmctld that hangs is waited for twice, killed and started

CANDIDATE = click.argument("candidate", required=False, metavar="[FILE|-]")


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--socket", type=click.Path(path_type=Path), default=None, hidden=True)
@click.pass_context
def main(context: click.Context, socket: Path | None) -> None:
    """Look at the cluster's slurm.conf, in the controller's pod."""
    from init.pod.client import control_socket

    if not is_slurmctld_installed():
        raise SlurmConfigError(
            "look at slurm.conf", "this pod runs no slurmctld", hint="run this in the controller's pod"
        )
    context.obj = socket or control_socket()


@main.command()
@click.option("--wait", is_flag=True, help="Wait until the mounted files are checked.")
@JSON
def status(wait: bool, as_json: bool) -> None:
    """Show if the mounted slurm.conf is the one that runs, or why not. Exit 0 when it is."""
    result = _wait_for_result(time.monotonic() + WITHIN if wait else 0.0)
    if as_json:
        emit(asdict(result))
    else:
        click.echo(f"{result.hash}: {result.why or result.state}")
    sys.exit(0 if result.state == LIVE else 1)


@main.command()
@CANDIDATE
def diff(candidate: str | None) -> None:
    """Show what a slurm.conf changes: lines, jobs, and daemons that restart. Without a FILE: the mounted one.

    FILE (or - for standard input) is a slurm.conf, a directory with the files of /etc/slurm, or Kubernetes' ConfigMap
    as `helm template` writes it.
    """
    files, new = _place_files(*_candidate(candidate))
    _show(assess(files, Slurmctld(Path(os.devnull)), new), list_ignored(new))


@main.command()
@CANDIDATE
def check(candidate: str | None) -> None:
    """Like diff, but exit 1 if the file would be refused.

    Errors that only slurmctld finds appear when it is applied.
    """
    files, new = _place_files(*_candidate(candidate))
    daemon = Slurmctld(Path(os.devnull))
    objection = objections(files, daemon, new, TRIED)
    if objection:
        raise SlurmConfigError("take this slurm.conf", objection)
    effect = assess(files, daemon, new)
    _show(effect, list_ignored(new))
    if effect.losses:
        way = f"once it is mounted, `minivm config accept {digest(new)}` takes it"
        raise SlurmConfigError("take this slurm.conf", "it would end jobs", hint=way)


@main.command()
@click.argument("hash")
def accept(hash: str) -> None:
    """Apply the mounted slurm.conf with this HASH, even if it ends jobs. Exit 0 when slurmctld runs with it."""
    pod = Pod(os.environ)
    files = SlurmFiles(pod).read_mounted()
    mounted = digest(files) if files else "none"
    if hash != mounted:
        raise SlurmConfigError(f"accept {hash}", f"the mounted files are {mounted}", hint="see `minivm config diff`")
    JUDGEMENT.unlink(missing_ok=True)
    LastGoodConfig(pod).accept(hash, time.time())
    result = _wait_for_result(time.monotonic() + WITHIN)
    click.echo(f"{result.hash}: {result.why or result.state}")
    sys.exit(0 if result.state == LIVE else 1)


def _wait_for_result(until: float) -> SavedJudgement:
    """Wait for the result about the files that are mounted now."""
    while True:
        files = SlurmFiles(Pod(os.environ)).read_mounted()
        if files is None:
            raise SlurmConfigError("look at slurm.conf", "none is mounted: the controller generated a minimal one")
        result = load_judgement()
        if result is not None and result.hash == digest(files):
            return result
        if time.monotonic() > until:
            return SavedJudgement(digest(files), PENDING, "not checked yet")
        time.sleep(PAUSE)


def _candidate(given: str | None) -> tuple[SlurmFiles, Mapping[str, bytes]]:
    """Return the installed files and those to compare with them."""
    files = SlurmFiles(Pod(os.environ))
    if given is None:
        mounted = files.read_mounted()
        if mounted is None:
            raise SlurmConfigError("look at slurm.conf", "none is mounted", hint="name a FILE, or - for standard input")
        return files, mounted
    if given != "-" and Path(given).is_dir():
        return files, _with_main(read(Path(given)), given)
    try:
        data = sys.stdin.buffer.read() if given == "-" else Path(given).read_bytes()
    except OSError as error:
        raise SlurmConfigError(f"read {given}", error.strerror or str(error)) from error
    if not data.strip():
        raise SlurmConfigError(f"read {given}", "it is empty")
    return files, _with_main(decode_given(data), given)


def _place_files(files: SlurmFiles, new: Mapping[str, bytes]) -> tuple[SlurmFiles, Mapping[str, bytes]]:
    """Return the files as they would be installed in this pod."""
    return files, place_files(files.pod, new)


def _with_main(files: Mapping[str, bytes], given: str) -> Mapping[str, bytes]:
    if MAIN not in files:
        raise SlurmConfigError(f"read {given}", f"there is no {MAIN} in it")
    return files


def _show(effect: Effect, ignored: Sequence[str]) -> None:
    for line in effect.changes or ("nothing changes",):
        click.echo(line)
    for line in ignored:
        click.echo(line)
    for line in effect.restarts:
        click.echo(f"restarts: {line}")
    for loss in effect.losses:
        click.echo(f"ends jobs: {loss}")
    if effect.changes and not effect.losses:
        click.echo("no job ends")


if __name__ == "__main__":
    main(prog_name="minivm config")
