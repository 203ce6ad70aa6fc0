"""Failures of many machines at once, as of a cable, a switch or an API server: not treated as many single failures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from fleet.decide.actions import Drain, RefusedChange, ShowOnPod, Undrain
from fleet.policy import Policy
from tests.fleet_world import Worlds

SIZE, MANY, WITHIN_S = 100, 30, 60
# Drains before the pause: a missing pod has half a minute for its successor, so a few drains precede the limit.
HAPPENS: dict[str, tuple[int, Callable[[Worlds, int], object]]] = {
    "their kubelets fall silent": (0, lambda worlds, number: worlds.ready(f"n{number}", False)),
    "their pods are gone": (5, lambda worlds, number: worlds.pod_goes(worlds.names[number])),
}


def goes_on(worlds: Worlds, seconds: int, happens: Callable[[int], object] = lambda second: None) -> set[str]:
    """Run a pass each second, and return the kinds of notices."""
    told = set()
    for second in range(seconds):
        worlds.now += 1
        happens(second)
        worlds.look()
        told |= {kind for _, kind in worlds.memory.reported}
    return told


@pytest.mark.parametrize("what", HAPPENS)
def test_many_that_go_one_after_the_other_are_a_pause_and_not_drained_until_they_are_too_many(what: str) -> None:
    worlds, (few, happen) = Worlds(SIZE, prefix="w-"), HAPPENS[what]
    worlds.settle_in()

    def happens(second: int) -> None:
        if second < WITHIN_S and second * MANY % WITHIN_S == 0:
            happen(worlds, second * MANY // WITHIN_S)

    told = goes_on(worlds, 3 * WITHIN_S, happens)
    assert "pause" in told
    assert sum(node.drained_by == "fleet" for node in worlds.slurm.values()) <= few


def test_when_they_are_back_it_is_over_and_one_that_goes_alone_is_drained_as_ever() -> None:
    worlds = Worlds(SIZE, prefix="w-")
    worlds.settle_in()
    for number in range(MANY):
        worlds.ready(f"n{number}", False)
    assert "pause" in goes_on(worlds, 2 * WITHIN_S)
    for number in range(MANY):
        worlds.ready(f"n{number}")
    goes_on(worlds, 1)
    assert "pause" not in {kind for _, kind in worlds.memory.reported}
    worlds.ready("n7", False)
    assert "pause" not in goes_on(worlds, 2 * WITHIN_S)
    assert [name for name, node in worlds.slurm.items() if node.drained_by == "fleet"] == ["w-7"]


def test_what_ends_no_job_does_not_wait_for_the_budget_of_what_may() -> None:
    worlds = Worlds(SIZE, Policy(changes=10, rate=20), prefix="w-")

    def many(kind: type) -> int:
        return sum(isinstance(change, kind) for change in worlds.decide(worlds.world()).changes)

    assert many(ShowOnPod) == 60, "of a hundred, at 20 a second and for three"
    worlds.settle_in()
    for name in worlds.nodes:
        worlds.cordon(name)
    assert many(Drain) == 10
    worlds.settle_in(most=50)
    worlds.policy = Policy(changes=10, rate=200)
    for name in worlds.nodes:
        worlds.cordon(name, on=False)
    worlds.look()  # each pod is protected first
    assert many(Undrain) == SIZE


def test_of_however_many_that_are_refused_again_and_again_others_have_their_turn() -> None:
    """Changes that are refused again and again do not starve other changes.

    A policy denies all changes of pods: a thousand are retried every half minute, some in each pass.
    """
    worlds = Worlds(SIZE, Policy(changes=10, rate=10), prefix="w-")
    worlds.settle_in(most=100)
    no, others = worlds.names[:50], worlds.names[50:]
    for name in no:
        worlds.pods[name].free = True
    for name in others:
        worlds.pods[name].condition = None
    refused = {("Protect", name): RefusedChange(9, "no", worlds.now) for name in no}
    worlds.memory = replace(worlds.memory, refused=refused)
    changes = worlds.decide(worlds.world()).changes
    assert (len(changes), sum(isinstance(change, ShowOnPod) for change in changes)) == (30, 15)
