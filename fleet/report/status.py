"""Data of `fleet status` and of the page: workers by pool, machines, what holds them, proposals, budgets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from fleet.decide.actions import Notice, object_name
from fleet.decide.causes import find_causes
from fleet.decide.conditions import UNKNOWN, condition
from fleet.decide.decide import Decision
from fleet.decide.drain import count_budget, find_away
from fleet.decide.machines import line
from fleet.decide.remediation import in_treatment
from fleet.policy import STATE_CONDITION, Policy
from fleet.report.events import describe_action
from fleet.world.kubernetes import KubeNode, KubernetesView
from fleet.world.machine import MachineObject, MachineStatus, machine_status_json
from fleet.world.pod_page import ControllerPod, controllers
from fleet.world.slurm import SlurmView
from fleet.world.snapshot import FleetSnapshot, Unknown, Worker
from ground.errors import counted

Report = dict[str, Any]
# Letters of a text in a cell or a list of the page, and of any other text.
SHORT, LONG = 200, 1024
# The kinds of notices that propose something.
PROPOSED = frozenset({"propose", "dead"})
# The subjects of notices that concern everything.
WHOLE = frozenset({"fleet", "Slurm", "Kubernetes"})


def report(snapshot: FleetSnapshot, decision: Decision, policy: Policy, now: float) -> Report:
    kubernetes, answers = snapshot.kubernetes, isinstance(snapshot.slurm, SlurmView)
    machines = {} if isinstance(kubernetes, Unknown) else kubernetes.machines or {}
    workers = list(snapshot.shown_workers())
    return {
        "known": {"kubernetes": not isinstance(kubernetes, Unknown), "slurm": answers},
        "unknown": unknown(snapshot),
        "workers": [worker_report(worker, known=answers) for worker in workers],
        "machines": [
            {"name": name, **machine_status_json(machine.status)} for name, machine in sorted(machines.items())
        ],
        **_summary(workers, snapshot, decision, policy, now),
    }


def _summary(workers: list[Worker], snapshot: FleetSnapshot, decision: Decision, policy: Policy, now: float) -> Report:
    """Report what command and page have in common. Notices about the whole fleet come first."""
    kubernetes = snapshot.kubernetes
    known_controllers = [] if isinstance(kubernetes, Unknown) else controllers(kubernetes)
    notices = sorted(decision.notices, key=lambda notice: notice.about not in WHOLE)
    return {
        "controllers": [controller_report(controller) for controller in known_controllers],
        "pools": pools(workers, snapshot, policy),
        "budgets": budgets(workers, snapshot, policy, now),
        "holds": [_notice(notice) for notice in notices if notice.kind not in PROPOSED],
        "proposals": [_notice(notice) for notice in notices if notice.kind in PROPOSED],
    }


def unknown(snapshot: FleetSnapshot) -> Report:
    """Return why a side is unknown; for Slurm also the time of the last answer that this process received."""
    sides = (("kubernetes", snapshot.kubernetes), ("slurm", snapshot.slurm))
    reasons: Report = {name: {"why": line(side.why, LONG)} for name, side in sides if isinstance(side, Unknown)}
    if "slurm" in reasons and snapshot.last is not None:
        reasons["slurm"]["since"] = int(snapshot.last_at)
    return reasons


def _notice(notice: Notice) -> Report:
    return {"about": notice.about, "kind": notice.kind, "text": line(notice.text, LONG)}


def worker_report(worker: Worker, *, known: bool = True) -> Report:
    """Report one worker. `known`: slurmctld answers; otherwise the pod's condition has the last known state."""
    node, slurm, shown = worker.node, worker.slurm, worker.pod.conditions.get(STATE_CONDITION)
    state, reason = "Unregistered", ""
    if slurm is not None:
        state, reason = condition(slurm).reason, slurm.reason
    elif not known:
        state, reason = (shown.reason, shown.message) if shown else (UNKNOWN, "")
    return {
        "name": worker.name,
        "pool": worker.pod.pool,
        "node": worker.pod.node,
        "ready": worker.pod.ready,
        "cordoned": bool(node and node.cordoned),
        "state": state,
        "slurm": slurm.record.state if slurm else "",
        "reason": line(reason, LONG),
    }


