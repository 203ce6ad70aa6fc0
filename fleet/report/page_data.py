"""The data of the page: each machine with its state and what holds it, and all details of one machine.

Text from users and Kubernetes becomes one short printable line, and every list is bounded. Jobs appear as numbers only:
the operator asks as Slurm's own user, and Slurm may hide names and owners from the reader.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from fleet.decide.actions import about
from fleet.decide.decide import Decision
from fleet.decide.machines import line
from fleet.policy import Policy
from fleet.report.messages import in_words
from fleet.report.status import Report, budgets, pools, unknown, worker_
from fleet.world.kubernetes import Kubernetes, Node
from fleet.world.machine import Machine, MachineStatus, machine_status_json
from fleet.world.slurm import Slurm
from fleet.world.snapshot import Snapshot, Unknown, Worker

# Labels of a Node with its location, the nearest first.
RACKS = ("topology.kubernetes.io/rack", "network.topology.nvidia.com/leaf", "topology.kubernetes.io/zone")
CELLS, SAID = 20_000, 200
SHORT, LONG = 200, 1024
# The kinds of notices that propose something.
PROPOSED = frozenset({"propose", "dead"})
WHOLE = frozenset({"fleet", "Slurm", "Kubernetes"})
Jobs = Mapping[str, tuple[str, ...]]


def picture(snapshot: Snapshot, decision: Decision, policy: Policy, now: float) -> Report:
    here = None if isinstance(snapshot.kubernetes, Unknown) else snapshot.kubernetes
    workers = list(snapshot.shown_workers())
    answers, missing = isinstance(snapshot.slurm, Slurm), unknown(snapshot)
    # Notices about the whole fleet come first, so that the limit does not cut them.
    first = sorted(decision.stands, key=lambda notice: notice.about not in WHOLE)
    stands = [(notice.about, notice.kind, line(notice.text, LONG)) for notice in first]
    proposals = [_notice(*stand) for stand in stands if stand[1] in PROPOSED]
    holds = [_notice(*stand) for stand in stands if stand[1] not in PROPOSED]
    cells = list(_cells(here, workers, {about: kind for about, kind, _ in stands}, answers)) if here else []
    return {
        "unknown": [f"{side.capitalize()} does not answer: {gone['why'][:SHORT]}" for side, gone in missing.items()],
        # When slurmctld answered last, where it does not answer now and this process has seen an answer.
        "slurmAt": int(snapshot.last_at) if not answers and snapshot.last is not None else None,
        "cells": cells[:CELLS],
        "pools": pools(workers, snapshot, policy),
        "budgets": budgets(workers, snapshot, policy, now),
        "due": [line(in_words(change), SHORT) for change in decision.changes[:SAID]],
        "holds": holds[:SAID],
        "proposals": proposals[:SAID],
        # The full numbers, beyond the limits.
        "all": {
            "cells": len(cells),
            "due": len(decision.changes),
            "holds": len(holds),
            "proposals": len(proposals),
        },
    }


def _notice(about: str, kind: str, text: str) -> Report:
    return {"about": about, "kind": kind, "text": text}


def _cells(here: Kubernetes, workers: list[Worker], kinds: Mapping[str, str], answers: bool) -> Iterator[Report]:
    """Yield one cell for each worker, and one for each machine without a worker.

    Empty fields are left out: a page of 5,000 cells is sent every few seconds.
    """
    machines = here.machines or {}
    at = _by_node(machines)
    for worker in workers:
        machine = at.get(worker.node.uid if worker.node else "")
        kind = kinds.get(worker.name) or kinds.get(worker.pod.node)
        yield _without_empty(
            name=worker.name,
            pool=line(worker.pod.pool, SHORT),
            rack=rack(worker.node),
            node=worker.pod.node,
            state=state(worker, known=answers),
            reason=reason(worker, known=answers),
            cordoned=bool(worker.node and worker.node.cordoned),
            goal=machine.status.goal if machine and machine.status.goal != "up" else "",
            told="proposal" if kind in PROPOSED else "hold" if kind else "",
        )
    taken = {worker.node.uid for worker in workers if worker.node}
    for name, machine in sorted(machines.items()):
        if machine.status.node_uid not in taken:
            status = machine.status
            yield _without_empty(
                name=name,
                rack=rack(here.nodes.get(status.node)),
                node=status.node,
                state=_without_worker(status, here),
                reason=line(status.why or status.verdict, SHORT),
                goal=status.goal if status.goal != "up" else "",
            )


def _without_empty(**values: object) -> Report:
    return {key: value for key, value in values.items() if value}


def _by_node(machines: Mapping[str, Machine]) -> Mapping[str, Machine]:
    return {machine.status.node_uid: machine for machine in machines.values() if machine.status.node_uid}


def _is_held(worker: Worker) -> bool:
    return worker.slurm is not None and (worker.slurm.drained or worker.slurm.down)


def _without_worker(status: MachineStatus, here: Kubernetes) -> str:
    """Return the state of a machine without a worker; its object may still have the state from before."""
    node = here.nodes.get(status.node)
    if node is not None and node.fenced:
        return "GivenUp"
    return status.state if status.state in ("NoWorker", "GivenUp", "Absent") else "NoWorker"


def state(worker: Worker, *, known: bool = True) -> str:
    """Return the state that the pod's condition shows, and whether the worker has jobs."""
    shown = str(worker_(worker, known=known)["state"])
    return "Busy" if shown == "TakesJobs" and worker.slurm and worker.slurm.record.busy else shown


def reason(worker: Worker, *, known: bool) -> str:
    """Why the worker takes no jobs; of one that takes jobs Slurm may keep an old reason."""
    if worker.slurm is not None:
        return line(worker.slurm.reason, SHORT) if _is_held(worker) else ""
    return line(str(worker_(worker, known=known)["reason"]), SHORT)


def rack(node: Node | None) -> str:
    return line(next((node.labels[key] for key in RACKS if node.labels.get(key)), ""), SHORT) if node else ""


def detail(name: str, snapshot: Snapshot, decision: Decision, jobs: Jobs | None) -> Report | None:
    """Everything known about one cell; None: there is no cell of that name. `jobs`: by node; None: not known."""
    here = snapshot.kubernetes
    if isinstance(here, Unknown):
        return None
    machines = here.machines or {}
    answers = isinstance(snapshot.slurm, Slurm)
    worker = next((each for each in snapshot.shown_workers() if each.name == name), None)
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
        found |= worker_(worker, known=answers) | {"state": state(worker, known=answers), "leaves": worker.pod.deleting}
        found |= {"jobs": None if holding is None else list(holding[:SAID]), "jobsInAll": len(holding or ())}
    elif machine is not None:
        found["state"] = _without_worker(machine.status, here)
    if node is not None:
        found["signs"] = [
            {
                "type": line(key, SHORT),
                "status": line(condition.status, SHORT),
                "text": line(condition.message or condition.reason, LONG),
            }
            for key, condition in sorted(node.conditions.items())[:SAID]
        ]
    if machine is not None:
        found["machine"] = {"name": machine.name, **_short(machine_status_json(machine.status))}
    found["stands"] = [
        _notice(notice.about, notice.kind, line(notice.text, LONG))
        for notice in decision.stands
        if notice.about in names
    ]
    found["due"] = [line(in_words(change), SHORT) for change in decision.changes if about(change) in names]
    return found


def _short(value: Any) -> Any:
    if isinstance(value, str):
        return line(value, LONG)
    if isinstance(value, dict):
        return {key: _short(item) for key, item in value.items()}
    return [_short(item) for item in value[:SAID]] if isinstance(value, list) else value
