"""The goal of each machine, and its effect in Slurm and Kubernetes: a machine that is not to be up takes no new jobs.

A person's goal comes first. Without one, the policy derives a goal from verdicts, and proposes it or acts on it. When a
goal is withdrawn, the fleet lifts its own drain and cordon; those of other authors stay.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from fleet import crd
from fleet.decide.actions import (
    Action,
    Annotate,
    CallHook,
    Cordon,
    Key,
    Notice,
    Record,
    StartJob,
    Uncordon,
    action_key,
)
from fleet.decide.causes import OF_GOAL, TEXTS, cause
from fleet.decide.machines import (
    DrainVerdict,
    Host,
    count,
    hosts,
    line,
    match_machines,
    missing_machines,
    updated_status,
    with_believed_gpus,
)
from fleet.decide.memory import RefusedChange
from fleet.decide.remediation import RemedyTurn, disproved, evidence, has_booted, in_treatment
from fleet.policy import Machines, Policy
from fleet.world.kubernetes import KubernetesView
from fleet.world.machine import MachineObject, MachineStatus
from fleet.world.pod_page import deep_result
from fleet.world.slurm import SlurmView
from fleet.world.snapshot import FleetSnapshot, Unknown, Worker

# Goals after which a machine must be proven well.
PROVEN = frozenset({"reboot", "replace"})
# Letters of a refusal that are shown; its end says why.
SHOWN = 160
BY_CLASS = {"reboot": "reboot", "rma": "replace"}


@dataclass(frozen=True, slots=True)
class Goal:
    goal: str = "up"
    why: str = ""
    person: bool = False  # set by a person
    prove: bool = False  # a deep check must pass before the machine is up again

    @property
    def up(self) -> bool:
        return self.goal == "up"

    @property
    def text(self) -> str:
        return "" if self.up else f"{self.goal} {self.why}".strip()


UP = Goal()


@dataclass(frozen=True, slots=True)
class Goals:
    """The goals of all machines."""

    hosts: Mapping[str, Host]  # by Node
    at: Mapping[str, str]  # the machine of a Node
    wanted: Mapping[str, Goal]
    proposed: Mapping[str, Goal]
    common: frozenset[str]  # verdicts against many machines at once
    deep: bool = False  # whether a deep check must prove that a remedy has helped
    bare: frozenset[str] = frozenset()  # Nodes that wait for a deep check and have no worker for it
    kept: Mapping[str, MachineStatus] = field(default_factory=dict)  # the stored status of each Node's machine

    def of_node(self, name: str) -> Goal:
        return self.wanted.get(self.at.get(name, ""), UP)


def goals(snapshot: FleetSnapshot, now: float, policy: Policy) -> Goals | None:
    """Derive the goal of every machine; None: Machine objects are switched off, or not known."""
    kubernetes = snapshot.kubernetes
    if isinstance(kubernetes, Unknown) or isinstance(snapshot.slurm, Unknown) or kubernetes.machines is None:
        return None
    machines = kubernetes.machines
    found = with_believed_gpus(machines, hosts(kubernetes, list(snapshot.workers())))
    at = match_machines(machines, found)
    host_of = {machine: found[where] for where, machine in at.items()}
    kept = {where: machines[name].status for where, name in at.items()}
    common = _common_verdicts(found, kept, policy)
    wanted: dict[str, Goal] = {}
    proposed: dict[str, Goal] = {}
    for name, machine in machines.items():
        goal = _by_person(machine) or _by_policy(machine.status, host_of.get(name), now, policy.machines, common)
        (wanted if goal.person or policy.machines.mode == "act" else proposed)[name] = goal
    if policy.machines.proof != "deep":
        return Goals(found, at, wanted, proposed, common)
    back = (where for where, status in kept.items() if _is_back(status, found[where]))
    bare = frozenset(where for where in back if not found[where].workers and kubernetes.sees(where))
    return Goals(found, at, wanted, proposed, common, True, bare, kept)


def _is_rebooting(status: MachineStatus) -> bool:
    return status.remedy is not None and status.remedy.goal == "reboot"


def _is_back(status: MachineStatus, host: Host) -> bool:
    """Return whether the requested reboot has happened."""
    remedy = status.remedy
    return remedy is not None and remedy.goal == "reboot" and remedy.done and has_booted(remedy, host)


def _by_person(machine: MachineObject) -> Goal | None:
    if not machine.goal:
        return None
    if machine.goal == "up" or (machine.goal == "reboot" and machine.generation == machine.status.fulfilled):
        return Goal(person=True)
    return Goal(machine.goal, line(machine.reason), True, machine.goal in PROVEN)


def _by_policy(status: MachineStatus, host: Host | None, now: float, rules: Machines, common: frozenset[str]) -> Goal:
    if rules.mode == "off":
        return UP
    if _is_rebooting(status) and status.remedy and status.remedy.done:
        return Goal("reboot", status.verdict, prove=True)  # see a requested reboot to its end
    # An intended reboot that has not been performed is no attempt.
    tries = count(status, "reboot", now, rules.window_s) - _is_rebooting(status)
    if rules.proof == "deep" and (text := disproved(status, host)):
        return _after_failed_proof(text, tries, rules, common)
    verdict = host.verdict() if host else None
    if verdict and verdict.class_ in BY_CLASS and verdict.key not in common:
        if verdict.class_ == "reboot" and tries >= rules.attempts:
            return Goal("replace", line(f"rebooted {rules.attempts} times; {verdict.text}"), prove=True)
        return Goal(BY_CLASS[verdict.class_], verdict.text, prove=True)
    if rules.flaps and count(status, "verdict", now, rules.window_s) >= rules.flaps:
        return Goal("drain", f"{rules.flaps} verdicts or more within {rules.window_s / 86400:g} days")
    return UP


def _after_failed_proof(text: str, tries: int, rules: Machines, common: frozenset[str]) -> Goal:
    verdict = evidence(text)
    if verdict and verdict.key in common:
        return Goal("drain", text, prove=True)
    if tries >= rules.attempts or (verdict and verdict.class_ == "rma"):
        return Goal("replace", line(f"rebooted {tries} times; {text}"), prove=True)
    return Goal("reboot", text, prove=True)


def _common_verdicts(found: Mapping[str, Host], kept: Mapping[str, MachineStatus], policy: Policy) -> frozenset[str]:
    """Return the checks, each at one commit, that condemn many machines: then the commit is more likely at fault."""
    with_workers = {where: host for where, host in found.items() if host.workers}
    deeply = policy.machines.proof == "deep"

    def against(where: str, host: Host) -> DrainVerdict | None:
        return host.verdict() or (evidence(disproved(kept[where], host)) if deeply and where in kept else None)

    counted = Counter(verdict.key for where, host in with_workers.items() if (verdict := against(where, host)))
    most = max(1, int(len(with_workers) * policy.share))
    return frozenset(key for key, many in counted.items() if many > most)


def causes(worker: Worker, known: Goals | None, kubernetes: KubernetesView) -> Mapping[str, str]:
    """Why the worker's machine takes no new jobs. While goals are unknown, an existing drain for them stays."""
    if known is None:
        before = worker.slurm.kinds if worker.slurm else frozenset[str]()
        return dict.fromkeys(before & OF_GOAL, "as its machine was to be") if kubernetes.blind else {}
    goal = known.of_node(worker.pod.node)
    if goal.up:
        return {} if goal.person else dict.fromkeys(_unproven(worker, known), TEXTS["proof"])
    proof = cause("proof") if known.deep and goal.prove else {}
    return {"goal" if goal.person else "machine": goal.text, **proof}