def controller_report(controller: ControllerPod) -> Report:
    """Report one controller; the acting one also with how and when it took over."""
    pod, takeover = controller.pod, controller.takeover
    shown: Report = {
        "name": pod.name,
        "node": pod.node,
        "ready": pod.ready,
        "role": controller.role,
        "term": controller.term,
        "text": line(controller.text(), LONG),
    }
    if takeover is not None:
        last = {"how": takeover.how, "former": line(takeover.former, 253), "seconds": takeover.seconds}
        shown["takeover"] = last | {"at": takeover.at}
    return shown


def pools(workers: list[Worker], snapshot: FleetSnapshot, policy: Policy) -> Report:
    kubernetes, answers = snapshot.kubernetes, isinstance(snapshot.slurm, SlurmView)
    pool_of = (
        {} if isinstance(kubernetes, Unknown) else {pool.label: pool for pool in (kubernetes.pools or {}).values()}
    )
    own = {label: pool.max_unavailable for label, pool in pool_of.items()}
    gone = find_away(workers)
    report_of: Report = {}
    for name in sorted(
        {worker.pod.pool for worker in workers} | {name for name, pool in pool_of.items() if pool.elastic}
    ):
        members = [worker for worker in workers if worker.pod.pool == name]
        states = Counter(worker_report(worker, known=answers)["state"] for worker in members)
        report_of[name] = {
            "workers": len(members),
            "states": dict(sorted(states.items())),
            "away": len(gone.get(name, ())),
            "mayBeAway": own.get(name, policy.away),
        }
        if name in pool_of and (elastic := pool_of[name].elastic):
            report_of[name] |= {"wanted": pool_of[name].status.wanted, "min": elastic.minimum, "max": elastic.maximum}
    return report_of


def budgets(workers: list[Worker], snapshot: FleetSnapshot, policy: Policy, now: float) -> Report:
    kubernetes = snapshot.kubernetes
    machines = {} if isinstance(kubernetes, Unknown) else kubernetes.machines or {}
    unwell = count_budget(
        {worker.name: (worker.slurm, find_causes(worker, policy, now)) for worker in workers if worker.node}, policy
    )
    treated = [name for name, machine in machines.items() if in_treatment(machine.status.remedy)]
    most = policy.machines.most_in_treatment(len(machines))
    return {
        "unwell": {"now": len(unwell.counted), "most": unwell.most},
        "remedies": {"now": len(treated), "most": most, "mode": policy.machines.mode},
        "fencing": {"mode": policy.fencing},
    }


def state_in_slurm(worker: Mapping[str, Any], *, known: bool) -> str:
    """Format a worker's state in Slurm; during an outage of slurmctld its pod's readiness and the last known state."""
    if known:
        return f"{worker['slurm']} {worker['reason']}".rstrip() or "not in Slurm"
    last = f"{worker['state']} {worker['reason']}".rstrip()
    # The operator writes the outage and the last state into the condition after a minute.
    last = last.removeprefix(f"{UNKNOWN} ") if worker["state"] == UNKNOWN else f"last known: {last}"
    return f"pod {'ready' if worker['ready'] else 'not ready'}; {last}"


