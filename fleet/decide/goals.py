"""What is wanted of each machine, and what follows from it in Slurm and Kubernetes: one that is not to be up takes no
new jobs, and its Node is cordoned by us. Taken back, both are lifted; what others have set stays.

A person's goal comes first. Without one the policy's follows from what checks have found, and is proposed or acted on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from fleet import words
from fleet.decide.actions import Action, CallHook, Cordon, Record, StartJob, Tell, Uncordon
from fleet.decide.machines import Place, believed, count, line, made, matched, places, seen
from fleet.decide.remedy import Turn, counts
from fleet.policy import Machines, Policy
from fleet.world.kubernetes import Kubernetes
from fleet.world.machine import Machine, Status
from fleet.world.slurm import Slurm
from fleet.world.world import Unknown, Worker, World

# The causes of drains that follow from a goal: a person's, and the policy's.
KINDS = frozenset({"goal", "machine"})
BY_CLASS = {"reboot": "reboot", "rma": "replace"}


@dataclass(frozen=True, slots=True)
class Wanted:
    goal: str = "up"
    why: str = ""
    person: bool = False

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

    found: Mapping[str, Place]
    at: Mapping[str, str]  # the machine of a Node
    wanted: Mapping[str, Wanted]
    proposed: Mapping[str, Wanted]
    common: frozenset[str]  # verdicts that stand against many at once

    def of_node(self, name: str) -> Wanted:
        return self.wanted.get(self.at.get(name, ""), UP)


def goals(world: World, now: float, policy: Policy) -> Goals | None:
    """None: machines are not kept, or not known."""
    here = world.kubernetes
    if isinstance(here, Unknown) or isinstance(world.slurm, Unknown) or here.machines is None:
        return None
    found = believed(here.machines, places(here, list(world.workers())))
    at = matched(here.machines, found)
    place_of = {machine: found[where] for where, machine in at.items()}
    common = _common(found.values(), policy)
    wanted: dict[str, Wanted] = {}
    proposed: dict[str, Wanted] = {}
    for name, machine in here.machines.items():
        one = _by_person(machine) or _by_policy(machine.status, place_of.get(name), now, policy.machines, common)
        done = one.person or policy.machines.mode == "act"
        (wanted if done else proposed)[name] = one
    return Goals(found, at, wanted, proposed, common)


def _by_person(machine: Machine) -> Wanted | None:
    if not machine.goal:
        return None
    if machine.goal == "up" or (machine.goal == "reboot" and machine.generation == machine.status.fulfilled):
        return Wanted(person=True)
    return Wanted(machine.goal, line(machine.reason), True)


def _by_policy(status: Status, place: Place | None, now: float, rules: Machines, common: frozenset[str]) -> Wanted:
    if rules.mode == "off":
        return UP
    if status.remedy and status.remedy.goal == "reboot" and status.remedy.done:
        return Wanted("reboot", status.verdict)  # what was asked for is seen to its end
    found = place.verdict() if place else None
    if found and found.class_ in BY_CLASS and found.key not in common:
        # The one that is intended and not done yet is no attempt.
        open_ = status.remedy is not None and status.remedy.goal == "reboot"
        tries = count(status, "reboot", now, rules.window_s) - open_
        if found.class_ == "reboot" and tries >= rules.attempts:
            return Wanted("replace", line(f"rebooted {rules.attempts} times; {found.text}"))
        return Wanted(BY_CLASS[found.class_], found.text)
    if rules.flaps and count(status, "verdict", now, rules.window_s) >= rules.flaps:
        return Wanted("drain", f"{rules.flaps} verdicts or more within {rules.window_s / 86400:g} days")
    return UP


def _common(found: Iterable[Place], policy: Policy) -> frozenset[str]:
    """What one check at one commit says of many machines is the commit's fault before it is theirs."""
    with_workers = [place for place in found if place.workers]
    counted = Counter(one.key for place in with_workers if (one := place.verdict()))
    most = max(1, int(len(with_workers) * policy.share))
    return frozenset(key for key, many in counted.items() if many > most)


def causes(worker: Worker, known: Goals | None, kubernetes: Kubernetes) -> Mapping[str, str]:
    """Why its machine is to take no new jobs; where that is not known, what it was drained for stays."""
    if known is None:
        before = words.kinds(worker.slurm.reason) if worker.slurm and worker.slurm.ours else frozenset[str]()
        return dict.fromkeys(before & KINDS, "as its machine was to be") if kubernetes.blind else {}
    one = known.of_node(worker.pod.node)
    return {} if one.up else {"goal" if one.person else "machine": one.words}


def cordons(known: Goals) -> Iterator[Cordon | Uncordon]:
    """Of Nodes without workers; of the others it is said with what Slurm says of them."""
    for where in known.at:
        node, one = known.found[where].node, known.of_node(where)
        if known.found[where].workers:
            continue
        if not one.up and not node.cordoned:
            yield Cordon(node.name, node.uid, node.version, f"goal {one.words}")
        elif one.up and node.ours:
            yield Uncordon(node.name, node.uid, node.version)


def kept(known: Goals, kubernetes: Kubernetes, slurm: Slurm, now: float, policy: Policy) -> Iterator[Action]:
    """What is new of each, and its next step. Of one whose Node cannot be read there is none."""
    machines, rules = kubernetes.machines or {}, policy.machines
    for verdict in sorted(known.common):
        yield Tell("fleet", "common", f"{verdict} stands against many machines at once: none is treated for that")
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
        after, act, said = seen(machine, place, now, rules.window_s), None, "is nowhere"
        if place is not None:
            turn = Turn(machine, place, one.goal, one.why, room > 0, kubernetes, slurm, now, rules)
            after, act, said = turn.step(after)
        room -= machine.status.remedy is None and after.remedy is not None
        why = f"would be {proposal.words}" if one.up and not proposal.up else "; ".join(filter(None, (one.why, said)))
        after = replace(after, goal=one.goal, why=line(why) if not (one.up and proposal.up) else "")
        if after.why:
            yield Tell(where or name, "propose" if one.up else "goal", f"{name}: {one.goal}: {after.why}")
        if isinstance(act, StartJob | CallHook):
            yield replace(act, after=replace(after, remedy=act.after.remedy))
            continue
        if act is not None:
            yield act
        if after != machine.status:
            yield Record(name, machine.version, after)
