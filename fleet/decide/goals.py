"""What is wanted of each machine, and what follows from it in Slurm and Kubernetes: one that is not to be up takes no
new jobs, and its Node is cordoned by us. Taken back, both are lifted; what others have set stays.

A person's goal comes first. Without one the policy's follows from what checks have found, and is proposed or acted on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from fleet import crd, reasons
from fleet.decide.actions import Action, Annotate, CallHook, Cordon, Key, Notice, Record, StartJob, Uncordon, action_key
from fleet.decide.machines import Host, Verdict, believed, count, line, made, matched, places, seen
from fleet.decide.memory import Refused
from fleet.decide.remediation import RemedyTurn, booted, counts, disproved, evidence
from fleet.policy import Machines, Policy
from fleet.world.deep_check import deep
from fleet.world.kubernetes import Kubernetes
from fleet.world.machine import Machine, MachineStatus
from fleet.world.slurm import Slurm
from fleet.world.snapshot import Snapshot, Unknown, Worker

# The causes of drains that follow from a goal: a person's, and the policy's.
KINDS = frozenset({"goal", "machine", reasons.PROOF})
TO_PASS = "a deep check is to pass"
# After these it is seen to be well.
PROVEN = frozenset({"reboot", "replace"})
# Of a refusal: how it ends says why.
WORDS = 160
BY_CLASS = {"reboot": "reboot", "rma": "replace"}


@dataclass(frozen=True, slots=True)
class Wanted:
    goal: str = "up"
    why: str = ""
    person: bool = False
    prove: bool = False  # a deep check is to pass before it is up again

    @property
    def up(self) -> bool:
        return self.goal == "up"

    @property
    def words(self) -> str:
        return "" if self.up else f"{self.goal} {self.why}".strip()


UP = Wanted()


@dataclass(frozen=True, slots=True)
class Goals:
    """Of every machine."""

    found: Mapping[str, Host]
    at: Mapping[str, str]  # the machine of a Node
    wanted: Mapping[str, Wanted]
    proposed: Mapping[str, Wanted]
    common: frozenset[str]  # verdicts that stand against many at once
    deep: bool = False  # whether a deep check is to prove that what is done has helped
    bare: frozenset[str] = frozenset()  # Nodes that wait for that, and have no worker that could
    kept: Mapping[str, MachineStatus] = field(
        default_factory=dict
    )  # of the machine of each Node, as it was before this look

    def of_node(self, name: str) -> Wanted:
        return self.wanted.get(self.at.get(name, ""), UP)


def goals(world: Snapshot, now: float, policy: Policy) -> Goals | None:
    """None: machines are not kept, or not known."""
    here = world.kubernetes
    if isinstance(here, Unknown) or isinstance(world.slurm, Unknown) or here.machines is None:
        return None
    found = believed(here.machines, places(here, list(world.workers())))
    at = matched(here.machines, found)
    place_of = {machine: found[where] for where, machine in at.items()}
    kept = {where: here.machines[name].status for where, name in at.items()}
    common = _common(found, kept, policy)
    wanted: dict[str, Wanted] = {}
    proposed: dict[str, Wanted] = {}
    for name, machine in here.machines.items():
        one = _by_person(machine) or _by_policy(machine.status, place_of.get(name), now, policy.machines, common)
        done = one.person or policy.machines.mode == "act"
        (wanted if done else proposed)[name] = one
    if policy.machines.proof != "deep":
        return Goals(found, at, wanted, proposed, common)
    back = (where for where, one in kept.items() if _back(one, found[where]))
    bare = frozenset(where for where in back if not found[where].workers and here.sees(where))
    return Goals(found, at, wanted, proposed, common, True, bare, kept)


def _rebooting(status: MachineStatus) -> bool:
    return status.remedy is not None and status.remedy.goal == "reboot"


def _back(status: MachineStatus, place: Host) -> bool:
    """Rebooted as it was asked for."""
    one = status.remedy
    return one is not None and one.goal == "reboot" and one.done and booted(one, place)


def _by_person(machine: Machine) -> Wanted | None:
    if not machine.goal:
        return None
    if machine.goal == "up" or (machine.goal == "reboot" and machine.generation == machine.status.fulfilled):
        return Wanted(person=True)
    return Wanted(machine.goal, line(machine.reason), True, machine.goal in PROVEN)


def _by_policy(
    status: MachineStatus, place: Host | None, now: float, rules: Machines, common: frozenset[str]
) -> Wanted:
    if rules.mode == "off":
        return UP
    if status.remedy and status.remedy.goal == "reboot" and status.remedy.done:
        return Wanted("reboot", status.verdict, prove=True)  # what was asked for is seen to its end
    # The one that is intended and not done yet is no attempt.
    tries = count(status, "reboot", now, rules.window_s) - _rebooting(status)
    if rules.proof == "deep" and (said := disproved(status, place)):
        one = evidence(said)
        if one and one.key in common:
            return Wanted("drain", said, prove=True)
        if tries >= rules.attempts or (one and one.class_ == "rma"):
            return Wanted("replace", line(f"rebooted {tries} times; {said}"), prove=True)
        return Wanted("reboot", said, prove=True)
    found = place.verdict() if place else None
    if found and found.class_ in BY_CLASS and found.key not in common:
        if found.class_ == "reboot" and tries >= rules.attempts:
            return Wanted("replace", line(f"rebooted {rules.attempts} times; {found.text}"), prove=True)
        return Wanted(BY_CLASS[found.class_], found.text, prove=True)
    if rules.flaps and count(status, "verdict", now, rules.window_s) >= rules.flaps:
        return Wanted("drain", f"{rules.flaps} verdicts or more within {rules.window_s / 86400:g} days")
    return UP


def _common(found: Mapping[str, Host], kept: Mapping[str, MachineStatus], policy: Policy) -> frozenset[str]:
    """What one check at one commit says of many machines is the commit's fault before it is theirs."""
    with_workers = {where: place for where, place in found.items() if place.workers}
    deeply = policy.machines.proof == "deep"

    def against(where: str, place: Host) -> Verdict | None:
        return place.verdict() or (evidence(disproved(kept[where], place)) if deeply and where in kept else None)

    counted = Counter(one.key for where, place in with_workers.items() if (one := against(where, place)))
    most = max(1, int(len(with_workers) * policy.share))
    return frozenset(key for key, many in counted.items() if many > most)