def lines(data: Mapping[str, Any]) -> Iterator[str]:
    """Format the report for a terminal: count the machines that take jobs, and name the rest."""
    for side, reason in data["unknown"].items():
        yield f"{side.capitalize()} does not answer: {reason['why']}"
    for controller in data["controllers"]:
        # A single controller that is ready needs no line.
        if len(data["controllers"]) > 1 or not controller["ready"]:
            state = "" if controller["ready"] else "not ready; "
            text = controller["text"] or "whether it acts is not known"
            yield f"{controller['name']:24} {controller['node'] or '-':24} {state}{text}"
    for worker in data["workers"]:
        where = f"{worker['node'] or '-'}{' cordoned' if worker['cordoned'] else ''}"
        yield f"{worker['name']:24} {where:24} {state_in_slurm(worker, known=data['known']['slurm'])}"
    for name, pool in data["pools"].items():
        states = ", ".join(f"{many} {state}" for state, many in pool["states"].items())
        sizes = f" of {pool['min']} to {pool['max']}, {pool['wanted']} wanted" if "max" in pool else ""
        workers = counted(pool["workers"], "worker")
        yield f"pool {name}: {workers}{sizes}: {states}; {pool['away']} of {pool['mayBeAway']} away"
    for machine in data["machines"]:
        if machine["goal"] != "up" or machine.get("why") or machine["state"] != "TakesJobs" or machine.get("repeats"):
            repeats = f"{machine['repeats']} verdicts" if machine.get("repeats") else ""
            more = "; ".join(filter(None, (machine.get("why"), repeats, machine.get("verdict"))))
            yield f"machine {machine['name']}: {machine['goal']}, {machine['state']}{': ' if more else ''}{more}"
    if data["machines"]:
        now = data["budgets"]["remedies"]
        yield f"{counted(len(data['machines']), 'machine')}, {now['now']} of {now['most']} in treatment ({now['mode']})"
    now = data["budgets"]["unwell"]
    yield f"{now['now']} of {now['most']} workers drained for signs of unwell machines"
    for notice in [*data["holds"], *data["proposals"]]:
        yield f"{notice['about']}: {notice['text']}"


# The data of the page: each machine with its state and what holds it, and all details of one machine.
#
# Text from users and Kubernetes becomes one short printable line, and every list is bounded. Jobs appear as numbers
# only: the operator asks as Slurm's own user, and Slurm may hide names and owners from the reader.

# Labels of a Node with its location, the nearest first.
RACKS = ("topology.kubernetes.io/rack", "network.topology.nvidia.com/leaf", "topology.kubernetes.io/zone")
CELLS, MOST_ITEMS = 20_000, 200
Jobs = Mapping[str, tuple[str, ...]]


def picture(snapshot: FleetSnapshot, decision: Decision, policy: Policy, now: float) -> Report:
    """Report what the page shows, with limits; `all` has the full numbers."""
    kubernetes = None if isinstance(snapshot.kubernetes, Unknown) else snapshot.kubernetes
    workers = list(snapshot.shown_workers())
    answers, missing = isinstance(snapshot.slurm, SlurmView), unknown(snapshot)
    data = _summary(workers, snapshot, decision, policy, now)
    data["due"] = [line(describe_action(change), SHORT) for change in decision.changes[:MOST_ITEMS]]
    kinds = {notice.about: notice.kind for notice in decision.notices}
    data["cells"] = list(_cells(kubernetes, workers, kinds, answers)) if kubernetes else []
    full = {key: len(data[key]) for key in ("cells", "holds", "proposals")} | {"due": len(decision.changes)}
    data |= {"cells": data["cells"][:CELLS]} | {key: data[key][:MOST_ITEMS] for key in ("holds", "proposals")}
    return data | {
        "unknown": [f"{side.capitalize()} does not answer: {gone['why'][:SHORT]}" for side, gone in missing.items()],
        # When slurmctld answered last, where it does not answer now and this process has seen an answer.
        "slurmAt": int(snapshot.last_at) if not answers and snapshot.last is not None else None,
        "all": full,
    }


def _cells(
    kubernetes: KubernetesView, workers: list[Worker], kinds: Mapping[str, str], answers: bool
) -> Iterator[Report]:
    """Yield one cell for each worker, and one for each machine without a worker.

    Empty fields are left out: a page of 5,000 cells is sent every few seconds.
    """
    machines = kubernetes.machines or {}
    machine_of_node = _by_node(machines)
    for worker in workers:
        machine = machine_of_node.get(worker.node.uid if worker.node else "")
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
    node_uids_with_workers = {worker.node.uid for worker in workers if worker.node}
    for name, machine in sorted(machines.items()):
        if machine.status.node_uid not in node_uids_with_workers:
            status = machine.status
            yield _without_empty(
                name=name,
                rack=rack(kubernetes.nodes.get(status.node)),
                node=status.node,
                state=_without_worker(status, kubernetes),
                reason=line(status.why or status.verdict, SHORT),
                goal=status.goal if status.goal != "up" else "",
            )


