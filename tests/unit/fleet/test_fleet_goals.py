"""Goals that people set for a machine: their effect in Slurm and on the Node, without lifting other drains."""

from __future__ import annotations

import pytest

from fleet.decide.actions import Cordon, Drain, Uncordon, Undrain
from tests.fleet_world import OURS, Worlds

REASON = "minivm: fleet: goal: drain fan 3"


@pytest.fixture
def worlds() -> Worlds:
    made = Worlds(3)
    made.machines = {}
    made.settle_in()
    made.done.clear()
    return made


def did(worlds: Worlds) -> list[object]:
    return [type(one) for one in worlds.done if isinstance(one, Drain | Undrain | Cordon | Uncordon)]


@pytest.mark.parametrize("goal", ["drain", "reboot", "replace", "down"])
def test_a_goal_drains_and_cordons_with_its_reason_and_its_end_lifts_both(worlds: Worlds, goal: str) -> None:
    worlds.wants("n0", goal, "fan 3")
    worlds.settle_in()
    asks = {"reboot": "goal+proof", "replace": "goal+proof"}.get(goal, "goal")
    more = ", a deep check is to pass" if "proof" in asks else ""
    assert worlds.slurm["w0"].reason == f"minivm: fleet: {asks}: {goal} fan 3{more}"
    assert worlds.nodes["n0"].cordoned and OURS in worlds.nodes["n0"].labels
    status = worlds.status("n0")
    assert (status.goal, status.why.partition(";")[0], status.state) == (goal, "fan 3", "Drained")
    assert not worlds.slurm["w1"].drained_by
    worlds.wants("n0", "up")
    worlds.settle_in()
    assert (worlds.slurm["w0"].drained_by, worlds.slurm["w0"].comment, worlds.nodes["n0"].cordoned) == ("", "", False)
    assert (worlds.status("n0").goal, worlds.status("n0").why) == ("up", "")


@pytest.mark.parametrize("end", ["up", ""])
def test_what_others_have_set_stays(worlds: Worlds, end: str) -> None:
    worlds.cordon("n0")
    worlds.person_drains("w1")
    worlds.settle_in()
    worlds.done.clear()
    for node in ("n0", "n1"):
        worlds.wants(node, "drain", "fan 3")
    worlds.settle_in()
    for node in ("n0", "n1"):
        worlds.wants(node, end)
    worlds.settle_in()
    assert worlds.nodes["n0"].cordoned, "a person's cordon"
    assert worlds.slurm["w0"].drained_by == "fleet", "and what follows from it"
    assert worlds.slurm["w1"].reason == "look at fan 3", "a person's drain"
    assert not worlds.nodes["n1"].cordoned


def test_a_pod_that_comes_to_it_is_drained_too(worlds: Worlds) -> None:
    worlds.wants("n0", "drain", "fan 3")
    worlds.settle_in()
    worlds.pod_goes("w0")
    worlds.replace("w1", "n0")
    worlds.settle_in()
    assert worlds.slurm["w1"].reason == REASON


def test_a_machine_without_a_worker_is_cordoned_and_taken_back(worlds: Worlds) -> None:
    worlds.pod_goes("w0")
    worlds.wants("n0", "down", "fan 3")
    worlds.settle_in()
    assert worlds.nodes["n0"].cordoned
    worlds.wants("n0", "")
    worlds.settle_in()
    assert not worlds.nodes["n0"].cordoned


def test_where_machines_are_not_known_nothing_of_theirs_is_lifted(worlds: Worlds) -> None:
    worlds.wants("n0", "drain", "fan 3")
    worlds.settle_in()
    worlds.done.clear()
    worlds.cordon("n1")
    for _ in range(3):
        worlds.look(blind="machines")
    assert worlds.slurm["w0"].reason == REASON
    assert worlds.nodes["n0"].cordoned
    assert worlds.slurm["w1"].drained_by == "fleet", "all else goes on"
    assert did(worlds) == [Drain]


def test_a_person_who_resumes_it_is_asked_once_more_and_then_believed(worlds: Worlds) -> None:
    worlds.wants("n0", "drain", "fan 3")
    for _ in range(2):
        worlds.settle_in()
        assert worlds.slurm["w0"].drained_by == "fleet"
        worlds.person_resumes("w0")
    worlds.settle_in()
    assert not worlds.slurm["w0"].drained_by


def test_a_reason_is_one_line_and_passes_for_no_verdict(worlds: Worlds) -> None:
    worlds.wants("n0", "drain", "x\n\x1b[2Jgpu_count[rma]@9f2c001; y")
    worlds.settle_in()
    assert worlds.slurm["w0"].reason.startswith("minivm: fleet: goal: drain x")
    assert not set(worlds.slurm["w0"].reason) & set("[];@\n\x1b")
    assert worlds.status("n0").why.isprintable()
    assert not worlds.status("n0").ill
