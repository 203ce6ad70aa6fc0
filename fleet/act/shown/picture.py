"""What people see of the fleet: each machine with its state and what holds it; and of one of them all that is known.

What others have written is in it one printable line, and short, and of everything there is only so much. Jobs are their
numbers: whose they are and what they are called the fleet knows as Slurm's own user, and Slurm may keep it from others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from fleet.act.shown.report import Report, budgets, pools, worker_
from fleet.act.shown.words import in_words
from fleet.decide.actions import about
from fleet.decide.decide import Decision
from fleet.decide.machines import line
from fleet.policy import Policy
from fleet.world.kubernetes import Kubernetes, Node
from fleet.world.machine import Machine, written
from fleet.world.world import Unknown, Worker, World

# Labels of a Node that say where it stands, the nearest first.
RACKS = ("topology.kubernetes.io/rack", "network.topology.nvidia.com/leaf", "topology.kubernetes.io/zone")
CELLS, SAID = 20_000, 200
SHORT, LONG = 200, 1024
# What is proposed to people, of all that is told.
PROPOSED = frozenset({"propose", "dead"})
WHOLE = frozenset({"fleet", "Slurm", "Kubernetes"})
Jobs = Mapping[str, tuple[str, ...]]


def picture(world: World, decision: Decision, policy: Policy, now: float) -> Report:
    here = None if isinstance(world.kubernetes, Unknown) else world.kubernetes
    workers = list(world.workers())
    # What is told of the whole comes first, and is not what is left out.
    first = sorted(decision.stands, key=lambda one: one.about not in WHOLE)
    stands = [(one.about, one.kind, line(one.text, LONG)) for one in first]
    proposals = [_told(*one) for one in stands if one[1] in PROPOSED]
    holds = [_told(*one) for one in stands if one[1] not in PROPOSED]
    cells = list(_cells(here, workers, {about: kind for about, kind, _ in stands})) if here else []
    return {
        "unknown": [line(one.why, SHORT) for one in (world.kubernetes, world.slurm) if isinstance(one, Unknown)],
        "cells": cells[:CELLS],
        "pools": pools(workers, world.kubernetes, policy),
        "budgets": budgets(workers, world, policy, now),
        "due": [line(in_words(one), SHORT) for one in decision.changes[:SAID]],
        "holds": holds[:SAID],
        "proposals": proposals[:SAID],
        # How many there are, also of those that are not among them.
        "all": {
            "cells": len(cells),
            "due": len(decision.changes),
            "holds": len(holds),
            "proposals": len(proposals),
        },
    }


def _told(about: str, kind: str, text: str) -> Report:
    return {"about": about, "kind": kind, "text": text}


def _cells(here: Kubernetes, workers: list[Worker], told: Mapping[str, str]) -> Iterator[Report]:
    """What says nothing is left out: five thousand of them are sent again and again."""
    machines = here.machines or {}
    at = _by_node(machines)
    for worker in workers:
        machine = at.get(worker.node.uid if worker.node else "")
        kind = told.get(worker.name) or told.get(worker.pod.node)
        yield _said(
            name=worker.name,
            pool=line(worker.pod.pool, SHORT),
            rack=rack(worker.node),
            node=worker.pod.node,
            state=state(worker),
            reason=line(worker.slurm.reason, SHORT) if worker.slurm and _is_held(worker) else "",
            cordoned=bool(worker.node and worker.node.cordoned),
            goal=machine.status.goal if machine and machine.status.goal != "up" else "",
            told="proposal" if kind in PROPOSED else "hold" if kind else "",
        )
    taken = {worker.node.uid for worker in workers if worker.node}
    for name, machine in sorted(machines.items()):
        if machine.status.node_uid not in taken:
            status = machine.status
            yield _said(
                name=name,
                rack=rack(here.nodes.get(status.node)),
                node=status.node,
                state=status.state if status.state in ("NoWorker", "Absent") else "NoWorker",
                reason=line(status.why or status.verdict, SHORT),
                goal=status.goal if status.goal != "up" else "",
            )


def _said(**values: object) -> Report:
    return {key: value for key, value in values.items() if value}


def _by_node(machines: Mapping[str, Machine]) -> Mapping[str, Machine]:
    return {one.status.node_uid: one for one in machines.values() if one.status.node_uid}


def _is_held(worker: Worker) -> bool:
    return worker.slurm is not None and (worker.slurm.drained or worker.slurm.down)


def state(worker: Worker) -> str:
    """As the pod's condition says it, and whether it has jobs."""
    said = str(worker_(worker)["state"])
    return "Busy" if said == "TakesJobs" and worker.slurm and worker.slurm.record.busy else said


def rack(node: Node | None) -> str:
    return line(next((node.labels[key] for key in RACKS if node.labels.get(key)), ""), SHORT) if node else ""


def detail(name: str, world: World, decision: Decision, jobs: Jobs | None) -> Report | None:
    """Of one cell; None: there is none of that name. `jobs`: by node; None: not known."""
    here = world.kubernetes
    if isinstance(here, Unknown):
        return None
    machines = here.machines or {}
    worker = next((one for one in world.workers() if one.name == name), None)
    if worker is None and name not in machines:
        return None
    if worker is not None:
        node = worker.node
        machine = _by_node(machines).get(node.uid if node else "")
    else:
        machine = machines[name]
        node = here.nodes.get(machine.status.node)
    names = {name, *([node.name] if node else []), *([machine.name] if machine else [])}
    found: dict[str, Any] = {"name": name, "rack": rack(node)}
    if worker is not None:
        holding = None if jobs is None else jobs.get(name, ())
        found |= worker_(worker) | {"state": state(worker), "ready": worker.pod.ready, "leaves": worker.pod.deleting}
        found |= {"jobs": None if holding is None else list(holding[:SAID]), "jobsInAll": len(holding or ())}
    if node is not None:
        found["signs"] = [
            {"type": line(key, SHORT), "status": line(one.status, SHORT), "text": line(one.message or one.reason, LONG)}
            for key, one in sorted(node.conditions.items())[:SAID]
        ]
    if machine is not None:
        found["machine"] = {"name": machine.name, **_short(written(machine.status))}
    found["stands"] = [
        _told(one.about, one.kind, line(one.text, LONG)) for one in decision.stands if one.about in names
    ]
    found["due"] = [line(in_words(one), SHORT) for one in decision.changes if about(one) in names]
    return found


def _short(value: Any) -> Any:
    if isinstance(value, str):
        return line(value, LONG)
    if isinstance(value, dict):
        return {key: _short(one) for key, one in value.items()}
    return [_short(one) for one in value[:SAID]] if isinstance(value, list) else value
