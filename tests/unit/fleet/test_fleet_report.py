"""Status report of the fleet, for people and for programs."""

from __future__ import annotations

import json
from dataclasses import replace

from fleet.cli import explain
from fleet.policy import Machines, Policy
from fleet.report.status import lines, picture, report
from tests.fleet_world import Pod, Worlds


def said(worlds: Worlds, *, blind: str = "") -> dict[str, object]:
    world = worlds.world(blind=blind)
    found = report(world, worlds.decide(world), worlds.policy, worlds.now)
    assert json.loads(json.dumps(found)) == found, "a program reads the same"
    return found


def fleet(policy: Policy | None = None) -> Worlds:
    worlds = Worlds(4, policy)
    worlds.machines = {}
    worlds.settle_in()
    return worlds


def test_workers_are_counted_by_pool_and_what_is_unwell_is_named() -> None:
    worlds = fleet()
    worlds.wants("n0", "drain", "fan 3")
    worlds.verdict("w1", "gpu_lost[reboot]@9f2c001 fell off")
    worlds.pods["w2"].ready = False
    worlds.settle_in()
    found = said(worlds)
    assert found["pools"] == {
        "p": {"workers": 4, "states": {"Drained": 2, "TakesJobs": 2}, "away": 1, "mayBeAway": 1},
    }
    assert found["budgets"] == {
        "unwell": {"now": 0, "most": 1},
        "remedies": {"now": 0, "most": 1, "mode": "propose"},
        "fencing": {"mode": "propose"},
    }
    text = list(lines(found))
    assert "pool p: 4 workers: 2 Drained, 2 TakesJobs; 1 of 1 away" in text
    assert next(one for one in text if one.startswith("machine n0-")).endswith(": drain, Drained: fan 3")
    (proposal,) = [one for one in text if "would be reboot" in one and one.startswith("n1:")]
    assert "gpu_lost[reboot]@9f2c001" in proposal
    assert not [one for one in text if one.startswith("machine n3-")], "who is well is counted"
    assert "4 machines, 0 of 1 in treatment (propose)" in text


def test_what_is_in_treatment_counts_against_its_budget() -> None:
    worlds = fleet(Policy(machines=Machines(mode="act", at_once=2)))
    for node in ("n0", "n1", "n2"):
        worlds.wants(node, "reboot", "new kernel")
    worlds.settle_in()
    assert said(worlds)["budgets"]["remedies"] == {"now": 2, "most": 2, "mode": "act"}  # type: ignore[index]  # JSON


def test_what_is_not_known_is_said_and_not_passed_for_nothing() -> None:
    worlds = fleet()
    for blind in ("kubernetes", "slurm"):
        text = list(lines(said(worlds, blind=blind)))
        assert f"{blind.capitalize()} does not answer: no answer" in text


def test_what_others_have_written_is_one_line() -> None:
    worlds = fleet()
    worlds.slurm["w0"].drained_by, worlds.slurm["w0"].reason = "person", "x\n\x1b[2J"
    assert all(one.isprintable() for one in lines(said(worlds)))


def test_the_roll_out_of_a_statefulset_says_which_pod_is_next_and_what_keeps_it() -> None:
    worlds = Worlds(3, prefix="w-")
    worlds.settle_in()
    assert not worlds.decide(worlds.world()).notices
    worlds.revision = "w-2"

    def told() -> str:
        world = worlds.world()
        stands = worlds.decide(world).notices
        assert f"w: {stands[0].text}" in explain("w", world, worlds.decide(world))
        page = picture(world, worlds.decide(world), worlds.policy, worlds.now)
        assert [one["text"] for one in page["holds"] if one["about"] == "w"] == [stands[0].text]
        return stands[0].text

    assert told() == "rolls: 0 of 3 pods have the new template; w-2 is next"
    worlds.pods["w-2"].leaving = True
    worlds.slurm["w-2"].jobs.add(7)
    assert told().endswith("w-2 stops: it waits for its jobs")
    worlds.slurm["w-2"].jobs.clear()
    assert told().endswith("w-2 stops: its node is idle")
    worlds.pods["w-2"] = Pod("pod-w-2-1", "n2", ready=False, revision="w-2")
    assert told() == "rolls: 1 of 3 pods have the new template; w-1 is next, once w-2 is ready"
    worlds.pods["w-2"].ready, worlds.pods["w-1"].ready = True, False
    assert told().endswith("w-1 is next, and is not ready")
    for name, pod in worlds.pods.items():
        worlds.pods[name] = replace(pod, revision="w-2", ready=True)
    assert not [stand for stand in worlds.decide(worlds.world()).notices if stand.kind == "roll"]
