"""Random histories of an elastic pool, with a fleet that is killed, has stale data, or lacks some of it.

The simulated worlds assert the invariants at each change: no pod is removed that has a job, is named by a reservation,
or is not drained by the fleet; no pod has a name beyond max.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fleet.decide.actions import Change, FleetMemory
from fleet.policy import Policy
from tests.fleet_elastic_world import ElasticWorlds

SIZE = 4
EVENTS: dict[str, Callable[[ElasticWorlds, int], object]] = {
    "submit": lambda w, n: w.submit(n + 1),
    "submit what never begins": lambda w, n: w.submit(n + 1, stuck=True),
    "submit what waits for another": lambda w, n: w.submit(n + 1, reason="Dependency"),
    "end": lambda w, n: w.is_done(min(w.queue, default=0)),
    "schedule": lambda w, n: w.schedules(),
    "kubelets": lambda w, n: w.kubelets(),
    "seconds": lambda w, n: setattr(w, "now", w.now + 20),
    "minutes": lambda w, n: setattr(w, "now", w.now + 700),
    "reserved": lambda w, n: w.reserved.add(f"w-{n}"),
    "reserved no more": lambda w, n: w.reserved.discard(f"w-{n}"),
    "template": lambda w, n: w.roll(str(n)),
    "breaks": lambda w, n: w.broken.add(w.read().hash),
    "max": lambda w, n: w.elastic_is(max=n + 1, min=min(n, w.read().elastic.minimum)),  # type: ignore[union-attr]  # it is one
    "min": lambda w, n: w.elastic_is(min=min(n, w.most)),
    "none may": lambda w, n: w.roll("1", maxUnavailable=n % 2),
    "not asked": lambda w, n: setattr(w, "asked", n % 2 == 0),
    "claims not asked": lambda w, n: setattr(w, "claims", n % 2 == 0),
}
OF_ONE: dict[str, Callable[[ElasticWorlds, str], object]] = {
    "drains": lambda w, name: w.person_drains(name),
    "resumes": lambda w, name: w.person_resumes(name),
    "suspends": lambda w, name: w.slurm[name].suspended.update(w.slurm[name].jobs),
    "pod is not ready": lambda w, name: setattr(w.pods[name], "ready", False),
    "pod dies": lambda w, name: w.pod_goes(name),
    "record goes": lambda w, name: None if w.slurm[name].jobs else w.slurm.pop(name),
    "cordon": lambda w, name: w.cordon(w.pods[name].node),
}
LOOKS = ("look", "cut", "sees", "late", "blind to kubernetes", "blind to slurm", "blind to pools")
STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            [*EVENTS, *OF_ONE, *LOOKS, *["look"] * 6, "submit", "kubelets", "schedule", "minutes", "kubelets"]
        ),
        st.integers(0, SIZE - 1),
    ),
    max_size=50,
)


def run(worlds: ElasticWorlds, steps: list[tuple[str, int]]) -> None:
    seen = worlds.world()
    for what, number in steps:
        match what:
            case "look":
                seen = worlds.world()
                worlds.look()
            case "sees":
                seen = worlds.world()
            case "cut":
                worlds.look(cut=number)
            case "late":
                worlds.look(world=seen)
            case "blind to kubernetes" | "blind to slurm":
                assert not worlds.look_without(what.rpartition(" ")[2])
            case "blind to pools":
                worlds.look(blind="pools")
            case what if what in EVENTS:
                EVENTS[what](worlds, number)
            case _:
                name = f"w-{number}"
                if name in worlds.pods and name in worlds.slurm:
                    OF_ONE[what](worlds, name)


@settings(max_examples=200, deadline=None)
@given(STEPS, st.integers(0, SIZE), st.integers(0, 2), st.integers(1, 3))
# One pod is surplus and another is due for replacement; then the first is needed again and has the old template.
@example([("submit", 0), ("template", 0), ("look", 0), ("look", 0)], 2, 0, 1)
# A reservation names a node that has not registered, with and without the fleet knowing the reservations.
@example([("reserved", 0), ("look", 0), ("max", 0), ("minutes", 0), ("look", 0), ("look", 0)], 0, 1, 1)
@example(
    [("reserved", 0), ("look", 0), ("max", 0), ("minutes", 0), ("claims not asked", 1), ("look", 0), ("look", 0)],
    0,
    1,
    1,
)
# Other pods are unavailable by themselves, and there is a surplus too.
@example([("pod is not ready", 1), ("pod is not ready", 2), ("look", 0), ("blind to pools", 0)], 3, 0, 1)
# A person resumes the node twice.
@example([("look", 0), ("resumes", 0), ("look", 0), ("drains", 0)], 1, 0, 1)
# The pod is about to be removed, and reservations are unknown in the pass that would remove it.
@example([("look", 0), ("reserved", 0), ("claims not asked", 1), ("look", 0), ("look", 0), ("look", 0)], 1, 0, 1)
def test_whatever_happens_no_pod_with_a_job_goes_max_is_never_passed_and_it_ends_at_min(
    steps: list[tuple[str, int]], size: int, least: int, step: int
) -> None:
    worlds = ElasticWorlds(size, Policy(share=1.0), min=least, step=step)
    run(worlds, steps)
    worlds.broken.clear()
    worlds.reserved.clear()
    worlds.asked = worlds.claims = True
    for number in list(worlds.queue):
        worlds.is_done(number)
    if not worlds.read().max_unavailable:
        worlds.roll("1", maxUnavailable=1)
    worlds.all_well()
    for node in worlds.slurm.values():
        if not node.drained_by:
            node.comment = ""  # a node that a person resumed twice keeps taking jobs while this comment exists
    worlds.now += 3600
    worlds.all_well()
    wants = worlds.read().elastic
    assert wants is not None and len(worlds.pods) == wants.minimum, (sorted(worlds.pods), wants)
    assert worlds.updated() == set(worlds.pods), "and all of them of the present template"
    assert {name for name, node in worlds.slurm.items() if node.drained_by == "fleet"} == worlds.slurm.keys() - set(
        worlds.pods
    ), "who is there takes jobs, and who is not gets none"


def settles(worlds: ElasticWorlds) -> None:
    """Assert that the fleet settles while jobs and reservations stay the same.

    The queue and the reservations are known in every third pass, as with a real fleet.
    """
    worlds.broken.clear()
    for number in range(140):
        worlds.asked = worlds.claims = number % 3 == 0
        worlds.look()
        if number < 110:
            worlds.done.clear()
        assert not worlds.done, worlds.done[-8:]
        worlds.kubelets()
        worlds.schedules()
        worlds.now += 60


@settings(max_examples=60, deadline=None)
@given(STEPS, st.integers(0, SIZE), st.integers(0, 2), st.integers(1, 3))
# The pod is about to be removed and may be evicted by others, and then a reservation names it.
@example([("look", 0), ("look", 0), ("reserved", 0)], 1, 0, 1)
def test_where_demand_stays_the_same_it_settles(steps: list[tuple[str, int]], size: int, least: int, step: int) -> None:
    worlds = ElasticWorlds(size, Policy(share=1.0), min=least, step=step)
    run(worlds, steps)
    settles(worlds)


def test_who_is_named_before_he_goes_takes_jobs_again() -> None:
    worlds = ElasticWorlds(1)
    worlds.look()
    worlds.look()
    assert worlds.slurm["w-0"].drained_by == "fleet" and worlds.pods["w-0"].free
    worlds.reserved.add("w-0")
    settles(worlds)
    assert not worlds.slurm["w-0"].drained_by and not worlds.pods["w-0"].free


class Killed(Exception):
    pass


class Cut(ElasticWorlds):
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
            if quiet == 4:
                return
            self.kubelets()
            self.schedules()
            self.now += 60
        raise AssertionError("it never ends")


# Longer than any story takes by itself.
LONG_S = 100_000


def later(worlds: ElasticWorlds) -> None:
    worlds.now += LONG_S


Story = tuple[Callable[[ElasticWorlds], object], ...]
STORIES: dict[str, Story] = {
    "grows and shrinks": (
        lambda w: w.submit(3),
        lambda w: w.is_done(min(w.queue)),
        later,
        lambda w: w.submit(2),
    ),
    "is asked again as it goes": (later, lambda w: w.submit(4)),
    "fewer at most": (lambda w: w.submit(4), lambda w: w.elastic_is(max=2), lambda w: w.is_done(min(w.queue)), later),
}


def ends(story: Story, cut: int, upto: int) -> tuple[object, int]:
    worlds = Cut(2, idleSeconds=LONG_S)
    worlds.left = cut
    worlds.look_on()
    for event in story[:upto]:
        event(worlds)
        worlds.look_on()
    pods = {name: pod.free for name, pod in worlds.pods.items()}
    held = {name: (node.drained_by, node.reason if node.drained_by else "") for name, node in worlds.slurm.items()}
    jobs = {number: len(job.on) for number, job in worlds.queue.items()}
    status = [(one.type, one.status, one.message) for one in worlds.read().status.conditions]
    return (pods, held, jobs, status, worlds.read().status.wanted), len(worlds.done)


TURNS = [(name, upto) for name, story in STORIES.items() for upto in range(1, len(story) + 1)]


@pytest.mark.parametrize(("name", "upto"), TURNS)
def test_killed_between_any_two_changes_an_elastic_pool_ends_the_same(name: str, upto: int) -> None:
    wanted, changes = ends(STORIES[name], -1, upto)
    for cut in range(changes + 1):
        assert ends(STORIES[name], cut, upto)[0] == wanted, f"cut after {cut} of {changes} changes"
