"""Random histories of Slurm and Kubernetes, with a fleet that is killed, has stale data, or lacks some of it.

The simulated worlds (`tests/fleet_world.py`) assert the invariants at each change; these tests check the final state.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet.decide.actions import Change, FleetMemory
from fleet.decide.causes import LIMITED
from fleet.policy import Policy, Topology
from fleet.world import slurm
from tests.fleet_world import OURS, Worlds

SIZE = 4
EVENTS: dict[str, Callable[[Worlds, str, str], object]] = {
    "cordon": lambda w, name, node: w.cordon(node),
    "uncordon": lambda w, name, node: w.cordon(node, on=False),
    "taint": lambda w, name, node: w.taint(node, "minivm.io/maintenance"),
    "untaint": lambda w, name, node: w.taint(node, None),
    "sign": lambda w, name, node: w.nodes[node].signs.update({"Sick": "True"}),
    "lie": lambda w, name, node: w.nodes[node].annotations.update({"minivm.io/cordoned": "no cordon"}),
    "unsign": lambda w, name, node: w.nodes[node].signs.clear(),
    "not ready": lambda w, name, node: w.ready(node, False),
    "ready": lambda w, name, node: w.ready(node),
    "drains": lambda w, name, node: w.person_drains(name),
    "resumes": lambda w, name, node: w.person_resumes(name),
    "comments": lambda w, name, node: setattr(w.slurm[name], "comment", "Ann's"),
    "job": lambda w, name, node: None if w.slurm[name].drained_by else w.slurm[name].jobs.add(7),
    "suspend": lambda w, name, node: w.slurm[name].suspended.update(w.slurm[name].jobs),
    "end": lambda w, name, node: w.jobs_end(name),
    "leave": lambda w, name, node: w.annotate(name, "minivm.io/leave", "x"),
    "stay": lambda w, name, node: w.annotate(name, "minivm.io/leave", None),
    "pod dies": lambda w, name, node: w.replace(name),
    "pod is ready": lambda w, name, node: setattr(w.pods[name], "ready", True),
    "silent": lambda w, name, node: setattr(w.slurm[name], "responds", False),
    "answers": lambda w, name, node: setattr(w.slurm[name], "responds", True),
    "down": lambda w, name, node: setattr(w.slurm[name], "down", True),
    "going": lambda w, name, node: w.taint(node, "karpenter.sh/disrupted"),
    "dies": lambda w, name, node: w.dies(node),
    "deletes the record": lambda w, name, node: None if w.slurm[name].jobs else w.slurm.pop(name),
    "pod goes": lambda w, name, node: w.pod_goes(name),
    "pod comes": lambda w, name, node: None if name in w.pods else w.replace(name),
    "slurmd goes": lambda w, name, node: w.slurmd_goes(name),
    "fewer": lambda w, name, node: w.scale(int(name[2:])),
    "more": lambda w, name, node: w.scale(SIZE),
    "names": lambda w, name, node: w.pending.add(name),
    "names no more": lambda w, name, node: w.pending.clear(),
    "wants none": lambda w, name, node: w.wants(node, "drain", "fan 3"),
    "wants it": lambda w, name, node: w.wants(node, "up"),
    "label": lambda w, name, node: w.nodes[node].labels.update({"rack": f"r{w.count}"}),
    "unlabel": lambda w, name, node: w.nodes[node].labels.pop("rack", None),
    "time": lambda w, name, node: setattr(w, "now", w.now + 70),
}
# These events also apply to names without a pod or record.
ALWAYS = {"pod comes", "fewer", "more", "names", "names no more", "time"}
LOOKS = ("look", "cut", "sees", "late", "blind to kubernetes", "blind to slurm", "blind to machines")
STEPS = st.lists(
    st.tuples(
        st.sampled_from([*EVENTS, *LOOKS, "look", "look", "look"]),
        st.integers(0, SIZE - 1),
        st.integers(0, 6),
    ),
    max_size=40,
)


def run(worlds: Worlds, steps: list[tuple[str, int, int]]) -> None:
    seen = worlds.world()
    for what, number, cut in steps:
        match what:
            case "look":
                seen = worlds.world()
                worlds.look()
            case "sees":
                seen = worlds.world()
            case "cut":
                worlds.look(cut=cut)
            case "late":
                worlds.look(world=seen)  # decided on an outdated snapshot
            case "blind to kubernetes" | "blind to slurm":
                assert not worlds.look_without(what.rpartition(" ")[2])
            case "blind to machines":
                worlds.look(blind="machines")  # all other decisions continue
            case _:
                name = worlds.names[number]
                if what in ALWAYS or (name in worlds.pods and name in worlds.slurm):
                    EVENTS[what](worlds, name, f"n{number}")
        held = [node for node in worlds.slurm.values() if node.drained_by == "fleet"]
        by_machines = [node for node in held if slurm.causes_in(node.reason) & LIMITED]
        assert len(by_machines) <= max(1, int(SIZE * worlds.policy.share)), "above budget"


@settings(max_examples=300, deadline=None)
@given(
    STEPS,
    st.booleans(),
    st.sampled_from([0.2, 0.5]),
    st.sampled_from([2, 30]),
    st.sampled_from([0.0, 150.0]),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
def test_whatever_happens_nothing_is_touched_that_is_not_ours_and_it_settles(
    steps: list[tuple[str, int, int]],
    cordon: bool,
    share: float,
    changes: int,
    within: float,
    act: bool,
    returns: bool,
    keeps: bool,
    places: bool,
) -> None:
    policy = Policy(
        conditions=("Sick",),
        cordon=cordon,
        share=share,
        changes=changes,
        leave_within_s=within,
        fencing="act" if act else "propose",
        topology=Topology(("rack",) if places else ()),
    )
    worlds = Worlds(SIZE, policy, "w-")
    worlds.returns = returns
    worlds.machines = {} if keeps else None
    run(worlds, steps)
    for dead in [name for name, node in worlds.nodes.items() if node.dead]:
        worlds.ready(dead)
    persons = {name for name, node in worlds.slurm.items() if node.drained_by == "person"}
    worlds.settle()
    decision = worlds.decide(worlds.world())
    told = {(one.about, one.kind) for one in decision.notices}
    for number, name in enumerate(worlds.names):
        if name not in worlds.pods:
            if name in worlds.slurm and name not in worlds.pending and ("fleet", "pause") not in told:
                assert worlds.slurm[name].drained_by != "fleet", "its name does not come back"
            continue
        machine, pod, node = worlds.nodes[f"n{number}"], worlds.pods[name], worlds.slurm[name]
        cordoned = machine.cordoned and OURS not in machine.labels
        wanted = worlds.goal(f"n{number}") in ("", "up")
        by_person = cordoned or bool(machine.taints) or "minivm.io/leave" in pod.annotations or not wanted
        if worlds.machines is not None and not by_person and not cordon:
            assert not machine.cordoned, "the cordon of a goal goes with it"
        if (name, "topology") not in told:
            wanted_place = f"default:/:{machine.labels.get('rack', 'unknown')}" if places else ""
            assert node.place == wanted_place, "it is where the labels of its Node say"
        by_machine = bool(machine.signs) or not machine.ready
        assert pod.free is bool(node.drained_by), "what may be evicted is what is drained and idle"
        if name in persons:
            assert (node.drained_by, node.reason) == ("person", "look at fan 3")
        elif by_person or (by_machine and ("fleet", "pause") not in told):
            refused = (name, "lifted") in told
            assert (node.drained_by == "fleet") is not refused, "held, unless a person has said no twice"
        elif not by_machine:
            assert node.drained_by == "", "no cause, no drain"
            assert slurm.mark_in_comment(node.comment) is None, "and nothing left behind"


class Killed(Exception):
    pass


class Cut(Worlds):
    """World that kills the fleet after `left` changes.

    The fleet's memory and its remaining changes are lost. With `again`, the next fleet is killed too.
    """

    left = again = -1

    def perform(self, change: Change) -> None:
        if self.left == 0:
            self.left = self.again
            raise Killed
        self.left -= 1
        super().perform(change)

    def look_on(self) -> None:
        """Run passes until two in a row change nothing; a killed fleet is restarted."""
        idle = 0
        for _ in range(25 if self.again < 0 else 250):
            try:
                idle = 0 if self.look() else idle + 1
                if idle == 2:
                    return
                self.now += self.policy.lost_s if idle else 0
            except Killed:
                self.memory, idle = FleetMemory(), 0
            for pod in self.pods.values():
                pod.ready = True
        raise AssertionError("it never ends")


Story = tuple[Callable[[Worlds], object], ...]
STORIES: dict[str, Story] = {
    "cordon": (lambda w: w.cordon("n0"), lambda w: w.cordon("n0", on=False)),
    "all cordoned": (lambda w: w.cordon(*w.nodes), lambda w: w.cordon(*w.nodes, on=False)),
    "taint": (
        lambda w: w.taint("n0", "minivm.io/maintenance"),
        lambda w: w.taint("n0", None),
    ),
    "a person's drain": (
        lambda w: w.person_drains("w-0"),
        lambda w: w.cordon("n0"),
        lambda w: w.cordon("n0", on=False),
    ),
    "lifted once": (lambda w: w.cordon("n0"), lambda w: w.person_resumes("w-0"), lambda w: w.cordon("n0", on=False)),
    "lifted twice": (
        lambda w: w.cordon("n0"),
        lambda w: w.person_resumes("w-0"),
        lambda w: w.person_resumes("w-0"),
        lambda w: w.cordon("n0", on=False),
    ),
    "leave": (
        lambda w: w.slurm["w-0"].jobs.add(7),
        lambda w: w.annotate("w-0", "minivm.io/leave", "x"),
        lambda w: w.slurm["w-0"].jobs.clear(),
    ),
    "stay": (
        lambda w: w.slurm["w-0"].jobs.add(7),
        lambda w: w.annotate("w-0", "minivm.io/leave", "x"),
        lambda w: w.annotate("w-0", "minivm.io/leave", None),
    ),
    "not ready": (lambda w: w.ready("n0", False), lambda w: setattr(w, "now", w.now + 400), lambda w: w.ready("n0")),
    "free and back": (
        lambda w: w.person_drains("w-0"),
        lambda w: w.person_resumes("w-0"),
        lambda w: w.cordon("n0"),
        lambda w: w.slurm["w-0"].jobs.add(7),
        lambda w: w.slurm["w-0"].jobs.clear(),
        lambda w: w.cordon("n0", on=False),
    ),
    "going": (
        lambda w: w.slurm["w-0"].jobs.add(7),
        lambda w: w.taint("n0", "karpenter.sh/disrupted"),
        lambda w: w.jobs_end("w-0"),
        lambda w: w.taint("n0", None),
    ),
    "deadline": (
        lambda w: w.slurm["w-0"].jobs.add(7),
        lambda w: w.annotate("w-0", "minivm.io/leave", "x"),
        lambda w: w.later(),
        lambda w: w.slurmd_answers("w-0"),
    ),
    "deadline and stay": (
        lambda w: w.slurm["w-0"].jobs.add(7),
        lambda w: setattr(w, "policy", Policy(cordon=True, leave_within_s=500, away=0)),
        lambda w: w.annotate("w-0", "minivm.io/leave", "x"),
        lambda w: w.later(),
        lambda w: w.annotate("w-0", "minivm.io/leave", None),
    ),
    "dead": (
        lambda w: w.slurm["w-0"].jobs.add(7),
        lambda w: w.dies("n0"),
        lambda w: w.later(),
        lambda w: w.slurmd_answers("w-0"),
        lambda w: w.ready("n0"),
        lambda w: w.later(),
    ),
    "the controller's machine": (
        lambda w: w.dies("n2", ago=600),
        lambda w: w.ready("n2"),
        lambda w: w.later(),
    ),
    "lost": (
        lambda w: w.slurm.pop("w-0"),
        lambda w: w.later(),
    ),
    "lost, of an older image": (
        lambda w: w.dull.add(w.pods["w-0"].uid),
        lambda w: w.slurm.pop("w-0"),
        lambda w: w.later(),
    ),
    "moved": (
        lambda w: w.cordon("n0"),
        lambda w: w.replace("w-0", "n1"),
    ),
    "gone and back": (
        lambda w: w.slurm["w-2"].jobs.add(7),
        lambda w: w.pod_goes("w-2"),
        lambda w: w.later(),
        lambda w: w.slurmd_goes("w-2"),
        lambda w: w.replace("w-2"),
        lambda w: w.slurmd_answers("w-2"),
    ),
    "gone for good": (
        lambda w: w.scale(2),
        lambda w: w.later(),
        lambda w: w.pending.add("w-2"),
        lambda w: w.pending.clear(),
    ),
    "a goal": (
        lambda w: w.wants("n0", "drain", "fan 3"),
        lambda w: w.person_resumes("w-0"),
        lambda w: w.pod_goes("w-0"),
        lambda w: w.later(),
        lambda w: w.replace("w-0"),
        lambda w: w.slurmd_answers("w-0"),
        lambda w: w.wants("n0", "up"),
    ),
    "a goal on a person's drain": (
        lambda w: w.person_drains("w-0"),
        lambda w: w.wants("n0", "drain", "fan 3"),
        lambda w: w.wants("n0", ""),
    ),
    "shown": (lambda w: w.person_drains("w-0"), lambda w: w.person_resumes("w-0")),
    "all leave": (lambda w: w.all_leave(),),
}


def told(story: Story, cut: int, upto: int, again: int = -1) -> tuple[object, int]:
    worlds = Cut(3, Policy(cordon=True, leave_within_s=500, fencing="act"), "w-")
    worlds.machines = {}
    worlds.left, worlds.again = cut, again
    worlds.look_on()
    for event in story[:upto]:
        event(worlds)
        worlds.look_on()
    return worlds.end(), len(worlds.done)


TURNS = [(name, upto) for name, story in STORIES.items() for upto in range(1, len(story) + 1)]


@pytest.mark.parametrize(("name", "upto"), TURNS)
def test_killed_between_any_two_changes_of_a_story_it_ends_the_same(name: str, upto: int) -> None:
    """A fleet that is killed between any two changes reaches the same end.

    This holds at each step of a story, when its first `upto` events have happened.
    """
    wanted, changes = told(STORIES[name], -1, upto)
    assert changes, "a story in which nothing is done shows nothing"
    for cut in range(changes + 1):
        assert told(STORIES[name], cut, upto)[0] == wanted, f"cut after {cut} of {changes} changes"


@pytest.mark.parametrize("name", STORIES)
def test_killed_after_every_single_change_of_a_story_it_ends_the_same(name: str) -> None:
    """A fleet that is killed after each change reaches the same end.

    No fleet makes more than one change, and none remembers the change of its predecessor.
    """
    story = STORIES[name]
    wanted, changes = told(story, -1, len(story))
    found, many = told(story, 1, len(story), 1)
    assert found == wanted
    assert many <= 2 * changes, "and no change is made and taken back for ever"
