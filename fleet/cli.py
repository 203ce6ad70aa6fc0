"""The command line: fleet run | plan | status | why NAME | topology | crd."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from typing import TypeVar

import click

from fleet import crd_pools
from fleet.act.api_client import ApiClient
from fleet.crd import definition
from fleet.decide.decide import Decision
from fleet.decide.topology import blocks, conf
from fleet.errors import FleetError
from fleet.policy import Topology
from fleet.reconciler import Reconciler
from fleet.report.explain import explain
from fleet.report.messages import in_words
from fleet.report.status import lines
from fleet.settings import from_environment
from fleet.world.snapshot import Unknown
from init.errors import InitError

T = TypeVar("T")


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Keep Kubernetes and Slurm consistent. Settings come from MINIVM_FLEET_*."""


def with_fleet(work: Callable[[Reconciler], Awaitable[T]]) -> T:
    """Run `work` with a reconciler; the only place where an error becomes a message and status 1."""

    async def run_work() -> T:
        settings = from_environment(os.environ)
        api = await ApiClient.open(settings.namespace, settings.release)
        try:
            return await work(Reconciler(settings, api, click.echo))
        finally:
            await api.close()

    try:
        return asyncio.run(run_work())
    except (FleetError, InitError) as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(1)


@main.command()
def run() -> None:
    """Run the reconcile loop until SIGTERM."""

    async def until_stopped(fleet: Reconciler) -> None:
        # PID 1 of a pod ignores SIGTERM without a handler.
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, fleet.stop.set)
        await fleet.run()

    with_fleet(until_stopped)


@main.command()
@click.argument("kind", type=click.Choice(["machine", "workerpool"]), default="machine")
def crd(kind: str) -> None:
    """Print the CustomResourceDefinition of `Machine` or `WorkerPool`, for `kubectl apply`."""
    click.echo(json.dumps(definition() if kind == "machine" else crd_pools.definition(), indent=2))


@main.command()
@click.option("--tier", "tiers", multiple=True, help="A label of Nodes, from the root on; without it the policy's.")
@click.option(
    "--block", default="", help="A label of Nodes with a domain, such as NVLink's: print blocks instead of a tree."
)
@click.option(
    "--size",
    "sizes",
    multiple=True,
    type=click.IntRange(1),
    help="The sizes of blocks; without it the smallest block's.",
)
def topology(tiers: tuple[str, ...], block: str, sizes: tuple[int, ...]) -> None:
    """Print the labels of the workers' Nodes as a topology.conf, for Slurm before 25.05. Changes nothing."""

    async def render(fleet: Reconciler) -> str:
        kubernetes = (await fleet.look()).kubernetes
        wanted = Topology(tiers) if tiers else fleet.policy.topology
        if isinstance(kubernetes, Unknown) or not kubernetes.pods or not (wanted.tiers or block):
            raise FleetError(
                "make a topology", kubernetes.why if isinstance(kubernetes, Unknown) else "no workers, or no labels"
            )
        return blocks(kubernetes, block, sizes) if block else conf(kubernetes, wanted)

    click.echo(with_fleet(render), nl=False)


@main.command()
def plan() -> None:
    """Print what `run` would do now. Changes nothing."""
    show(with_fleet(lambda fleet: fleet.plan()))


def show(decision: Decision) -> None:
    for change in decision.changes:
        click.echo(f"would {in_words(change)}")
    for notice in decision.stands:
        click.echo(in_words(notice))
    if not decision.changes and not decision.stands:
        click.echo("nothing to do")


@main.command()
@click.option(
    "--output", type=click.Choice(["text", "json"]), default="text", help="Text for people, or JSON for programs."
)
def status(output: str) -> None:
    """Print workers by pool, machines, notices, proposals and budgets."""
    data = with_fleet(lambda fleet: fleet.report())
    for text in lines(data) if output == "text" else [json.dumps(data, indent=2)]:
        click.echo(text)


@main.command()
@click.argument("name")
def why(name: str) -> None:
    """Explain a worker, pod, Node, machine, pool or the whole fleet: its state, what holds it, what would be done."""
    snapshot, decision = with_fleet(lambda fleet: fleet.look_and_plan())
    try:
        text = list(explain(name, snapshot, decision))
    except FleetError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(1)
    click.echo("\n".join(text))