def _without_empty(**values: object) -> Report:
    return {key: value for key, value in values.items() if value}


def _by_node(machines: Mapping[str, MachineObject]) -> Mapping[str, MachineObject]:
    return {machine.status.node_uid: machine for machine in machines.values() if machine.status.node_uid}


def _is_held(worker: Worker) -> bool:
    return worker.slurm is not None and (worker.slurm.drained or worker.slurm.down)


def _without_worker(status: MachineStatus, kubernetes: KubernetesView) -> str:
    """Return the state of a machine without a worker; its object may still have an older state."""
    node = kubernetes.nodes.get(status.node)
    if node is not None and node.fenced:
        return "GivenUp"
    return status.state if status.state in ("NoWorker", "GivenUp", "Absent") else "NoWorker"


def state(worker: Worker, *, known: bool = True) -> str:
    """Return the state that the pod's condition shows, and whether the worker has jobs."""
    shown = str(worker_report(worker, known=known)["state"])
    return "Busy" if shown == "TakesJobs" and worker.slurm and worker.slurm.record.busy else shown


def reason(worker: Worker, *, known: bool) -> str:
    """Return why the worker takes no jobs; Slurm may keep an old reason of a worker that takes jobs."""
    if worker.slurm is not None:
        return line(worker.slurm.reason, SHORT) if _is_held(worker) else ""
    return line(str(worker_report(worker, known=known)["reason"]), SHORT)


def rack(node: KubeNode | None) -> str:
    return line(next((node.labels[key] for key in RACKS if node.labels.get(key)), ""), SHORT) if node else ""


def detail(name: str, snapshot: FleetSnapshot, decision: Decision, jobs: Jobs | None) -> Report | None:
    """Return all facts about one cell; None: no such cell. `jobs`: by node; None: not known."""
    kubernetes = snapshot.kubernetes
    if isinstance(kubernetes, Unknown):
        return None
    machines = kubernetes.machines or {}
    answers = isinstance(snapshot.slurm, SlurmView)
    worker = next((candidate for candidate in snapshot.shown_workers() if candidate.name == name), None)
    if worker is None and name not in machines:
        return None
    if worker is not None:
        node = worker.node
        machine = _by_node(machines).get(node.uid if node else "")
    else:
        machine = machines[name]
        node = kubernetes.nodes.get(machine.status.node)
    names = {name, *([node.name] if node else []), *([machine.name] if machine else [])}
    shown: dict[str, Any] = {"name": name, "rack": rack(node)}
    if worker is not None:
        holding = None if jobs is None else jobs.get(name, ())
        shown |= worker_report(worker, known=answers) | {
            "state": state(worker, known=answers),
            "leaves": worker.pod.deleting,
        }
        shown |= {"jobs": None if holding is None else list(holding[:MOST_ITEMS]), "jobsInAll": len(holding or ())}
    elif machine is not None:
        shown["state"] = _without_worker(machine.status, kubernetes)
    if node is not None:
        shown["signs"] = _list_conditions(node)
    if machine is not None:
        shown["machine"] = {"name": machine.name, **_short(machine_status_json(machine.status))}
    shown["stands"] = [_notice(notice) for notice in decision.notices if notice.about in names]
    shown["due"] = [line(describe_action(change), SHORT) for change in decision.changes if object_name(change) in names]
    return shown


def _list_conditions(node: KubeNode) -> list[dict[str, str]]:
    return [
        {
            "type": line(key, SHORT),
            "status": line(condition.status, SHORT),
            "text": line(condition.message or condition.reason, LONG),
        }
        for key, condition in sorted(node.conditions.items())[:MOST_ITEMS]
    ]


def _short(value: Any) -> Any:
    if isinstance(value, str):
        return line(value, LONG)
    if isinstance(value, dict):
        return {key: _short(item) for key, item in value.items()}
    return [_short(item) for item in value[:MOST_ITEMS]] if isinstance(value, list) else value