def _unproven(worker: Worker, known: Goals) -> Mapping[str, str]:
    """Return the proof that a drained worker still owes before it is undrained.

    A pod that started on a drain that demands a deep check owes it, on whatever machine. So does a machine that came to
    the Node after the drain. A withdrawn goal demands nothing if pod and machine are those that were drained.
    """
    node, machine = worker.slurm, worker.node
    if not known.deep or node is None or machine is None or "proof" not in node.kinds:
        return {}
    status = known.kept.get(machine.name)
    stayed = status is not None and _came_at(status) <= node.since
    if node.kinds & {"goal", "machine"} and stayed and not 0 < node.since < worker.pod.created:
        return {}
    result = deep_result((worker,), machine.boot, status.gpus if status else ())
    return {} if result.passed else {"proof": result.text}


def _came_at(status: MachineStatus) -> float:
    """When the machine was first seen on its Node; 0: so long ago that its history does not tell."""
    return next((entry.at for entry in reversed(status.history) if entry.what == "node"), 0.0)


def cordons(known: Goals) -> Iterator[Cordon | Uncordon]:
    """Cordon Nodes without workers by their goal; `conditions.follow_cordon` decides about the others."""
    for where in known.at:
        node, goal = known.hosts[where].node, known.of_node(where)
        if known.hosts[where].workers:
            continue
        # A bare Node must be open for the worker that checks it; that worker is drained.
        is_open = goal.up or where in known.bare
        if not is_open and not node.cordoned:
            yield Cordon(node.name, node.uid, node.version, f"goal {goal.text}")
        elif is_open and node.cordoned_by_fleet:
            yield Uncordon(node.name, node.uid, node.version)


