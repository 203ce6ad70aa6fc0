"""Random histories of a pool, with a fleet that is killed, has stale data, or lacks some of it.

The simulated worlds (`tests/fleet_pools_world.py`) assert the invariants at each change: no pod is removed whose node
runs a job or is not drained by the fleet, no more than `maxUnavailable`, and no pod of another owner.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet.decide.actions import (
    Change,
    CreatePod,
    Evict,
    FleetMemory,
    Free,
    NotePool,
    ShowOnNode,
    ShowOnPod,
    object_name,
)
from fleet.policy import Policy
from tests.fleet_pools_world import PoolWorlds
from tests.support.pool_events import EVENTS

SIZE = 4
# These events also apply to names without a pod or record.
OF_POOL: dict[str, Callable[[PoolWorlds, int], object]] = {
    "template": lambda w, number: w.roll(str(number)),
    "breaks": lambda w, number: w.broken.add(w.read().hash),
    "fewer": lambda w, number: w.wants_of_it(replicas=number),
    "none may": lambda w, number: w.roll("1", maxUnavailable=0),
    "many may": lambda w, number: w.roll("1", maxUnavailable=2),
    "label": lambda w, number: w.nodes[f"n{number}"].labels.pop("gpu", None),
    "label again": lambda w, number: w.nodes[f"n{number}"].labels.update(gpu="yes"),
    "kubelets": lambda w, number: w.kubelets(),
    "left": lambda w, number: w.left_alone(number),
    "time": lambda w, number: setattr(w, "now", w.now + 70),
    "hours": lambda w, number: setattr(w, "now", w.now + 7200),
}
LOOKS = ("look", "cut", "sees", "late", "blind to kubernetes", "blind to slurm", "blind to pools")
STEPS = st.lists(
    st.tuples(
        st.sampled_from([*EVENTS, *OF_POOL, *LOOKS, "look", "look", "look", "job", "kubelets"]),
        st.integers(0, SIZE - 1),
        st.integers(0, 6),
    ),
    max_size=40,
)


def run(worlds: PoolWorlds, steps: list[tuple[str, int, int]]) -> None:
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
                worlds.look(world=seen)
            case "blind to kubernetes" | "blind to slurm":
                assert not worlds.look_without(what.rpartition(" ")[2])
            case "blind to pools":
                worlds.look(blind="pools")
            case what if what in OF_POOL:
                OF_POOL[what](worlds, number)
            case _:
                name = worlds.names[number]
                if name in worlds.pods and name in worlds.slurm:
                    EVENTS[what](worlds, name, f"n{number}")


HOW = st.sampled_from([{}, {"when": "now"}, {"when": "deadline", "deadlineSeconds": 3600}, {"maxUnavailable": 2}])


@settings(max_examples=150, deadline=None)
@given(STEPS, HOW, st.booleans(), st.sampled_from([2, 30]))
def test_whatever_happens_no_pod_with_a_job_goes_no_more_than_may_be_are_away_and_it_settles(
    steps: list[tuple[str, int, int]], how: dict[str, Any], per_node: bool, changes: int
) -> None:
    worlds = PoolWorlds(SIZE, Policy(changes=changes, share=1.0), per_node=per_node, **how)
    run(worlds, steps)
    worlds.broken.clear()
    if not worlds.read().max_unavailable:
        worlds.roll("1", maxUnavailable=1)
    worlds.all_well()
    assert set(worlds.pods) == set(worlds.world_names()) == worlds.updated()
    assert not [name for name, node in worlds.slurm.items() if node.drained_by == "fleet"], "and nothing is left behind"
    assert {one.status for one in worlds.read().status.conditions} == {"True"}


KINDS = (CreatePod, NotePool, ShowOnPod, ShowOnNode, Evict, Free)


@settings(max_examples=30, deadline=None)
@given(st.sets(st.sampled_from(KINDS)), st.sets(st.integers(0, 7)), st.integers(2, 5), st.sampled_from([3, 8]), HOW)
def test_whatever_is_refused_all_else_settles(
    kinds: set[type], numbers: set[int], changes: int, size: int, how: dict[str, Any]
) -> None:
    """Refused changes do not keep the rest of the pool from settling.

    A quota, a policy or a budget may refuse changes of any pods, for ever.
    """
    worlds = PoolWorlds(4, Policy(changes=changes, share=1.0, node_condition=""), **{**how, "maxUnavailable": 40})
    names = {f"w-{number}" for number in numbers}
    worlds.refuses = lambda change: type(change) in kinds and object_name(change) in {*names, "w"}
    worlds.wants_of_it(replicas=size)
    worlds.roll("2")
    for _ in range(120):
        worlds.look()
        worlds.kubelets()
        worlds.now += 5
    free = {f"w-{number}" for number in range(size)} - (names if kinds & {CreatePod, Evict, Free} else set())
    assert free <= worlds.updated(), "those that nobody refuses are as they are to be"
    if NotePool not in kinds:
        assert worlds.read().status.updated == len(worlds.updated() & worlds.world_names().keys())


class Killed(Exception):
    pass


class Cut(PoolWorlds):
    """World that kills the fleet once, after `left` changes."""

    left = -1

    def perform(self, change: Change) -> None:
        if self.left == 0:
            self.left = -1
            raise Killed
        self.left -= 1
        super().perform(change)

    def look_on(self) -> None:
        quiet = 0
        for _ in range(80):
            try:
                quiet = 0 if self.look() else quiet + 1
            except Killed:
                self.memory, quiet = FleetMemory(), 0
            if quiet == 3:
                return
            self.kubelets()
            self.now += 60
        raise AssertionError("it never ends")


Story = tuple[Callable[[PoolWorlds], object], ...]
STORIES: dict[str, Story] = {
    "a roll": (lambda w: w.starts("w-1"), lambda w: w.roll("2"), lambda w: w.jobs_end("w-1")),
    "back again": (lambda w: w.starts("w-0"), lambda w: w.roll("2"), lambda w: w.roll("1")),
    "more and fewer": (lambda w: w.wants_of_it(replicas=5), lambda w: w.wants_of_it(replicas=2)),
    "now": (lambda w: [w.starts(name) for name in w.names], lambda w: w.roll("2", when="now")),
    "a person's": (lambda w: w.person_drains("w-0"), lambda w: w.roll("2"), lambda w: w.person_resumes("w-0")),
    "ended": (lambda w: w.starts("w-1"), lambda w: w.ends("w-1"), lambda w: w.ends("w-1"), lambda w: w.roll("2")),
    "taken over": (lambda w: w.left_alone(0), lambda w: w.left_alone(2), lambda w: w.roll("2")),
}


def ends(story: Story, cut: int, upto: int) -> tuple[object, int]:
    worlds = Cut(3)
    worlds.left = cut
    worlds.look_on()
    for event in story[:upto]:
        event(worlds)
        worlds.look_on()
    pods = {name: (pod.free, worlds.templates[name], worlds.owner[name]) for name, pod in worlds.pods.items()}
    held = {name: (node.drained_by, node.reason, node.comment) for name, node in worlds.slurm.items()}
    status = [(one.type, one.status, one.message) for one in worlds.read().status.conditions]
    return (pods, held, status), len(worlds.done)


TURNS = [(name, upto) for name, story in STORIES.items() for upto in range(1, len(story) + 1)]


@pytest.mark.parametrize(("name", "upto"), TURNS)
def test_killed_between_any_two_changes_a_pool_ends_the_same(name: str, upto: int) -> None:
    wanted, changes = ends(STORIES[name], -1, upto)
    for cut in range(changes + 1):
        assert ends(STORIES[name], cut, upto)[0] == wanted, f"cut after {cut} of {changes} changes"