def causes(worker: Worker, known: Goals | None, kubernetes: Kubernetes) -> Mapping[str, str]:
    """Why its machine is to take no new jobs; where that is not known, what it was drained for stays."""
    if known is None:
        before = reasons.kinds(worker.slurm.reason) if worker.slurm and worker.slurm.ours else frozenset[str]()
        return dict.fromkeys(before & KINDS, "as its machine was to be") if kubernetes.blind else {}
    one = known.of_node(worker.pod.node)
    if one.up:
        return {} if one.person else dict.fromkeys(_unproven(worker, known), TO_PASS)
    # The pod that begins there reads it (health/broker/decide.py): it stands in Slurm before anything is done.
    asked = {reasons.PROOF: TO_PASS} if known.deep and one.prove else {}
    return {"goal" if one.person else "machine": one.words, **asked}


def _unproven(worker: Worker, known: Goals) -> Mapping[str, str]:
    """A pod that began on a drain that asks for it, on whatever machine it is, is proven before that is lifted: it is
    checking deeply. So is a machine that has come since, though its Node and its pod are the old ones. Where the goal
    was withdrawn both are those that were drained, and nothing was done to them."""
    node, machine = worker.slurm, worker.node
    kinds = reasons.kinds(node.reason) if node is not None and node.ours else frozenset[str]()
    if not known.deep or reasons.PROOF not in kinds or node is None or machine is None:
        return {}
    status = known.kept.get(machine.name)
    stayed = status is not None and _came(status) <= node.since
    if kinds & {"goal", "machine"} and stayed and not 0 < node.since < worker.pod.created:
        return {}
    said = deep((worker,), machine.boot, status.gpus if status else ())
    return {} if said.passed else {reasons.PROOF: said.text}


def _came(status: MachineStatus) -> float:
    """When it was first seen on its Node; 0: so long ago that it is forgotten."""
    return next((one.at for one in reversed(status.history) if one.what == "node"), 0.0)


def _held(place: Host, known: Goals) -> str:
    return next((why for worker in place.workers for why in _unproven(worker, known).values()), "")


def cordons(known: Goals) -> Iterator[Cordon | Uncordon]:
    """Of Nodes without workers; of the others it is said with what Slurm says of them."""
    for where in known.at:
        node, one = known.found[where].node, known.of_node(where)
        if known.found[where].workers:
            continue
        # A worker that comes is drained, and is who checks it.
        free = one.up or where in known.bare
        if not free and not node.cordoned:
            yield Cordon(node.name, node.uid, node.version, f"goal {one.words}")
        elif free and node.ours:
            yield Uncordon(node.name, node.uid, node.version)


def kept(
    known: Goals,
    kubernetes: Kubernetes,
    slurm: Slurm,
    now: float,
    policy: Policy,
    failed: Mapping[Key, Refused] | None = None,
) -> Iterator[Action]:
    """What is new of each, and its next step. Of one whose Node cannot be read there is none. `failed`: what could not
    be done, a remedy among it."""
    machines, rules = kubernetes.machines or {}, policy.machines
    for verdict in sorted(known.common):
        yield Notice("fleet", "common", f"{verdict} stands against many machines at once: none is treated for that")
    room = max(rules.at_once, int(len(machines) * rules.share))
    room -= sum(counts(machine.status.remedy) for machine in machines.values())
    yield from made(machines, known.found, known.at)
    here = {machine: where for where, machine in known.at.items()}
    for name, machine in machines.items():
        where = here.get(name, machine.status.node)
        if machine.deleting or f"Node/{where}" in kubernetes.unread:
            continue
        one, proposal = known.wanted.get(name, UP), known.proposed.get(name, UP)
        place = known.found[where] if name in here else None
        stands = rules.proof == "deep" and bool(disproved(machine.status, place))
        after, act, said = seen(machine, place, now, rules.window_s, stands=stands), None, "is nowhere"
        if place is not None:
            turn = RemedyTurn(machine, place, one.goal, one.why, room > 0, kubernetes, slurm, now, rules)
            after, act, said = turn.step(after)
        if one.up:
            said = _held(place, known) if place is not None and not one.person else ""
        room -= machine.status.remedy is None and after.remedy is not None
        refused = failed.get(action_key(act)) if failed and isinstance(act, Annotate | StartJob | CallHook) else None
        if refused is not None:
            said = f"could not be asked for: {line(refused.text, len(refused.text))[-WORDS:]}"
        proposed = one.up and not proposal.up
        goal = one.why[: crd.TEXT - len(said) - 2]
        why = f"would be {proposal.words}" if proposed else "; ".join(filter(None, (goal, said)))
        after = replace(after, goal=one.goal, why=line(why))
        if after.why:
            yield Notice(where or name, "propose" if proposed else "goal", f"{name}: {one.goal}: {after.why}")
        if isinstance(act, StartJob | CallHook):
            yield replace(act, after=replace(after, remedy=act.after.remedy))
            continue
        if act is not None:
            yield act
        if after != machine.status:
            yield Record(name, machine.version, after)