def record_machines(
    known: Goals,
    kubernetes: KubernetesView,
    slurm: SlurmView,
    now: float,
    policy: Policy,
    failed: Mapping[Key, RefusedChange] | None = None,
) -> Iterator[Action]:
    """Record what is new of each machine, and take the next step of its remedy.

    Skips machines whose Node cannot be read. `failed`: changes that failed, such as a remedy.
    """
    machines, rules = kubernetes.machines or {}, policy.machines
    for verdict in sorted(known.common):
        yield Notice("fleet", "common", f"{verdict} stands against many machines at once: none is treated for that")
    room = max(rules.at_once, int(len(machines) * rules.share))
    room -= sum(in_treatment(machine.status.remedy) for machine in machines.values())
    yield from missing_machines(machines, known.hosts, known.at)
    node_of = {machine: where for where, machine in known.at.items()}
    for name, machine in machines.items():
        where = node_of.get(name, machine.status.node)
        if machine.deleting or f"Node/{where}" in kubernetes.unread:
            continue
        goal, proposal = known.wanted.get(name, UP), known.proposed.get(name, UP)
        host = known.hosts[where] if name in node_of else None
        stands = rules.proof == "deep" and bool(disproved(machine.status, host))
        after, act, text = updated_status(machine, host, now, rules.window_s, stands=stands), None, "is nowhere"
        if host is not None:
            turn = RemedyTurn(machine, host, goal.goal, goal.why, room > 0, kubernetes, slurm, now, rules)
            after, act, text = turn.step(after)
        if goal.up:
            owed = (why for worker in (host.workers if host else ()) for why in _unproven(worker, known).values())
            text = "" if goal.person else next(owed, "")
        room -= machine.status.remedy is None and after.remedy is not None
        refused = failed.get(action_key(act)) if failed and isinstance(act, Annotate | StartJob | CallHook) else None
        if refused is not None:
            text = f"could not be asked for: {line(refused.text, len(refused.text))[-SHOWN:]}"
        is_proposal = goal.up and not proposal.up
        reason = goal.why[: crd.TEXT - len(text) - 2]
        why = f"would be {proposal.text}" if is_proposal else "; ".join(filter(None, (reason, text)))
        after = replace(after, goal=goal.goal, why=line(why))
        if after.why:
            yield Notice(where or name, "propose" if is_proposal else "goal", f"{name}: {goal.goal}: {after.why}")
        if isinstance(act, StartJob | CallHook):
            yield replace(act, after=replace(after, remedy=act.after.remedy))
            continue
        if act is not None:
            yield act
        if after != machine.status:
            yield Record(name, machine.version, after)
