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
    """Kubernetes and Slurm kept in one mind. Settings come from MINIVM_FLEET_*."""


def with_fleet(work: Callable[[Reconciler], Awaitable[T]]) -> T:
    """The one place where an error that somebody else must mend becomes a sentence and status 1."""

    async def whole() -> T:
        settings = from_environment(os.environ)
        api = await ApiClient.open(settings.namespace, settings.release)
        try:
            return await work(Reconciler(settings, api, lambda text: click.echo(text)))
        finally:
            await api.close()

    try:
        return asyncio.run(whole())
    except (FleetError, InitError) as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(1)


@main.command()
def run() -> None:
    """Keep them so, until told to stop."""

    async def until_told(fleet: Reconciler) -> None:
        # As PID 1 of its pod it would otherwise not be ended by it.
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, fleet.stop.set)
        await fleet.run()

    with_fleet(until_told)


@main.command()
@click.argument("kind", type=click.Choice(["machine", "workerpool"]), default="machine")
def crd(kind: str) -> None:
    """The definition of the kind `Machine`, or of `WorkerPool`, for `kubectl apply`."""
    click.echo(json.dumps(definition() if kind == "machine" else crd_pools.definition(), indent=2))


@main.command()
@click.option("--tier", "tiers", multiple=True, help="A label of Nodes, from the root on. None: the policy's.")
@click.option("--block", default="", help="A label of Nodes that names a domain, as of NVLink: blocks, and no tree.")
@click.option("--size", "sizes", multiple=True, type=click.IntRange(1), help="Of blocks; none: the smallest one's.")
def topology(tiers: tuple[str, ...], block: str, sizes: tuple[int, ...]) -> None:
    """The labels of the workers' Nodes as a topology.conf, for a Slurm before 25.05. Touches nothing."""

    async def made(fleet: Reconciler) -> str:
        here = (await fleet.look()).kubernetes
        wanted = Topology(tiers) if tiers else fleet.policy.topology
        if isinstance(here, Unknown) or not here.pods or not (wanted.tiers or block):
            raise FleetError("make a topology", here.why if isinstance(here, Unknown) else "no workers, or no labels")
        return blocks(here, block, sizes) if block else conf(here, wanted)

    click.echo(with_fleet(made), nl=False)


@main.command()
def plan() -> None:
    """What `run` would do now. Touches nothing."""
    show(with_fleet(lambda fleet: fleet.plan()))


def show(decision: Decision) -> None:
    for change in decision.changes:
        click.echo(f"would {in_words(change)}")
    for one in decision.stands:
        click.echo(in_words(one))
    if not decision.changes and not decision.stands:
        click.echo("nothing to do")


@main.command()
@click.option("--output", type=click.Choice(["text", "json"]), default="text", help="For people or for programs.")
def status(output: str) -> None:
    """How it stands: workers by pool, machines, what is held and proposed, budgets."""
    said = with_fleet(lambda fleet: fleet.report())
    for text in lines(said) if output == "text" else [json.dumps(said, indent=2)]:
        click.echo(text)


@main.command()
@click.argument("name")
def why(name: str) -> None:
    """Explain a worker, pod, Node, machine, pool or the whole fleet: its state, what holds it, what would be done."""
    world, decision = with_fleet(lambda fleet: fleet.seen_and_planned())
    try:
        text = list(explain(name, world, decision))
    except FleetError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(1)
    click.echo("\n".join(text))
