"""The command line: fleet run | plan | status | why NAME."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from typing import TypeVar

import click

from fleet.act.kubernetes import Api
from fleet.act.run import Fleet
from fleet.act.words import in_words
from fleet.decide.decide import Decision
from fleet.errors import FleetError
from fleet.settings import from_environment
from fleet.world.world import World
from ground.errors import nearest
from init.errors import InitError

T = TypeVar("T")


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Kubernetes and Slurm kept in one mind. Settings come from MINIVM_FLEET_*."""


def with_fleet(work: Callable[[Fleet], Awaitable[T]]) -> T:
    """The one place where an error that somebody else must mend becomes a sentence and status 1."""

    async def whole() -> T:
        settings = from_environment(os.environ)
        api = await Api.open(settings.namespace, settings.release)
        try:
            return await work(Fleet(settings, api, lambda text: click.echo(text)))
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

    async def until_told(fleet: Fleet) -> None:
        # As PID 1 of its pod it would otherwise not be ended by it.
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, fleet.stop.set)
        await fleet.run()

    with_fleet(until_told)


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
def status() -> None:
    """One line a worker: where it is, and what both sides say of it."""
    for name, node, slurm in rows(with_fleet(lambda fleet: fleet.look())):
        click.echo(f"{name:24} {node:24} {slurm}")


def rows(world: World) -> list[tuple[str, str, str]]:
    found = []
    for worker in world.workers():
        node = worker.node
        where = f"{worker.pod.node or '-'}{' cordoned' if node and node.cordoned else ''}"
        known = worker.slurm
        said = f"{known.record.state} {known.reason}".rstrip() if known else "not in Slurm"
        found.append((worker.name, where, said))
    return found


@main.command()
@click.argument("name")
def why(name: str) -> None:
    """What holds a worker, a Node or the whole fleet, and what would be done about it."""

    async def both(fleet: Fleet) -> tuple[World, Decision]:
        return await fleet.look(), await fleet.plan()

    world, decision = with_fleet(both)
    here = {worker.name: worker for worker in world.workers()}
    names = {name, here[name].pod.node} if name in here else {name}
    nodes = {worker.pod.node for worker in here.values()}
    if here and name not in here and name not in nodes and name != "fleet":
        click.echo(f"error: no worker or Node {name!r} ({nearest(name, [*here, *nodes])})", err=True)
        sys.exit(1)
    for found, where, said in rows(world):
        if found in names or here[found].pod.node == name:
            click.echo(f"{found} on {where}: {said}")
    for change in decision.changes:
        if about(change) in names:
            click.echo(f"would {in_words(change)}")
    for one in decision.stands:
        if one.about in {*names, "fleet", "Slurm", "Kubernetes"}:
            click.echo(in_words(one))


def about(change: object) -> str:
    return str(getattr(change, "name", "") or getattr(change, "pod", "") or getattr(change, "node", ""))
