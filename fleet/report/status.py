"""Report the fleet for people and programs: workers by pool, machines, holds, proposals, budgets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from fleet.decide.causes import find_causes
from fleet.decide.conditions import UNKNOWN, condition
from fleet.decide.decide import Decision
from fleet.decide.drain import count_budget, find_away
from fleet.decide.machines import line
from fleet.decide.remediation import in_treatment
from fleet.policy import STATE, Policy
from fleet.world.controllers import ControllerPod, controllers
from fleet.world.machine import machine_status_json
from fleet.world.slurm import SlurmView
from fleet.world.snapshot import FleetSnapshot, Unknown, Worker

Report = dict[str, Any]


def report(snapshot: FleetSnapshot, decision: Decision, policy: Policy, now: float) -> Report:
    kubernetes = snapshot.kubernetes
    machines = {} if isinstance(kubernetes, Unknown) else kubernetes.machines or {}
    workers = list(snapshot.shown_workers())
    notices = [(notice.about, notice.kind, notice.text) for notice in decision.notices]
    return {
        "known": {"kubernetes": not isinstance(kubernetes, Unknown), "slurm": not isinstance(snapshot.slurm, Unknown)},
        "unknown": unknown(snapshot),
        "workers": [worker_(worker, known=isinstance(snapshot.slurm, SlurmView)) for worker in workers],
        "pools": pools(workers, snapshot, policy),
        "controllers": []
        if isinstance(kubernetes, Unknown)
        else [controller_(each) for each in controllers(kubernetes)],
        "machines": [
            {"name": name, **machine_status_json(machine.status)} for name, machine in sorted(machines.items())
        ],
        "holds": [_notice(*notice) for notice in notices if notice[1] not in ("propose", "dead")],
        "proposals": [_notice(*notice) for notice in notices if notice[1] in ("propose", "dead")],
        "budgets": budgets(workers, snapshot, policy, now),
    }


def unknown(snapshot: FleetSnapshot) -> Report:
    """Return why a side is unknown; for Slurm also the time of the last answer that this process received."""
    sides = (("kubernetes", snapshot.kubernetes), ("slurm", snapshot.slurm))
    reasons: Report = {name: {"why": line(side.why, 1024)} for name, side in sides if isinstance(side, Unknown)}
    if "slurm" in reasons and snapshot.last is not None:
        reasons["slurm"]["since"] = int(snapshot.last_at)
    return reasons


def _notice(about: str, kind: str, text: str) -> Report:
    return {"about": about, "kind": kind, "text": line(text, 1024)}


def worker_(worker: Worker, *, known: bool = True) -> Report:
    """Report one worker. `known`: slurmctld answers; otherwise the pod's condition has the last known state."""
    node, slurm, shown = worker.node, worker.slurm, worker.pod.conditions.get(STATE)
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
        "reason": line(reason, 1024),
    }


def controller_(controller: ControllerPod) -> Report:
    """Report one controller, and of the one that acts how and when it took over."""
    pod, takeover = controller.pod, controller.takeover
    shown: Report = {
        "name": pod.name,
        "node": pod.node,
        "ready": pod.ready,
        "role": controller.role,
        "term": controller.term,
        "text": line(controller.text(), 1024),
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
    own = {label: pool.most for label, pool in pool_of.items()}
    gone = find_away(workers)
    report_of: Report = {}
    for name in sorted(
        {worker.pod.pool for worker in workers} | {name for name, pool in pool_of.items() if pool.elastic}
    ):
        members = [worker for worker in workers if worker.pod.pool == name]
        states = Counter(worker_(worker, known=answers)["state"] for worker in members)
        report_of[name] = {
            "workers": len(members),
            "states": dict(sorted(states.items())),
            "away": len(gone.get(name, ())),
            "mayBeAway": own.get(name, policy.away),
        }
        if name in pool_of and (elastic := pool_of[name].elastic):
            report_of[name] |= {"wanted": pool_of[name].status.wanted, "min": elastic.least, "max": elastic.most}
    return report_of


def budgets(workers: list[Worker], snapshot: FleetSnapshot, policy: Policy, now: float) -> Report:
    kubernetes = snapshot.kubernetes
    machines = {} if isinstance(kubernetes, Unknown) else kubernetes.machines or {}
    unwell = count_budget(
        {worker.name: (worker.slurm, find_causes(worker, policy, now)) for worker in workers if worker.node}, policy
    )
    treated = [name for name, machine in machines.items() if in_treatment(machine.status.remedy)]
    most = max(policy.machines.at_once, int(len(machines) * policy.machines.share))
    return {
        "unwell": {"now": len(unwell.against), "most": unwell.most},
        "remedies": {"now": len(treated), "most": most, "mode": policy.machines.mode},
        "fencing": {"mode": policy.fencing},
    }


def in_slurm(worker: Mapping[str, Any], *, known: bool) -> str:
    """Format a worker's state in Slurm; during an outage of slurmctld its pod's readiness and the last known state."""
    if known:
        return f"{worker['slurm']} {worker['reason']}".rstrip() or "not in Slurm"
    last = f"{worker['state']} {worker['reason']}".rstrip()
    # The operator writes the outage and the last state into the condition after a minute.
    last = last.removeprefix(f"{UNKNOWN} ") if worker["state"] == UNKNOWN else f"last known: {last}"
    return f"pod {'ready' if worker['ready'] else 'not ready'}; {last}"


def lines(data: Mapping[str, Any]) -> Iterator[str]:
    """Format the report for a terminal: count the machines that take jobs, and name the rest."""
    for side, why in data["unknown"].items():
        yield f"{side.capitalize()} does not answer: {why['why']}"
    for controller in data["controllers"]:
        # Of a single one that is ready there is nothing to tell.
        if len(data["controllers"]) > 1 or not controller["ready"]:
            state = "" if controller["ready"] else "not ready; "
            text = controller["text"] or "whether it acts is not known"
            yield f"{controller['name']:24} {controller['node'] or '-':24} {state}{text}"
    for worker in data["workers"]:
        where = f"{worker['node'] or '-'}{' cordoned' if worker['cordoned'] else ''}"
        yield f"{worker['name']:24} {where:24} {in_slurm(worker, known=data['known']['slurm'])}"
    for name, pool in data["pools"].items():
        states = ", ".join(f"{many} {state}" for state, many in pool["states"].items())
        sizes = f" of {pool['min']} to {pool['max']}, {pool['wanted']} wanted" if "max" in pool else ""
        yield f"pool {name}: {pool['workers']} workers{sizes}: {states}; {pool['away']} of {pool['mayBeAway']} away"
    for machine in data["machines"]:
        if machine["goal"] != "up" or machine.get("why") or machine["state"] != "TakesJobs" or machine.get("repeats"):
            repeats = f"{machine['repeats']} verdicts" if machine.get("repeats") else ""
            more = "; ".join(filter(None, (machine.get("why"), repeats, machine.get("verdict"))))
            yield f"machine {machine['name']}: {machine['goal']}, {machine['state']}{': ' if more else ''}{more}"
    if data["machines"]:
        now = data["budgets"]["remedies"]
        yield f"{len(data['machines'])} machines, {now['now']} of {now['most']} in treatment ({now['mode']})"
    now = data["budgets"]["unwell"]
    yield f"{now['now']} of {now['most']} workers held for what their machines say"
    for notice in [*data["holds"], *data["proposals"]]:
        yield f"{notice['about']}: {notice['text']}"
