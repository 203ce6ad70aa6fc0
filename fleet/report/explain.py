"""Explain one name: every pod, Node, machine and pool that `kubectl get` prints for the cluster."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from fleet.decide.actions import about
from fleet.decide.decide import Decision
from fleet.decide.machines import line
from fleet.errors import FleetError
from fleet.policy import STATE
from fleet.report.messages import in_words
from fleet.report.status import in_slurm, worker_
from fleet.world.kubernetes import Kubernetes, Node, Pod
from fleet.world.machine import Machine, rfc3339
from fleet.world.slurm import Slurm
from fleet.world.snapshot import Snapshot, Unknown, Worker
from ground.errors import nearest

WHOLE = ("fleet", "Slurm", "Kubernetes")


def explain(name: str, snapshot: Snapshot, decision: Decision) -> Iterator[str]:
    """Explain a name; raise FleetError with the nearest name if nothing of that name is known."""
    if isinstance(snapshot.kubernetes, Unknown):
        yield f"Kubernetes does not answer: {line(snapshot.kubernetes.why, 1024)}"
        here = Kubernetes()
    else:
        here = snapshot.kubernetes
    if isinstance(snapshot.slurm, Unknown):
        yield f"Slurm does not answer: {line(snapshot.slurm.why, 1024)}"
    workers = {worker.name: worker for worker in snapshot.shown_workers()}
    machines, pools = here.machines or {}, here.pools or {}
    stated = {stand.about for stand in decision.stands}
    known = [*workers, *here.nodes, *here.others, *machines, *pools, *(here.sets or {})]
    if known and name not in {*known, *stated, *WHOLE}:
        raise FleetError("explain", f"no pod, Node, machine or pool {name!r}", hint=nearest(name, [*known, "fleet"]))
    names = _related(name, workers, machines)
    yield from _objects(name, names, here, workers, known=isinstance(snapshot.slurm, Slurm))
    for change in decision.changes:
        if about(change) in names:
            yield f"would {in_words(change)}"
    for notice in decision.stands:
        if notice.about in {*names, *WHOLE} and not (notice.about in WHOLE and notice.kind == "unknown"):
            yield in_words(notice)


def _objects(
    name: str, names: frozenset[str], here: Kubernetes, workers: Mapping[str, Worker], *, known: bool
) -> Iterator[str]:
    yield from (_node(node) for key, node in here.nodes.items() if key in names)
    for worker in workers.values():
        if worker.name in names or worker.pod.node in names - {""}:
            yield _worker(worker, known=known)
    for pod in here.others.values():
        if pod.name in names or pod.node in names - {""}:
            yield _pod(pod)
    if pool := (here.pools or {}).get(name):
        for condition in pool.status.conditions:
            yield f"{name}: {condition.type} {condition.status} {line(condition.message, 1024)}".rstrip()
    for machine in (here.machines or {}).values():
        if machine.name in names or machine.status.node in names - {""}:
            yield from _machine(machine)


def _related(name: str, workers: Mapping[str, Worker], machines: Mapping[str, Machine]) -> frozenset[str]:
    """Return the name itself and the Node behind it: what holds a Node holds its worker and its machine."""
    found = {name}
    if name in machines:
        found.add(machines[name].status.node)
    if name in workers:
        found.add(workers[name].pod.node)
    return frozenset(found)


def _node(node: Node) -> str:
    ready = node.conditions.get("Ready")
    state = "Ready" if ready and ready.status == "True" else "not Ready"
    if ready and ready.status != "True" and ready.since:
        state += f" since {rfc3339(int(ready.since))}"
    marks = [state, *(["cordoned"] if node.cordoned else []), *(["given up by the fleet"] if node.fenced else [])]
    marks += [f"tainted {taint.key}" for taint in node.taints]
    return f"Node {node.name}: {', '.join(marks)}"


def _worker(worker: Worker, *, known: bool) -> str:
    shown = worker_(worker, known=known)
    where = f"{shown['node'] or '-'}{' cordoned' if shown['cordoned'] else ''}"
    return f"{worker.name} on {where}: {in_slurm(shown, known=known)}"


def _pod(pod: Pod) -> str:
    """Return a pod that is no worker: what Kubernetes says of it, the controller's and the logins' among them."""
    ready = pod.conditions.get("Ready")
    state = "ready" if pod.ready else f"not ready {ready.reason} {ready.message}".rstrip() if ready else "not ready"
    state = "is being deleted" if pod.deleting else state
    bad = (
        f"{condition.type} {condition.status} {condition.reason} {condition.message}".rstrip()
        for condition in pod.conditions.values()
        if condition.status == "False" and condition.type not in ("Ready", "ContainersReady", STATE)
    )
    return line(f"{pod.name} on {pod.node or '-'}: {'; '.join([state, *bad])}", 1024)


def _machine(machine: Machine) -> Iterator[str]:
    status = machine.status
    why = f": {line(status.why, 1024)}" if status.why else ""
    yield f"machine {machine.name}: goal {status.goal}, {status.state}{why}"
    for event in status.history:
        yield f"{machine.name}: {rfc3339(event.at)} {event.what} {line(event.text)}".rstrip()
