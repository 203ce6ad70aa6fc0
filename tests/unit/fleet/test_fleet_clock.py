"""When clocks disagree the fleet cannot know which is wrong, and postpones timed actions that would end jobs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fleet.act.api_client import clock_offset
from fleet.decide.actions import Delete, Drain, Fence, Undrain, Unfence
from fleet.decide.decide import Decision
from fleet.policy import Policy
from fleet.world import slurm
from tests.fleet_pools_world import PoolWorlds
from tests.fleet_world import Worlds

WHY = "the API server's clock is behind the fleet's by over 30 s"


def doubted(worlds: Worlds, **further: object) -> Decision:
    return worlds.decide(replace(worlds.world(**further), clocks=WHY))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("asked", "heard", "said", "ahead"),
    [
        (100.0, 100.2, 100, 0.0),
        (100.9, 101.1, 100, 0.0),  # answered in the last tenth of second 100
        (100.0, 115.0, 107, 0.0),  # the server may have read its clock at any moment of a slow request
        (160.0, 160.1, 100, 59.0),
        (100.0, 100.5, 160, -59.5),
    ],
)
def test_what_was_said_on_the_way_is_no_difference(asked: float, heard: float, said: float, ahead: float) -> None:
    assert clock_offset(asked, heard, said) == pytest.approx(ahead)


@pytest.mark.parametrize("blind", ["", "slurm"])
def test_no_machine_is_dead_by_a_clock_that_is_not_believed(blind: str) -> None:
    worlds = Worlds(6, Policy(fencing="act"), "w-")
    worlds.look()
    worlds.dies("n5" if blind else "n0")
    worlds.now += 400
    decision = doubted(worlds, blind=blind)
    assert not [one for one in decision.changes if isinstance(one, Fence | Delete | Drain)]
    assert ("fleet", "clock", f"{WHY}: until you correct it, the fleet gives up no machine and no deadline ends") in [
        (one.about, one.kind, one.text) for one in decision.notices
    ]
    right = worlds.decide(worlds.world(blind=blind))
    assert [one for one in right.changes if isinstance(one, Fence | Drain)]
    assert "clock" not in {one.kind for one in right.notices}


def test_what_is_given_up_stays_so_and_what_is_held_stays_held() -> None:
    worlds = Worlds(6, Policy(fencing="act"), "w-")
    worlds.look()
    worlds.dies("n0")
    worlds.now += 400
    worlds.settle_in()
    held = {name: node.reason for name, node in worlds.slurm.items()}
    worlds.nodes["n0"].dead, worlds.nodes["n0"].ready, worlds.nodes["n0"].since = False, True, worlds.now
    worlds.now += 7200
    assert not [one for one in doubted(worlds).changes if isinstance(one, Unfence)]
    assert [one for one in worlds.decide(worlds.world()).changes if isinstance(one, Unfence)]
    assert {name: node.reason for name, node in worlds.slurm.items()} == held


def test_jobs_have_their_time_by_a_clock_that_is_believed() -> None:
    worlds = Worlds(policy=Policy(leave_within_s=600))
    worlds.slurm["w0"].jobs.add(7)
    worlds.annotate("w0", "minivm.io/leave", "new template")
    worlds.settle_in()
    worlds.now += 7200
    assert not [one for one in doubted(worlds).changes if isinstance(one, Drain | Undrain)]
    worlds.look()
    assert slurm.causes_in(worlds.slurm["w0"].reason) == {"deadline", "leave"}
    assert not [one for one in doubted(worlds).changes if isinstance(one, Drain | Undrain)], "what is over stays over"


@pytest.mark.parametrize(("when", "ends"), [({"when": "deadline", "deadlineSeconds": 3600}, 0), ({"when": "now"}, 1)])
def test_a_pools_own_deadline_is_of_a_clock_that_is_believed(when: dict[str, Any], ends: int) -> None:
    worlds = PoolWorlds()
    worlds.turns()
    for name in worlds.names:
        worlds.starts(name)
    worlds.roll("2", **when)
    worlds.look()
    worlds.now += 7200

    def over(decision: Decision) -> int:
        return sum(isinstance(one, Drain) and "deadline" in slurm.causes_in(one.reason) for one in decision.changes)

    held = sum("deadline" in slurm.causes_in(node.reason) for node in worlds.slurm.values())
    assert held + over(doubted(worlds)) == ends
    assert held + over(worlds.decide(worlds.world())) == 1
    if ends:
        return
    worlds.look()
    assert not [one for one in doubted(worlds).changes if isinstance(one, Undrain)], "what is over stays over"
