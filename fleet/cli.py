"""The command line: fleet run | plan | status | why NAME | topology | crd | scim."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import replace
from typing import TypeVar

import click

from fleet import FleetError
from fleet.act.api_client import ApiClient, KubernetesError
from fleet.crd import definition, pool_definition
from fleet.decide.actions import object_name
from fleet.decide.decide import Decision
from fleet.decide.machines import line
from fleet.decide.topology import blocks, conf
from fleet.policy import STATE_CONDITION, Topology, read_settings
from fleet.reconciler import Reconciler
from fleet.report.events import describe_action
from fleet.report.status import LONG, WHOLE, lines, state_in_slurm, worker_report
from fleet.world.kubernetes import KubeNode, KubePod, KubernetesView, is_true, parse_pod
from fleet.world.machine import MachineObject, rfc3339
from fleet.world.pod_page import controllers
from fleet.world.slurm import SlurmView
from fleet.world.snapshot import FleetSnapshot, Unknown, Worker
from ground.errors import nearest
from init.errors import InitError


async def with_pod(name: str, snapshot: FleetSnapshot, api: ApiClient) -> FleetSnapshot:
    """Add a pod of the namespace that is not of this release: `kubectl get pods` prints its name too."""
    kubernetes = snapshot.kubernetes
    if isinstance(kubernetes, Unknown) or name in {*kubernetes.pods, *kubernetes.others, *kubernetes.nodes, *WHOLE}:
        return snapshot
    try:
        item = await api.pod(name)
    except KubernetesError:
        return snapshot
    return replace(snapshot, kubernetes=replace(kubernetes, others={**kubernetes.others, name: parse_pod(item)}))


def explain(name: str, snapshot: FleetSnapshot, decision: Decision) -> Iterator[str]:
    """Explain a name; raise FleetError with the nearest name if nothing of that name is known."""
    if isinstance(snapshot.kubernetes, Unknown):
        yield f"Kubernetes does not answer: {line(snapshot.kubernetes.why, LONG)}"
        kubernetes = KubernetesView()
    else:
        kubernetes = snapshot.kubernetes
    if isinstance(snapshot.slurm, Unknown):
        yield f"Slurm does not answer: {line(snapshot.slurm.why, LONG)}"
    workers = {worker.name: worker for worker in snapshot.shown_workers()}
    machines, pools = kubernetes.machines or {}, kubernetes.pools or {}
    stated = {notice.about for notice in decision.notices}
    names_of_objects = [*workers, *kubernetes.nodes, *kubernetes.others, *machines, *pools, *(kubernetes.sets or {})]
    unread = {key: reason for key, reason in kubernetes.unread.items() if key.partition("/")[2] == name}
    for key, reason in unread.items():
        yield f"{key} {line(reason, LONG)}: the fleet changes nothing of it until you correct it"
    if names_of_objects and name not in {*names_of_objects, *stated, *WHOLE} and not unread:
        raise FleetError(
            "explain", f"no pod, Node, machine or pool {name!r}", hint=nearest(name, [*names_of_objects, "fleet"])
        )
    names = _list_related(name, workers, machines)
    yield from _objects(name, names, kubernetes, workers, known=isinstance(snapshot.slurm, SlurmView))
    for change in decision.changes:
        if object_name(change) in names:
            yield f"would {describe_action(change)}"
    for notice in decision.notices:
        if notice.about in {*names, *WHOLE} and not (notice.about in WHOLE and notice.kind == "unknown"):
            yield describe_action(notice)


def _objects(
    name: str, names: frozenset[str], kubernetes: KubernetesView, workers: Mapping[str, Worker], *, known: bool
) -> Iterator[str]:
    yield from (_node(node) for key, node in kubernetes.nodes.items() if key in names)
    for worker in workers.values():
        if worker.name in names or worker.pod.node in names - {""}:
            yield _worker(worker, known=known)
    places = {report.pod.name: report.text() for report in controllers(kubernetes)}
    for pod in kubernetes.others.values():
        if pod.name in names or pod.node in names - {""}:
            yield _pod(pod, places.get(pod.name, ""))
    if stateful_set := (kubernetes.sets or {}).get(name):
        ready = sum(pod.ready for pod in kubernetes.pods.values() if pod.name.rpartition("-")[0] == name)
        yield f"{name}: a StatefulSet, {ready} of {stateful_set.replicas} pods ready"
    if pool := (kubernetes.pools or {}).get(name):
        for condition in pool.status.conditions:
            yield f"{name}: {condition.type} {condition.status} {line(condition.message, LONG)}".rstrip()
    for machine in (kubernetes.machines or {}).values():
        if machine.name in names or machine.status.node in names - {""}:
            yield from _machine(machine)


def _list_related(name: str, workers: Mapping[str, Worker], machines: Mapping[str, MachineObject]) -> frozenset[str]:
    """Return the name itself and the Node behind it: what holds a Node holds its worker and its machine."""
    names = {name}
    if name in machines:
        names.add(machines[name].status.node)
    if name in workers:
        names.add(workers[name].pod.node)
    return frozenset(names)


def _node(node: KubeNode) -> str:
    ready = node.conditions.get("Ready")
    state = "Ready" if is_true(ready) else "not Ready"
    if ready and not is_true(ready) and ready.since:
        state += f" since {rfc3339(int(ready.since))}"
    marks = [state, *(["cordoned"] if node.cordoned else []), *(["given up by the fleet"] if node.fenced else [])]
    # A taint may be there with several effects.
    marks += dict.fromkeys(f"tainted {taint.key}" for taint in node.taints)
    return f"Node {node.name}: {', '.join(marks)}"


def _worker(worker: Worker, *, known: bool) -> str:
    shown = worker_report(worker, known=known)
    where = f"{shown['node'] or '-'}{' cordoned' if shown['cordoned'] else ''}"
    return f"{worker.name} on {where}: {state_in_slurm(shown, known=known)}"


def _pod(pod: KubePod, place: str) -> str:
    """Describe a pod that is no worker by its state in Kubernetes, and a controller also by its place among several."""
    ready = pod.conditions.get("Ready")
    if ready is not None and ready.reason == "PodCompleted" and not pod.deleting:
        return line(f"{pod.name} on {pod.node or '-'}: has completed", LONG)
    state = "ready" if pod.ready else f"not ready {ready.reason} {ready.message}".rstrip() if ready else "not ready"
    state = "is being deleted" if pod.deleting else state
    bad = (
        f"{condition.type} {condition.status} {condition.reason} {condition.message}".rstrip()
        for condition in pod.conditions.values()
        if condition.status == "False" and condition.type not in ("Ready", "ContainersReady", STATE_CONDITION)
    )
    return line(f"{pod.name} on {pod.node or '-'}: {'; '.join([state, *filter(None, [place]), *bad])}", LONG)


def _machine(machine: MachineObject) -> Iterator[str]:
    status = machine.status
    explanation = f": {line(status.why, LONG)}" if status.why else ""
    yield f"machine {machine.name}: goal {status.goal}, {status.state}{explanation}"
    for entry in status.active_checks:
        passed = f"passed {rfc3339(entry.passed_at)}" if entry.passed_at else "never passed"
        yield line(f"{machine.name}: active check {entry.check}: {passed}; last results {entry.results}", LONG)
    for event in status.history:
        yield f"{machine.name}: {rfc3339(event.at)} {event.what} {line(event.text)}".rstrip()


T = TypeVar("T")


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Keep Kubernetes and Slurm consistent. Settings come from MINIVM_FLEET_*."""


