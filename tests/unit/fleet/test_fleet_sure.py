"""Bugs in the fleet's decisions: the bug is reported, nothing is changed, and the decision is retried with backoff."""

from __future__ import annotations

import pytest

from fleet.decide import decide as decide_module
from fleet.decide.actions import FleetMemory, Notice
from fleet.decide.decide import Decision
from fleet.decide.decide import decide as whole
from fleet.policy import Policy
from fleet.world.kubernetes import KubernetesView
from fleet.world.slurm import SlurmView
from fleet.world.snapshot import FleetSnapshot

WORLD = FleetSnapshot(KubernetesView(), SlurmView())


def broken(world: FleetSnapshot, memory: FleetMemory, now: float, policy: Policy) -> Decision:
    raise ValueError("of w0:\nundrain w1\x1b[2J " + "y" * 5000)


def test_nothing_is_done_and_it_is_told_once_in_one_short_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decide_module, "decide", broken)
    first = decide_module.decide_safely(WORLD, FleetMemory(absent={"w0": 1.0}), 100.0, Policy())
    assert first.changes == ()
    (told,) = first.news
    assert (told.about, told.kind) == ("fleet", "mistake")
    assert told.text.startswith("nothing is decided: ValueError: of w0: undrain w1 [2J yyy")
    assert "\n" not in told.text and len(told.text) < 1024, "whatever others may have written into it"
    assert "in broken" in first.mistake and "test_fleet_sure.py" in first.mistake
    assert first.memory.absent == {}, "it may be what it has fallen over"
    again = decide_module.decide_safely(WORLD, first.memory, 101.0, Policy())
    assert (again.news, again.notices) == ((), (told,))
    monkeypatch.setattr(decide_module, "decide", whole)
    well = decide_module.decide_safely(WORLD, again.memory, 102.0, Policy())
    assert (well.notices, well.mistake, decide_module.read_mistake(well)) == ((), "", "")


def test_it_is_tried_again_later_each_time_and_at_once_after_it_was_well() -> None:
    wrong = Decision((), (Notice("fleet", decide_module.MISTAKE, "nothing is decided: x"),), (), FleetMemory(), "trace")
    patience, now, pauses = decide_module.Backoff(), 0.0, []
    for _ in range(8):
        patience.update(wrong, now)
        assert patience.mistake == "nothing is decided: x"
        assert patience.waits(patience.until - 0.001) and not patience.waits(patience.until)
        pauses.append(patience.until - now)
        now = patience.until
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]
    patience.update(Decision((), (), (), FleetMemory()), now)
    assert patience.mistake == "" and not patience.waits(now)
    patience.update(wrong, now)
    assert patience.until - now == 1.0
