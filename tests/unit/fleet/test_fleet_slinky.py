"""Pod conditions for programs made for Slinky's operator, and the annotation by which they cordon a pod."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from fleet.decide.actions import Drain, ShowStates
from fleet.decide.conditions import show_slinky_states
from fleet.policy import Policy, parse_policy
from fleet.world.slurm import parse_slurm
from tests.fleet_world import Worlds

ON = Policy(slinky=True)
CORDON = "nodeset.slinky.slurm.net/pod-cordon"


def settle(worlds: Worlds) -> None:
    for _ in range(8):
        if not worlds.look():
            return
    raise AssertionError("it never ends")


def true(worlds: Worlds, pod: str = "w0") -> set[str]:
    return {type_.removeprefix("SlurmNodeState") for type_, (on, _) in worlds.pods[pod].states.items() if on == "True"}


def is_drained(worlds: Worlds, pod: str) -> bool:
    """Decide as NVSentinel's drainer does whether the pod may be deleted."""
    shown = true(worlds, pod)
    return "Drain" in shown and not shown & {"Undrain", "Allocated", "Mixed", "Completing"}


def test_without_the_policy_nothing_is_shown_or_obeyed() -> None:
    worlds = Worlds()
    worlds.pods["w0"].annotations[CORDON] = "true"
    settle(worlds)
    assert not worlds.pods["w0"].states and not worlds.slurm["w0"].drained_by


def test_states_follow_slurm() -> None:
    worlds = Worlds(policy=ON)
    settle(worlds)
    assert true(worlds) == {"Idle"}
    worlds.slurm["w0"].jobs.add(7)
    settle(worlds)
    assert true(worlds) == {"Allocated"}
    assert worlds.pods["w0"].states["SlurmNodeStateIdle"][0] == "False"
    worlds.slurm["w0"].drained_by, worlds.slurm["w0"].reason = "person", "fan 3"
    settle(worlds)
    assert true(worlds) == {"Allocated", "Drain"} and not is_drained(worlds, "w0")
    assert worlds.pods["w0"].states["SlurmNodeStateDrain"] == ("True", "fan 3")
    worlds.slurm["w0"].jobs.clear()
    settle(worlds)
    assert true(worlds) == {"Idle", "Drain"} and is_drained(worlds, "w0")
    worlds.slurm["w0"].responds = False
    settle(worlds)
    assert true(worlds) == {"Idle", "Drain", "NotResponding"}


def test_a_drain_of_the_fleet_is_no_fault_of_the_machine() -> None:
    """A drain monitor takes each other reason for a health event: its own cordon would come back as a fault."""
    worlds = Worlds(policy=ON)
    worlds.nodes["n0"].cordoned = True
    worlds.nodes["n0"].annotations["nodeset.slinky.slurm.net/node-cordon-reason"] = "[T] [NVSentinel] GPU:0 - Xid 79"
    settle(worlds)
    on, said = worlds.pods["w0"].states["SlurmNodeStateDrain"]
    assert on == "True" and said.startswith("slurm-operator: ") and "Xid 79" in said
    assert is_drained(worlds, "w0")


def test_a_suspended_job_keeps_its_pod() -> None:
    worlds = Worlds(policy=ON)
    worlds.slurm["w0"].jobs.add(7)
    worlds.slurm["w0"].suspended.add(7)
    worlds.nodes["n0"].cordoned = True
    settle(worlds)
    assert true(worlds) == {"Mixed", "Drain"} and not is_drained(worlds, "w0")


def test_one_patch_changes_all_states() -> None:
    """Two patches would show a drained pod without a job between them, while it has one."""
    worlds = Worlds(policy=ON)
    settle(worlds)
    worlds.slurm["w0"].jobs.add(7)
    worlds.slurm["w0"].drained_by, worlds.slurm["w0"].reason = "person", "fan 3"
    shown = [each for each in worlds.decide(worlds.world()).changes if isinstance(each, ShowStates)]
    assert [{state.type: state.status for state in each.conditions} for each in shown] == [
        {"SlurmNodeStateAllocated": "True", "SlurmNodeStateDrain": "True", "SlurmNodeStateIdle": "False"}
    ]


def test_a_pod_cordon_drains_until_it_is_removed() -> None:
    worlds = Worlds(policy=ON)
    worlds.pods["w1"].annotations[CORDON] = "true"
    settle(worlds)
    drains = [each for each in worlds.done if isinstance(each, Drain)]
    assert [each.name for each in drains] == ["w1"] and CORDON in drains[0].reason
    assert worlds.slurm["w1"].drained_by == "fleet"
    worlds.pods["w1"].annotations[CORDON] = "false"
    settle(worlds)
    assert not worlds.slurm["w1"].drained_by and true(worlds, "w1") == {"Idle"}


