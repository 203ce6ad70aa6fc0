"""`build.py config`: the controller's `minivm config`, for values that are not applied yet."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import click

from cluster.cli import connect, name_option
from cluster.errors import ClusterError

values_option = click.option(
    "--values",
    "values_file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Chart values as for `up`.  [default: the applied ones]",
)


@click.group()
def config() -> None:
    """Preview what a changed slurm.conf does to the running cluster, and accept one."""


@config.command()
@name_option
@values_option
def diff(name: str, values_file: Path | None) -> None:
    """Show what the values would change: lines, jobs, and daemons that restart."""
    ask("diff", name, values_file)


@config.command()
@name_option
@values_option
def check(name: str, values_file: Path | None) -> None:
    """Like diff, but exit with 1 if the controller would refuse it."""
    ask("check", name, values_file)


@config.command()
@name_option
def status(name: str) -> None:
    """Show if the applied slurm.conf is the one that runs, or why not."""
    run(name, "status")


@config.command()
@name_option
@click.argument("hash")
def accept(name: str, hash: str) -> None:
    """Take the refused slurm.conf of this HASH, whatever jobs it ends."""
    run(name, "accept", hash)


def ask(word: str, name: str, values_file: Path | None) -> None:
    from cluster import slurm_conf
    from cluster.local import LocalCluster
    from cluster.rendered.render import read_overrides

    cluster = LocalCluster.saved(connect(), name)
    if values_file is not None:
        cluster.options = replace(cluster.options, overrides=read_overrides(values_file))
    running = cluster.kubelet.running()
    controller = running.get(cluster.active_controller(running))
    if controller is None or not controller.running:
        raise ClusterError("ask the controller", "it does not run", hint="make status")
    code, text = slurm_conf.ask(cluster.kubelet, controller, word, slurm_conf.files(cluster.manifests()))
    click.echo(text, nl=False)
    sys.exit(code)


def run(name: str, *words: str) -> None:
    from cluster import slurm_conf
    from cluster.local import LocalCluster

    code, text = LocalCluster.saved(connect(), name).run_slurm(slurm_conf.CONTROLLER, ["minivm", "config", *words])
    click.echo(text, nl=False)
    sys.exit(code)
