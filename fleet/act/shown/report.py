"""How the fleet stands, for people and for programs: workers by pool, machines, what is held and proposed, budgets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from fleet.decide.budget import away, budget
from fleet.decide.causes import causes
from fleet.decide.decide import Decision
from fleet.decide.machines import line
from fleet.decide.remedy import counts
from fleet.decide.show import condition
from fleet.policy import Policy
from fleet.world.kubernetes import Kubernetes
from fleet.world.machine import written
from fleet.world.world import Unknown, Worker, World

Report = dict[str, Any]


def report(world: World, decision: Decision, policy: Policy, now: float) -> Report:
    here = world.kubernetes
    machines = {} if isinstance(here, Unknown) else here.machines or {}
    workers = list(world.workers())
    found = [(one.about, one.kind, one.text) for one in decision.stands]
    return {
        "known": {"kubernetes": not isinstance(here, Unknown), "slurm": not isinstance(world.slurm, Unknown)},
        "workers": [worker_(worker) for worker in workers],
        "pools": pools(workers, here, policy),
        "machines": [{"name": name, **written(one.status)} for name, one in sorted(machines.items())],
        "holds": [_stands(*one) for one in found if one[1] not in ("propose", "dead")],
        "proposals": [_stands(*one) for one in found if one[1] in ("propose", "dead")],
        "budgets": budgets(workers, world, policy, now),
    }


def _stands(about: str, kind: str, text: str) -> Report:
    return {"about": about, "kind": kind, "text": line(text, 1024)}


def worker_(worker: Worker) -> Report:
    node, known = worker.node, worker.slurm
    return {
        "name": worker.name,
        "pool": worker.pod.pool,
        "node": worker.pod.node,
        "cordoned": bool(node and node.cordoned),
        "state": condition(known).reason if known else "Unregistered",
        "slurm": known.record.state if known else "",
        "reason": line(known.reason, 1024) if known else "",
    }


def pools(workers: list[Worker], here: Kubernetes | Unknown, policy: Policy) -> Report:
    known = {} if isinstance(here, Unknown) else {one.label: one for one in (here.pools or {}).values()}
    own = {label: one.most for label, one in known.items()}
    gone = away(workers)
    found: Report = {}
    for name in sorted({worker.pod.pool for worker in workers} | {name for name, one in known.items() if one.elastic}):
        mine = [worker for worker in workers if worker.pod.pool == name]
        states = Counter(worker_(worker)["state"] for worker in mine)
        found[name] = {
            "workers": len(mine),
            "states": dict(sorted(states.items())),
            "away": len(gone.get(name, ())),
            "mayBeAway": own.get(name, policy.away),
        }
        if name in known and (elastic := known[name].elastic):
            found[name] |= {"wanted": known[name].status.wanted, "min": elastic.least, "max": elastic.most}
    return found


def budgets(workers: list[Worker], world: World, policy: Policy, now: float) -> Report:
    here = world.kubernetes
    machines = {} if isinstance(here, Unknown) else here.machines or {}
    unwell = budget({one.name: (one.slurm, causes(one, policy, now)) for one in workers if one.node}, policy)
    treated = [name for name, one in machines.items() if counts(one.status.remedy)]
    most = max(policy.machines.at_once, int(len(machines) * policy.machines.share))
    return {
        "unwell": {"now": len(unwell.against), "most": unwell.most},
        "remedies": {"now": len(treated), "most": most, "mode": policy.machines.mode},
        "fencing": {"mode": policy.fencing},
    }


def lines(said: Mapping[str, Any]) -> Iterator[str]:
    """For a terminal: who takes jobs without more ado is counted, the others are named."""
    for side in (side for side, known in said["known"].items() if not known):
        yield f"nothing is known of {side.capitalize()}"
    for one in said["workers"]:
        state = f"{one['slurm']} {one['reason']}".rstrip() or "not in Slurm"
        where = f"{one['node'] or '-'}{' cordoned' if one['cordoned'] else ''}"
        yield f"{one['name']:24} {where:24} {state}"
    for name, one in said["pools"].items():
        states = ", ".join(f"{many} {state}" for state, many in one["states"].items())
        sizes = f" of {one['min']} to {one['max']}, {one['wanted']} wanted" if "max" in one else ""
        yield f"pool {name}: {one['workers']} workers{sizes}: {states}; {one['away']} of {one['mayBeAway']} away"
    for one in said["machines"]:
        if one["goal"] != "up" or one.get("why") or one["state"] != "TakesJobs" or one.get("repeats"):
            repeats = f"{one['repeats']} verdicts" if one.get("repeats") else ""
            more = "; ".join(filter(None, (one.get("why"), repeats, one.get("verdict"))))
            yield f"machine {one['name']}: {one['goal']}, {one['state']}{': ' if more else ''}{more}"
    if said["machines"]:
        now = said["budgets"]["remedies"]
        yield f"{len(said['machines'])} machines, {now['now']} of {now['most']} in treatment ({now['mode']})"
    now = said["budgets"]["unwell"]
    yield f"{now['now']} of {now['most']} workers held for what their machines say"
    for one in [*said["holds"], *said["proposals"]]:
        yield f"{one['about']}: {one['text']}"