def with_fleet(work: Callable[[Reconciler], Awaitable[T]]) -> T:
    """Run `work` with a reconciler; the only place where an error becomes a message and status 1."""

    async def run_work() -> T:
        settings = read_settings(os.environ)
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
def scim() -> None:
    """Receive users and groups from an identity provider by SCIM until SIGTERM. Settings come from MINIVM_SCIM_*."""
    from fleet.scim.server import read_settings as read_scim_settings
    from fleet.scim.server import serve

    try:
        asyncio.run(serve(read_scim_settings(os.environ)))
    except (FleetError, InitError) as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(1)


@main.command()
@click.argument("kind", type=click.Choice(["machine", "workerpool"]), default="machine")
def crd(kind: str) -> None:
    """Print the CustomResourceDefinition of `Machine` or `WorkerPool`, for `kubectl apply`."""
    click.echo(json.dumps(definition() if kind == "machine" else pool_definition(), indent=2))


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
        chosen = Topology(tiers) if tiers else fleet.policy.topology
        if isinstance(kubernetes, Unknown) or not kubernetes.pods or not (chosen.tiers or block):
            raise FleetError(
                "make a topology", kubernetes.why if isinstance(kubernetes, Unknown) else "no workers, or no labels"
            )
        return blocks(kubernetes, block, sizes) if block else conf(kubernetes, chosen)

    click.echo(with_fleet(render), nl=False)


@main.command()
def plan() -> None:
    """Print what `run` would do now. Changes nothing."""
    show(with_fleet(lambda fleet: fleet.plan()))


def show(decision: Decision) -> None:
    for change in decision.changes:
        click.echo(f"would {describe_action(change)}")
    for notice in decision.notices:
        click.echo(describe_action(notice))
    if not decision.changes and not decision.notices:
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

    async def look(fleet: Reconciler) -> tuple[FleetSnapshot, Decision]:
        snapshot, decision = await fleet.look_and_plan()
        return await with_pod(name, snapshot, fleet.api), decision

    snapshot, decision = with_fleet(look)
    try:
        text = list(explain(name, snapshot, decision))
    except FleetError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(1)
    click.echo("\n".join(text))