def test_a_drain_of_a_person_survives_a_pod_cordon() -> None:
    worlds = Worlds(policy=ON)
    worlds.slurm["w1"].drained_by, worlds.slurm["w1"].reason = "person", "fan 3"
    worlds.pods["w1"].annotations[CORDON] = "true"
    settle(worlds)
    del worlds.pods["w1"].annotations[CORDON]
    settle(worlds)
    assert worlds.slurm["w1"].drained_by == "person" and worlds.slurm["w1"].reason == "fan 3"


def test_an_outage_ends_no_drain_and_a_drained_pod_counts_as_busy() -> None:
    """A monitor reads a lifted Drain as a machine that is well again; a person may resume the node meanwhile."""
    worlds = Worlds(policy=ON)
    worlds.slurm["w0"].drained_by, worlds.slurm["w0"].reason = "person", "fan 3"
    settle(worlds)
    before = {name: dict(pod.states) for name, pod in worlds.pods.items()}
    for _ in range(5):
        worlds.now += 60
        worlds.look(blind="slurm")
    assert worlds.pods["w0"].states["SlurmNodeStateDrain"] == ("True", "fan 3") and not is_drained(worlds, "w0")
    assert worlds.pods["w1"].states == before["w1"]
    settle(worlds)
    assert is_drained(worlds, "w0")


def test_a_drain_ends_on_the_pod_before_it_ends_in_slurm() -> None:
    worlds = Worlds(policy=ON)
    worlds.nodes["n0"].cordoned = True
    settle(worlds)
    assert is_drained(worlds, "w0")
    worlds.nodes["n0"].cordoned = False
    seen = True
    while worlds.slurm["w0"].drained_by:
        seen = is_drained(worlds, "w0")
        assert worlds.look()
    assert not seen, "at the pass that undrains"


@pytest.mark.parametrize("states", [["IDLE", "DRAIN"], ["DOWN", "DRAIN"]])
@pytest.mark.parametrize("jobs", [None, {"w0": ("7",)}])
def test_what_may_have_a_job_is_busy(states: list[str], jobs: dict[str, tuple[str, ...]] | None) -> None:
    worlds = Worlds(policy=ON)
    node = {"name": "w0", "state": states, "reason": "fan 3", "address": "w0", "comment": "", "alloc_cpus": 0}
    number = {"set": True, "infinite": False, "number": 1}
    side = parse_slurm([{**node, "reason_changed_at": number, "slurmd_start_time": number}])
    worker = replace(next(iter(worlds.world().workers())), slurm=side.nodes["w0"])
    shown = show_slinky_states(worker, replace(side, jobs=jobs), ON)
    assert shown is not None and "SlurmNodeStateMixed" in {each.type for each in shown.conditions}
    free = show_slinky_states(worker, replace(side, jobs={}), ON)
    assert free is not None and "SlurmNodeStateMixed" not in {each.type for each in free.conditions}


def test_the_end_of_a_drain_waits_for_no_crowd_of_jobs() -> None:
    worlds = Worlds(size=40, policy=Policy(slinky=True, rate=1))
    for _ in range(60):
        worlds.look()
    worlds.pods["w39"].states["SlurmNodeStateDrain"] = ("True", "fan 3")
    for name in worlds.names:
        worlds.slurm[name].jobs.add(7)
    worlds.look()
    assert worlds.pods["w39"].states["SlurmNodeStateDrain"][0] == "False"


def test_switched_off_no_state_is_left() -> None:
    worlds = Worlds(policy=ON)
    settle(worlds)
    worlds.policy = Policy()
    settle(worlds)
    assert all(not pod.states for pod in worlds.pods.values())


def test_no_pod_looks_drained_while_a_job_holds_it() -> None:
    random_ = random.Random(7)
    for _ in range(60):
        worlds = Worlds(policy=ON)
        for _step, _name in itertools.product(range(6), worlds.names):
            node, annotations = worlds.slurm[_name], worlds.pods[_name].annotations
            match random_.randrange(5):
                case 0 if not node.drained_by:
                    node.jobs.add(random_.randrange(99))
                case 1:
                    node.jobs.clear()
                case 2:
                    node.suspended = set(node.jobs)
                case 3:
                    annotations[CORDON] = "true"
                case 4:
                    annotations.pop(CORDON, None)
            worlds.look()
            worlds.look()
            assert not any(is_drained(worlds, name) and worlds.slurm[name].jobs for name in worlds.names)


@pytest.mark.parametrize("value", ["yes", 1, None])
def test_the_policy_takes_true_and_false(value: object) -> None:
    with pytest.raises(Exception, match="slinky"):
        parse_policy({"slinky": value})
