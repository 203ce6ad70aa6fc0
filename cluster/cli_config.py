"""`build.py config`: `minivm config` of the controller, asked about values that are not applied yet."""

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
    help="Chart values on top, as `up` would take them.  [default: those that are there]",
)


@click.group()
def config() -> None:
    """What a changed slurm.conf would do to the running cluster, and the word that one may do it."""


@config.command()
@name_option
@values_option
def diff(name: str, values_file: Path | None) -> None:
    """What the values would change: lines, jobs, and who has to start anew."""
    ask("diff", name, values_file)


@config.command()
@name_option
@values_option
def check(name: str, values_file: Path | None) -> None:
    """As diff, and exit code 1 where the controller would refuse it."""
    ask("check", name, values_file)


@config.command()
@name_option
def status(name: str) -> None:
    """Whether the slurm.conf that is there is the one that runs, or why not."""
    run(name, "status")


@config.command()
@name_option
@click.argument("hash")
def accept(name: str, hash: str) -> None:
    """Take the slurm.conf of this HASH, which was refused, whatever jobs it ends."""
    run(name, "accept", hash)


def ask(word: str, name: str, values_file: Path | None) -> None:
    from cluster import slurm_conf
    from cluster.local import LocalCluster
    from cluster.rendered.render import read_overrides

    cluster = LocalCluster.saved(connect(), name)
    if values_file is not None:
        cluster.options = replace(cluster.options, overrides=read_overrides(values_file))
    there = cluster.kubelet.running().get(slurm_conf.CONTROLLER)
    if there is None or not there.running:
        raise ClusterError("ask the controller", "it does not run", hint="make status")
    code, text = slurm_conf.ask(cluster.kubelet, there, word, slurm_conf.files(cluster.manifests()))
    click.echo(text, nl=False)
    sys.exit(code)


def run(name: str, *words: str) -> None:
    from cluster import slurm_conf
    from cluster.local import LocalCluster

    code, text = LocalCluster.saved(connect(), name).exec(slurm_conf.CONTROLLER, ["minivm", "config", *words])
    click.echo(text, nl=False)
    sys.exit(code)
