"""Each row of the two-way state, and its reverse: what one side reports, and what the fleet does on the other."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fleet.decide import drain
from fleet.decide.actions import (
    Change,
    Cordon,
    Delete,
    Drain,
    Evict,
    Fence,
    FleetMemory,
    Forget,
    Free,
    LostPod,
    Protect,
    Remove,
    RestartSlurmd,
    ShowOnNode,
    ShowOnPod,
    Uncordon,
    Undrain,
    Unfence,
)
from fleet.decide.decide import Decision
from fleet.policy import Policy
from fleet.world import slurm
from fleet.world.kubernetes import RESTART, KubePod, KubernetesView, StatefulSet
from fleet.world.slurm import SlurmView, slurm_node
from fleet.world.snapshot import FleetSnapshot
from health.broker import decide as broker
from init.slurm import node as init_node
from tests.fleet_world import BEGIN, FENCED, MARK, OURS, OUT, Worlds

REASON = "minivm: fleet: cordon: node n0 is cordoned"


def changed(decision: Decision, *kinds: type) -> list[object]:
    return [change for change in decision.changes if isinstance(change, kinds)]


def in_slurm(worlds: Worlds) -> list[object]:
    return changed(worlds.decide(worlds.world()), Drain, Undrain, Forget)


def told(worlds: Worlds) -> dict[tuple[str, str], str]:
    return {(one.about, one.kind): one.text for one in worlds.decide(worlds.world()).notices}


@pytest.fixture
def worlds() -> Worlds:
    made = Worlds()
    made.look()
    assert not made.decide(made.world()).changes, "all is shown, and nothing is to be done"
    return made


# A Node that is cordoned, and its drain in Slurm.


def test_a_cordon_drains_with_its_reason_and_its_end_undrains(worlds: Worlds) -> None:
    worlds.nodes["n0"].annotations["minivm.io/cordon-reason"] = "fan 3"
    worlds.cordon("n0")
    (drain,) = in_slurm(worlds)
    assert isinstance(drain, Drain)
    assert (drain.name, drain.reason) == ("w0", "minivm: fleet: cordon: fan 3")
    assert drain.comment == "minivm: fleet: held 1 cordon"
    worlds.look()
    assert not in_slurm(worlds)
    worlds.cordon("n0", on=False)
    (undrain,) = in_slurm(worlds)
    assert isinstance(undrain, Undrain)
    worlds.look()
    assert (worlds.slurm["w0"].drained_by, worlds.slurm["w0"].comment) == ("", "")


@pytest.mark.parametrize(
    ("key", "value", "kind"),
    [
        ("minivm.io/maintenance", "rack 4", "maintenance"),
        ("ToBeDeletedByClusterAutoscaler", "1795337385", "going"),
        ("karpenter.sh/disrupted", "", "going"),
    ],
)
def test_a_taint_drains_and_its_end_undrains(worlds: Worlds, key: str, value: str, kind: str) -> None:
    worlds.nodes["n0"].taints[key] = value
    worlds.look()
    assert worlds.slurm["w0"].reason == f"minivm: fleet: {kind}: {key} {value}".rstrip()
    worlds.nodes["n0"].taints.clear()
    worlds.look()
    assert not worlds.slurm["w0"].drained_by


def test_a_taint_of_others_is_no_cause(worlds: Worlds) -> None:
    worlds.nodes["n0"].taints["nvidia.com/gpu"] = "present"
    assert not in_slurm(worlds)


def test_a_persons_drain_is_told_and_stays_in_both_directions(worlds: Worlds) -> None:
    worlds.person_drains("w0")
    worlds.cordon("n0")
    assert not in_slurm(worlds)
    assert told(worlds)["w0", "held"].startswith("drained by another actor (look at fan 3) and stays so")
    worlds.cordon("n0", on=False)
    assert not in_slurm(worlds)
    assert ("w0", "held") not in told(worlds)


def test_a_node_that_is_down_is_told_and_stays(worlds: Worlds) -> None:
    worlds.slurm["w0"].down, worlds.slurm["w0"].reason = True, "Not responding"
    worlds.cordon("n0")
    assert not in_slurm(worlds)
    assert told(worlds)["w0", "held"].startswith("down by another actor (Not responding)")


@pytest.mark.parametrize("reason", ["minivm: gpu_count[rma]@9f2c001 7 of 8 GPUs", init_node.STOPPING, slurm.LIFTED])
def test_what_the_broker_the_pod_or_slurm_itself_drains_is_not_the_fleets(worlds: Worlds, reason: str) -> None:
    """The fleet does not treat the drains of the broker, the pod or Slurm as its own.

    The third case is a drain by Slurm itself, which keeps the existing reason, also that of a lifted drain of the
    fleet.
    """
    worlds.slurm["w0"].drained_by, worlds.slurm["w0"].reason = "person", reason
    worlds.cordon("n0")
    assert not in_slurm(worlds)
    worlds.cordon("n0", on=False)
    assert not in_slurm(worlds)


@pytest.mark.parametrize("hindrance", ["responds", "down", "ready"])
def test_a_drain_stays_until_the_worker_is_there_to_take_jobs(worlds: Worlds, hindrance: str) -> None:
    worlds.cordon("n0")
    worlds.look()
    worlds.cordon("n0", on=False)
    if hindrance == "ready":
        worlds.pods["w0"].ready = False
    else:
        setattr(worlds.slurm["w0"], hindrance, hindrance == "down")
    assert not in_slurm(worlds)
    assert "w0" in {about for about, kind in told(worlds) if kind == "waits"}


def test_a_drain_that_a_person_lifts_is_set_once_more_and_then_never(worlds: Worlds) -> None:
    worlds.cordon("n0")
    worlds.look()
    worlds.person_resumes("w0")
    worlds.look()
    assert worlds.slurm["w0"].reason == f"{REASON} (again)"
    worlds.person_resumes("w0")
    worlds.look()
    assert worlds.slurm["w0"].states == ["IDLE"]
    assert told(worlds)["w0", "lifted"].startswith("resumed by a person 2 times")
    worlds.cordon("n0", on=False)
    (forget,) = in_slurm(worlds)
    assert isinstance(forget, Forget)
    worlds.look()
    worlds.cordon("n0")
    worlds.look()
    assert worlds.slurm["w0"].drained_by == "fleet", "another cordon is another word"


def test_a_new_cause_is_a_new_word(worlds: Worlds) -> None:
    worlds.cordon("n0")
    for _ in range(2):
        worlds.look()
        worlds.person_resumes("w0")
    assert not in_slurm(worlds)
    worlds.nodes["n0"].taints["minivm.io/maintenance"] = "rack 4"
    worlds.look()
    assert worlds.slurm["w0"].reason.startswith("minivm: fleet: cordon+maintenance: ")


def test_a_persons_comment_stays_and_his_resume_counts_all_the_same(worlds: Worlds) -> None:
    worlds.slurm["w0"].comment = "Ann's"
    worlds.cordon("n0")
    for _ in range(2):
        worlds.look()
        worlds.look()
        assert worlds.slurm["w0"].drained_by == "fleet"
        worlds.person_resumes("w0")
    worlds.look()
    assert not worlds.slurm["w0"].drained_by
    assert worlds.slurm["w0"].comment == "Ann's"


def test_more_causes_and_fewer_say_so_and_only_the_last_one_lifts(worlds: Worlds) -> None:
    worlds.cordon("n0")
    worlds.look()
    worlds.nodes["n0"].taints["minivm.io/maintenance"] = "rack 4"
    worlds.look()
    assert slurm.causes_in(worlds.slurm["w0"].reason) == {"cordon", "maintenance"}
    worlds.cordon("n0", on=False)
    worlds.look()
    assert slurm.causes_in(worlds.slurm["w0"].reason) == {"maintenance"}
    assert worlds.slurm["w0"].drained_by == "fleet"


def test_other_words_for_the_same_cause_are_no_change(worlds: Worlds) -> None:
    worlds.cordon("n0")
    worlds.look()
    worlds.nodes["n0"].annotations["minivm.io/cordon-reason"] = "another text at each look"
    assert not in_slurm(worlds)


def test_what_slurm_or_an_init_adds_to_a_reason_makes_it_nobody_elses(worlds: Worlds) -> None:
    worlds.cordon("n0")
    worlds.look()
    worlds.slurm["w0"].reason += " [slurm@2026-11-20T10:32:18] : Not responding"
    assert not in_slurm(worlds)
    worlds.cordon("n0", on=False)
    assert isinstance(in_slurm(worlds)[0], Undrain)


def test_an_undrain_that_was_decided_before_the_next_cordon_does_nothing(worlds: Worlds) -> None:
    worlds.cordon("n0")
    worlds.look()
    worlds.cordon("n0", on=False)
    seen = worlds.world()
    worlds.cordon("n0")
    worlds.look(world=seen)
    assert worlds.slurm["w0"].drained_by == "fleet"


# A condition of a Node, and a Node that is not ready.


def test_a_named_condition_drains_while_it_is_true() -> None:
    worlds = Worlds(policy=Policy(conditions=("HardwareIssuesSuspected",)))
    worlds.nodes["n0"].signs |= {"HardwareIssuesSuspected": "True", "DiskPressure": "True"}
    worlds.nodes["n1"].signs["DiskPressure"] = "True"
    worlds.look()
    assert [slurm.causes_in(node.reason) for node in worlds.slurm.values()] == [{"condition"}, set(), set()]
    worlds.nodes["n0"].signs["HardwareIssuesSuspected"] = "False"
    worlds.look()
    assert not worlds.slurm["w0"].drained_by


def test_a_node_that_is_not_ready_for_a_while_takes_no_jobs_until_it_is(worlds: Worlds) -> None:
    worlds.ready("n0", False)
    worlds.now += worlds.policy.not_ready_s - 1
    assert not in_slurm(worlds)
    worlds.now += 1
    worlds.look()
    assert slurm.causes_in(worlds.slurm["w0"].reason) == {"notready"}
    worlds.ready("n0")
    worlds.look()
    assert not worlds.slurm["w0"].drained_by


def test_a_dead_machine_is_proposed_and_not_fenced(worlds: Worlds) -> None:
    worlds.ready("n0", False)
    worlds.now += worlds.policy.dead_s
    assert "kubectl taint nodes n0 node.kubernetes.io/out-of-service=" in told(worlds)["n0", "dead"]
    worlds.look()
    assert {type(change) for change in worlds.done} == {ShowOnPod, ShowOnNode, Drain}
    worlds.ready("n0")
    assert ("n0", "dead") not in told(worlds)
    worlds.ready("n0", False)
    worlds.now += worlds.policy.dead_s
    worlds.policy = Policy(fencing="off")
    assert ("n0", "dead") not in told(worlds)


def test_machines_that_fail_together_are_a_pause_and_a_told_reason_not_a_thousand_drains() -> None:
    worlds = Worlds(size=20)
    for number in range(4):
        worlds.ready(f"n{number}", False)
    worlds.now += 100
    worlds.look()
    assert sum(bool(node.drained_by) for node in worlds.slurm.values()) == 4, "up to the share they are drained"
    for number in range(4, 20):
        worlds.ready(f"n{number}", False)
    worlds.now += 100
    worlds.look()
    assert sum(bool(node.drained_by) for node in worlds.slurm.values()) == 4, "those from before stay so"
    assert told(worlds)["fleet", "pause"].startswith("more than 4 of 20 workers")
    worlds.cordon("n9")
    worlds.look()
    assert worlds.slurm["w9"].drained_by == "fleet", "a person's word counts in a pause too"
    assert slurm.causes_in(worlds.slurm["w9"].reason) == {"cordon"}
    for number in range(20):
        worlds.ready(f"n{number}")
    worlds.settle_in()
    assert [name for name, node in worlds.slurm.items() if node.drained_by] == ["w9"]


def test_those_whose_machines_are_well_again_count_until_they_are_undrained() -> None:
    worlds = Worlds(size=20)
    for number in range(4):
        worlds.ready(f"n{number}", False)
    worlds.now += 100
    worlds.look()
    for number in range(4):
        worlds.ready(f"n{number}")
        worlds.pods[f"w{number}"].ready = False
    worlds.ready("n5", False)
    worlds.now += 100
    worlds.look()
    assert not worlds.slurm["w5"].drained_by, "four are away already"


# A pod that is about to be deleted.


def test_a_pod_that_is_to_go_waits_for_its_job_and_is_evicted_drained_and_idle(worlds: Worlds) -> None:
    worlds.slurm["w0"].jobs.add(7)
    worlds.annotate("w0", "minivm.io/leave", "new template")
    worlds.look()
    assert worlds.slurm["w0"].reason == "minivm: fleet: leave: new template"
    assert not changed(worlds.decide(worlds.world()), Evict)
    assert told(worlds)["w0", "leave"] == "must leave, and waits for jobs 7"
    worlds.slurm["w0"].jobs.clear()
    worlds.look()
    worlds.look()
    assert worlds.pods["w0"].uid != "pod-w0-0"
    worlds.settle()
    assert not worlds.slurm["w0"].drained_by, "the next pod takes jobs"


def test_one_that_is_to_stay_after_all_is_undrained(worlds: Worlds) -> None:
    worlds.slurm["w0"].jobs.add(7)
    worlds.annotate("w0", "minivm.io/leave", "")
    worlds.look()
    worlds.annotate("w0", "minivm.io/leave", None)
    worlds.look()
    assert (worlds.slurm["w0"].drained_by, worlds.pods["w0"].uid) == ("", "pod-w0-0")


def test_a_suspended_job_holds_its_pod_though_the_node_looks_idle(worlds: Worlds) -> None:
    worlds.slurm["w0"].jobs.add(7)
    worlds.slurm["w0"].suspended.add(7)
    worlds.annotate("w0", "minivm.io/leave", "x")
    worlds.look()
    assert worlds.slurm["w0"].states == ["IDLE", "DRAIN"]
    assert not changed(worlds.decide(worlds.world()), Evict)


def test_no_more_pods_of_a_pool_are_away_than_may_be(worlds: Worlds) -> None:
    for name in worlds.names:
        worlds.annotate(name, "minivm.io/leave", "x")
    worlds.look()
    worlds.look()
    assert len(changed(worlds.decide(worlds.world()), Evict)) == 1
    worlds.pods["w2"].ready = False
    (evict,) = changed(worlds.decide(worlds.world()), Evict)
    assert isinstance(evict, Evict)
    assert evict.pod == "w2", "the one that is away already costs nobody"


def test_a_machine_that_is_about_to_go_loses_its_pods_as_they_get_idle(worlds: Worlds) -> None:
    worlds.slurm["w0"].jobs.add(7)
    worlds.taint("n0", "karpenter.sh/disrupted")
    worlds.settle_in()
    assert worlds.pods["w0"].uid == "pod-w0-0"
    worlds.jobs_end("w0")
    worlds.settle_in()
    assert worlds.pods["w0"].uid == "pod-w0-1"
    worlds.now += 1000
    worlds.pods["w0"].ready = True
    worlds.settle_in()
    assert worlds.pods["w0"].uid == "pod-w0-1", "it has come back to the same machine, and would again and again"
    assert "came back" in told(worlds)["w0", "leave"]


def test_nor_is_one_that_a_person_had_drained_before_it_came(worlds: Worlds) -> None:
    worlds.person_drains("w0")
    worlds.now += 10
    worlds.replace("w0")
    worlds.pods["w0"].ready = True
    worlds.taint("n0", "karpenter.sh/disrupted")
    worlds.settle_in()
    assert worlds.pods["w0"].uid == "pod-w0-1"
    worlds.annotate("w0", "minivm.io/leave", "a person's word about this pod")
    worlds.settle_in()
    assert worlds.pods["w0"].uid == "pod-w0-2"


def test_jobs_of_a_pod_that_is_to_go_have_their_time_and_then_run_elsewhere() -> None:
    worlds = Worlds(policy=Policy(leave_within_s=600))
    worlds.slurm["w0"].jobs.add(7)
    worlds.annotate("w0", "minivm.io/leave", "new template")
    worlds.settle_in()
    worlds.now += 599
    worlds.settle_in()
    assert worlds.slurm["w0"].jobs
    worlds.now += 1
    worlds.look()
    assert worlds.slurm["w0"].states == ["IDLE", "DRAIN"]
    assert not worlds.slurm["w0"].jobs
    assert slurm.causes_in(worlds.slurm["w0"].reason) == {"deadline", "leave"}
    worlds.settle_in()
    assert worlds.pods["w0"].uid == "pod-w0-1"
    worlds.settle()
    assert (worlds.slurm["w0"].states, worlds.slurm["w0"].comment) == (["IDLE"], "")


def test_a_node_whose_slurmd_registers_again_is_not_set_down_again() -> None:
    worlds = Worlds(policy=Policy(leave_within_s=600, away=0))
    worlds.slurm["w0"].jobs.add(7)
    worlds.annotate("w0", "minivm.io/leave", "")
    worlds.settle_in()
    worlds.now += 600
    worlds.settle_in()
    worlds.now += 600
    worlds.settle_in()
    assert len([change for change in worlds.done if isinstance(change, Drain) and change.down]) == 1


def test_what_was_set_down_for_a_cause_that_is_withdrawn_is_resumed_by_us() -> None:
    """The fleet resumes a node that it set down when the cause is withdrawn.

    The node's slurmd still runs and does not register again, so nothing else would bring the node back.
    """
    worlds = Worlds(policy=Policy(leave_within_s=600, away=0))
    worlds.returns = False
    worlds.slurm["w0"].jobs.add(7)
    worlds.annotate("w0", "minivm.io/leave", "")
    worlds.settle_in()
    worlds.now += 600
    worlds.settle_in()
    worlds.cordon("n0")
    worlds.annotate("w0", "minivm.io/leave", None)
    worlds.settle_in()
    assert slurm.causes_in(worlds.slurm["w0"].reason) == {"cordon", "deadline"}, "still down by us, and it says so"
    worlds.cordon("n0", on=False)
    worlds.settle_in()
    assert (worlds.slurm["w0"].states, worlds.slurm["w0"].comment) == (["IDLE"], "")


def test_no_deadline_ends_jobs_on_what_a_person_has_drained() -> None:
    worlds = Worlds(policy=Policy(leave_within_s=600))
    worlds.slurm["w0"].jobs.add(7)
    worlds.person_drains("w0")
    worlds.annotate("w0", "minivm.io/leave", "")
    worlds.settle_in()
    worlds.now += 6000
    worlds.settle_in()
    assert (worlds.slurm["w0"].jobs, worlds.slurm["w0"].reason) == ({7}, "look at fan 3")


def test_a_node_that_slurm_itself_has_found_down_is_not_resumed(worlds: Worlds) -> None:
    worlds.cordon("n0")
    worlds.look()
    worlds.slurm["w0"].down = True
    worlds.cordon("n0", on=False)
    assert not in_slurm(worlds)


# A Slurm node without a pod.


@pytest.fixture
def sets() -> Worlds:
    """Return the world of a StatefulSet w with three workers."""
    made = Worlds(prefix="w-")
    made.look()
    return made


def test_a_pod_that_is_away_for_a_moment_is_nothing(sets: Worlds) -> None:
    sets.pod_goes("w-2")
    sets.look()
    sets.now += sets.policy.gone_s - 1
    assert not in_slurm(sets)


def test_a_pod_that_is_gone_leaves_a_drain_and_once_its_slurmd_is_silent_its_jobs_run_elsewhere(sets: Worlds) -> None:
    sets.slurm["w-2"].jobs.add(7)
    sets.pod_goes("w-2")
    sets.look()
    sets.now += sets.policy.gone_s
    sets.settle_in()
    assert sets.slurm["w-2"].states == ["ALLOCATED", "DRAIN"]
    assert sets.slurm["w-2"].reason == "minivm: fleet: gone: its pod is gone"
    sets.slurmd_goes("w-2")
    sets.settle_in()
    assert sets.slurm["w-2"].states == ["DOWN", "DRAIN", "NOT_RESPONDING"]
    assert not sets.slurm["w-2"].jobs
    sets.replace("w-2")
    sets.settle()
    assert (sets.slurm["w-2"].states, sets.slurm["w-2"].comment) == (["IDLE"], "")


def test_a_new_pod_gets_ready_although_its_node_was_set_down(sets: Worlds) -> None:
    """The fleet resumes the down node of a new pod.

    The new slurmd is not verified while the node is down, and with ReturnToService=0 nothing else resumes the node.
    """
    sets.pod_goes("w-2")
    sets.look()
    sets.now += sets.policy.gone_s
    sets.slurmd_goes("w-2")
    sets.settle_in()
    sets.now += 5
    sets.replace("w-2")
    (undrain,) = in_slurm(sets)
    assert isinstance(undrain, Undrain)
    assert undrain.down


def test_many_pods_that_are_gone_at_once_are_a_pause(sets: Worlds) -> None:
    """Many missing pods pause the fleet.

    An incomplete pod list is more likely an error of the fleet or of the API server than a real loss.
    """
    for name in sets.names:
        sets.pod_goes(name)
        sets.slurmd_goes(name)
    sets.look()
    sets.now += 1000
    sets.settle_in()
    assert not [node for node in sets.slurm.values() if node.drained_by or node.down]
    assert ("fleet", "pause") in told(sets)


def test_a_record_goes_where_its_name_does_not_come_back(sets: Worlds) -> None:
    assert sets.sets is not None
    sets.pod_goes("w-2")
    sets.slurmd_goes("w-2")
    sets.look()
    sets.now += sets.policy.gone_s
    sets.settle_in()
    assert "w-2" in sets.slurm, "its StatefulSet makes it again"
    sets.sets["w"] = 2
    sets.pending.add("w-2")
    sets.settle_in()
    assert "w-2" in sets.slurm, "a job names it"
    sets.pending.clear()
    sets.settle_in()
    assert "w-2" not in sets.slurm
    sets.sets["w"] = 3
    sets.replace("w-2")
    sets.settle()
    assert sets.slurm["w-2"].states == ["IDLE"]


def test_the_record_of_a_pod_that_has_stopped_in_order_goes_too(sets: Worlds) -> None:
    sets.sets = {"w": 2}
    sets.pod_goes("w-2")
    sets.slurm["w-2"].drained_by, sets.slurm["w-2"].down, sets.slurm["w-2"].reason = "init", True, init_node.STOPPING
    (remove,) = changed(sets.decide(sets.world()), Remove)
    assert isinstance(remove, Remove)


@pytest.mark.parametrize("why", ["a person", "sets unknown", "another set", "pod unread", "a job", "static"])
def test_a_record_stays_where_anything_speaks_for_it_or_nothing_is_known(sets: Worlds, why: str) -> None:
    sets.pod_goes("w-2")
    node = sets.slurm["w-2"]
    node.drained_by, node.down, node.reason = "init", True, init_node.STOPPING
    sets.sets = {"sets unknown": None, "another set": {"x": 1}}.get(why, {"w": 2})
    if why == "a person":
        sets.person_drains("w-2")
    world = sets.world()
    assert isinstance(world.slurm, SlurmView)
    assert isinstance(world.kubernetes, KubernetesView)
    if why == "pod unread":
        world = replace(world, kubernetes=replace(world.kubernetes, unread={"Pod/w-2": "x"}))
    if why == "a job":
        assert isinstance(world.slurm, SlurmView)
        world = replace(world, slurm=replace(world.slurm, claims=None))
    if why == "static":
        assert isinstance(world.slurm, SlurmView)
        said = {"name": "w-2", "state": ["DOWN", "DRAIN"], "reason": init_node.STOPPING}
        world = replace(world, slurm=replace(world.slurm, nodes={**world.slurm.nodes, "w-2": slurm_node(said)}))
    assert not changed(sets.decide(world), Remove, Drain)


@pytest.mark.parametrize("name", ["w", "w-02", "w-x", "w-1-2", "-1", "w--1", "w-9999999999"])
def test_a_name_that_no_set_of_ours_makes_is_nobody_of_ours(name: str) -> None:
    assert KubernetesView(sets={"w": StatefulSet(2)}).will_exist(name) is None


# Slurm's state, shown in Kubernetes.


def test_a_drain_in_slurm_is_a_condition_of_the_pod_and_so_is_its_end(worlds: Worlds) -> None:
    assert worlds.pods["w0"].condition == ("True", "TakesJobs", "")
    worlds.slurm["w0"].jobs.add(7)
    assert not worlds.decide(worlds.world()).changes, "jobs come and go without a write"
    worlds.person_drains("w0")
    worlds.look()
    assert worlds.pods["w0"].condition == ("False", "Draining", "look at fan 3")
    worlds.slurm["w0"].jobs.clear()
    worlds.look()
    assert worlds.pods["w0"].condition == ("False", "Drained", "look at fan 3")
    worlds.person_resumes("w0")
    worlds.look()
    assert worlds.pods["w0"].condition == ("True", "TakesJobs", "")


def test_a_condition_keeps_the_time_of_its_last_transition(worlds: Worlds) -> None:
    worlds.slurm["w0"].jobs.add(7)
    worlds.person_drains("w0")
    (first,) = changed(worlds.decide(worlds.world()), ShowOnPod)
    assert isinstance(first, ShowOnPod)
    assert first.condition.since == 0, "now"
    worlds.look()
    worlds.slurm["w0"].jobs.clear()
    (second,) = changed(worlds.decide(worlds.world()), ShowOnPod)
    assert isinstance(second, ShowOnPod)
    assert (second.condition.reason, second.condition.since) == ("Drained", BEGIN)


def test_slurms_word_is_shown_on_the_node_too_and_goes_with_its_last_worker(worlds: Worlds) -> None:
    assert worlds.nodes["n0"].condition == ("True", "TakesJobs", MARK)
    worlds.person_drains("w0")
    worlds.look()
    drained = ("False", "Drained", f"{MARK}: w0: Drained look at fan 3")
    assert worlds.nodes["n0"].condition == drained
    worlds.pods["w1"].node = "n0"
    worlds.settle()
    assert worlds.nodes["n0"].condition == drained, "of two, the worse"
    assert worlds.nodes["n1"].condition is None
    worlds.person_resumes("w0")
    worlds.settle()
    assert worlds.nodes["n0"].condition == ("True", "TakesJobs", MARK)


def test_what_another_clusters_fleet_says_of_a_node_is_left_there(worlds: Worlds) -> None:
    worlds.pods["w1"].node = "n0"
    worlds.nodes["n1"].condition = ("False", "Drained", f"{MARK}-2: w7: Drained fan")
    worlds.settle()
    assert worlds.nodes["n1"].condition == ("False", "Drained", f"{MARK}-2: w7: Drained fan")


def test_of_a_node_one_of_whose_workers_is_not_known_nothing_is_shown(worlds: Worlds) -> None:
    worlds.pods["w1"].node = "n0"
    worlds.person_drains("w0")
    del worlds.slurm["w1"]
    assert not [one for one in changed(worlds.decide(worlds.world()), ShowOnNode) if one.node == "n0"]  # type: ignore[attr-defined]


def test_the_nodes_condition_is_named_or_left_out_by_policy() -> None:
    worlds = Worlds(policy=Policy(node_condition=""))
    worlds.settle()
    assert worlds.nodes["n0"].condition is None


def test_a_pod_that_comes_back_on_another_machine_takes_jobs_there(sets: Worlds) -> None:
    sets.cordon("n0")
    sets.settle_in()
    assert sets.slurm["w-0"].drained_by == "fleet"
    sets.replace("w-0", "n1")
    sets.settle()
    assert (sets.slurm["w-0"].drained_by, sets.slurm["w-0"].comment) == ("", "")


# A ready pod that is unknown to Slurm.


def forgotten(worlds: Worlds, *names: str) -> None:
    for name in names:
        del worlds.slurm[name]
    worlds.look()
    worlds.now += worlds.policy.lost_s - 1
    assert not changed(worlds.decide(worlds.world()), RestartSlurmd, Free, Evict)
    worlds.now += 1


def of_older_images(worlds: Worlds, *names: str) -> None:
    worlds.dull |= {worlds.pods[name].uid for name in names}


def evictions(worlds: Worlds) -> list[str]:
    return [change.reason for change in worlds.done if isinstance(change, Evict)]


def test_the_slurmd_of_a_pod_that_slurm_does_not_know_is_restarted_and_registers() -> None:
    worlds = Worlds(size=6)
    worlds.look()
    forgotten(worlds, "w0")
    worlds.settle_in()
    assert (worlds.pods["w0"].uid, worlds.slurm["w0"].states) == ("pod-w0-0", ["IDLE"])
    assert RESTART not in worlds.pods["w0"].annotations, "and what was asked for is asked for no more"
    asked = [change.value for change in worlds.done if isinstance(change, RestartSlurmd)]
    assert asked == [str(int(worlds.now)), None]
    assert not worlds.memory.lost


def test_where_that_does_not_help_the_pod_is_replaced_and_registers() -> None:
    worlds = Worlds(size=6)
    worlds.look()
    of_older_images(worlds, "w0")
    forgotten(worlds, "w0")
    worlds.settle_in()
    assert (
        told(worlds)["w0", "lost"]
        == "Slurm does not know it: the fleet asked its slurmd to restart, and replaces the pod if that does not help"
    )
    worlds.now += worlds.policy.lost_s - 1
    worlds.settle_in()
    assert worlds.pods["w0"].uid == "pod-w0-0"
    worlds.now += 1
    worlds.settle_in()
    assert worlds.pods["w0"].uid == "pod-w0-1"
    assert evictions(worlds) == ["it is ready, and Slurm does not know it; to restart its slurmd did not help"]
    worlds.settle()
    assert (worlds.slurm["w0"].states, worlds.pods["w0"].free) == (["IDLE"], False)
    assert not worlds.memory.lost


def test_where_that_does_not_help_both_are_tried_again_after_twice_as_long_and_counted() -> None:
    worlds = Worlds(size=6)
    worlds.look()
    worlds.deaf.add("w0")
    forgotten(worlds, "w0")
    worlds.settle_in()
    worlds.now += worlds.policy.lost_s
    worlds.settle_in()
    for times, wait in ((1, 120), (2, 240)):
        worlds.pods["w0"].ready = True
        for asked in (False, True):
            worlds.now += wait - 1
            worlds.settle_in()
            assert worlds.pods["w0"].uid == f"pod-w0-{times}"
            assert (RESTART in worlds.pods["w0"].annotations) is asked
            worlds.now += 1
            worlds.settle_in()
        assert evictions(worlds)[-1].endswith(f"did not help (replaced before: {times})")


def test_one_that_was_replaced_each_hour_for_months_is_replaced_each_hour() -> None:
    """The backoff has an upper limit: 2 to the power of 5000 replacements is too large to compute with."""
    worlds, replaced = Worlds(size=1), LostPod(since=0.0, times=5000)
    del worlds.slurm["w0"]
    worlds.annotate("w0", RESTART, "0")
    world = worlds.world()
    (worker,) = world.workers()
    assert isinstance(world.slurm, SlurmView)
    assert not drain.find_lost_causes(worker, world.slurm, replaced, drain.MOST_PATIENCE_S - 1, Policy())
    assert drain.find_lost_causes(worker, world.slurm, replaced, drain.MOST_PATIENCE_S, Policy())


def test_a_fleet_that_is_started_anew_goes_on_from_what_the_pod_was_asked_for() -> None:
    worlds = Worlds(size=6)
    worlds.look()
    of_older_images(worlds, "w0")
    forgotten(worlds, "w0")
    worlds.settle_in()
    worlds.memory = FleetMemory()
    worlds.settle_in()
    worlds.now += worlds.policy.lost_s
    worlds.settle_in()
    assert worlds.pods["w0"].uid == "pod-w0-1"
    assert len([one for one in worlds.done if isinstance(one, RestartSlurmd)]) == 1


@pytest.mark.parametrize("said", ["because", "", "9" * 99, "\u0663", "-1"])
def test_a_persons_word_is_none_of_ours(said: str) -> None:
    """The fleet keeps a restart annotation that a person wrote, and still requests its own restart."""
    worlds = Worlds(size=6)
    worlds.annotate("w0", RESTART, said)
    worlds.settle_in()
    assert worlds.pods["w0"].annotations[RESTART] == said
    forgotten(worlds, "w0")
    worlds.settle_in()
    assert worlds.pods["w0"].uid == "pod-w0-0"
    assert "w0" in worlds.slurm, "and it is asked all the same"


@pytest.mark.parametrize("ahead", [30, 10**9])
def test_a_time_that_is_to_come_holds_nobody_up(ahead: int) -> None:
    worlds = Worlds(size=6)
    worlds.look()
    of_older_images(worlds, "w0")
    worlds.annotate("w0", RESTART, str(int(worlds.now) + ahead + 600))
    del worlds.slurm["w0"]
    for _ in range(2):
        worlds.settle_in()
        worlds.now += worlds.policy.lost_s
    worlds.settle_in()
    assert worlds.pods["w0"].uid == "pod-w0-1"


def test_a_slurm_that_has_lost_them_all_gets_them_back_by_their_slurmds() -> None:
    """When slurmctld has lost all nodes, their slurmds restart and register again.

    Slurm's state may have been lost: restarting the slurmds ends no job, and no pod is replaced however many there are.
    """
    worlds = Worlds(size=6)
    worlds.look()
    forgotten(worlds, *worlds.names)
    worlds.settle_in()
    assert [worlds.slurm[name].states for name in worlds.names] == [["IDLE"]] * 6
    assert not evictions(worlds)


def test_a_slurm_that_knows_nobody_any_more_is_no_reason_to_replace_all() -> None:
    worlds = Worlds(size=6)
    worlds.look()
    of_older_images(worlds, *worlds.names)
    forgotten(worlds, *worlds.names)
    worlds.settle_in()
    worlds.now += worlds.policy.lost_s
    assert not worlds.decide(worlds.world()).changes
    assert ("fleet", "pause") in told(worlds)


def test_one_whose_record_cannot_be_read_is_not_one_without() -> None:
    worlds = Worlds(size=6)
    worlds.look()
    forgotten(worlds, "w0")
    seen = worlds.world()
    assert isinstance(seen.slurm, SlurmView)
    seen = replace(seen, slurm=replace(seen.slurm, unread={"w0": "x"}))
    assert not changed(worlds.decide(seen), RestartSlurmd, Free, Evict)


def test_one_that_registers_in_this_moment_is_not_evicted() -> None:
    worlds = Worlds(size=6)
    worlds.look()
    of_older_images(worlds, "w0")
    forgotten(worlds, "w0")
    worlds.settle_in()
    worlds.now += worlds.policy.lost_s
    worlds.look()
    seen = worlds.world()
    assert changed(worlds.decide(seen), Evict)
    worlds.slurmd_answers("w0")
    worlds.look(world=seen)
    assert worlds.pods["w0"].uid == "pod-w0-0"
    worlds.settle_in()
    assert not worlds.pods["w0"].free


def test_a_fleet_that_begins_to_count_anew_lifts_no_drain_of_a_node_that_is_silent_still(worlds: Worlds) -> None:
    worlds.ready("n0", False)
    worlds.now += 100
    worlds.settle_in()
    assert "notready" in slurm.causes_in(worlds.slurm["w0"].reason)
    worlds.nodes["n0"].since = worlds.now
    assert not changed(worlds.decide(worlds.world()), Undrain, Protect, Drain)


# A dead machine.


@pytest.fixture
def acting() -> Worlds:
    """Return six machines, the controller on the last of them, with a fleet that may fence one."""
    made = Worlds(6, Policy(fencing="act"), "w-")
    made.look()
    return made


def dead_for(worlds: Worlds, *names: str, seconds: float = 400) -> None:
    for name in names:
        worlds.dies(name)
    worlds.now += seconds


def test_a_dead_machine_is_given_up_and_its_jobs_and_pods_are_elsewhere(acting: Worlds) -> None:
    acting.slurm["w-0"].jobs.add(7)
    dead_for(acting, "n0")
    acting.settle_in()
    assert [type(change) for change in acting.done if isinstance(change, Fence | Delete)] == [Fence, Delete]
    downs = [change for change in acting.done if isinstance(change, Drain) and change.down]
    assert [slurm.causes_in(down.reason) for down in downs] == [{"dead", "notready"}]
    assert acting.done.index(downs[0]) < acting.done.index(changed_of(acting, Delete)), "its jobs first"
    assert (acting.slurm["w-0"].jobs, acting.pods["w-0"].node != "n0") == (set(), True)
    acting.settle()
    assert (acting.slurm["w-0"].states, acting.slurm["w-0"].comment) == (["IDLE"], "")
    assert list(acting.nodes["n0"].taints), "until it is back"
    acting.ready("n0")
    acting.now += acting.policy.not_ready_s
    acting.settle_in()
    assert not acting.nodes["n0"].taints
    assert not acting.nodes["n0"].annotations


def changed_of(worlds: Worlds, kind: type) -> Change:
    return next(change for change in worlds.done if isinstance(change, kind))


def test_the_controllers_machine_is_given_up_though_nobody_hears_of_slurm(acting: Worlds) -> None:
    """The controller's dead machine is fenced although Slurm does not answer: the dead machine is the reason."""
    dead_for(acting, "n5")
    acting.settle_in()
    assert acting.controller.node != "n5"
    acting.settle_in()
    assert acting.pods["w-5"].node != "n5"


def test_while_slurm_is_silent_for_other_reasons_no_machine_is_given_up(acting: Worlds) -> None:
    dead_for(acting, "n0")
    assert not acting.decide(acting.world(blind="slurm")).changes


@pytest.mark.parametrize(
    ("lacks", "said"),
    [
        ({"lease_age": 10.0}, "has renewed its lease"),
        ({"lease_age": None}, "cannot be read"),
        ({"kubelet": True}, "its address answers at the kubelet's port"),
        ({"kubelet": None}, "it has no address"),
        ({"pods": ("w-0",)}, "w-0 answers on it"),
        ({"witness": False}, "its own network may be cut"),
    ],
)
def test_one_sign_of_life_or_one_that_nobody_can_read_and_nothing_is_given_up(
    acting: Worlds, lacks: dict[str, object], said: str
) -> None:
    dead_for(acting, "n0")
    seen = acting.world()
    seen = replace(seen, proofs={"n0": replace(seen.proofs["n0"], **lacks)})  # type: ignore[arg-type]
    decision = acting.decide(seen)
    assert not changed(decision, Fence, Delete)
    assert said in {one.about: one.text for one in decision.notices}["n0"]
    assert not changed(acting.decide(replace(seen, proofs={})), Fence), "not asked is not dead"


def test_a_sign_of_life_stops_what_was_begun(acting: Worlds) -> None:
    dead_for(acting, "n0")
    acting.look()
    assert FENCED in acting.nodes["n0"].labels
    acting.nodes["n0"].dead, acting.slurm["w-0"].responds = False, True
    acting.slurm["w-0"].jobs.add(7)
    acting.settle_in()
    assert acting.pods["w-0"].uid == "pod-w-0-0"
    assert acting.slurm["w-0"].jobs, "it was set down, and its slurmd lives"


def test_a_pod_whose_successor_is_there_already_is_not_deleted_nor_its_machine_given_up_for_it(acting: Worlds) -> None:
    """A pod with a successor is not deleted, and its machine is not fenced for it.

    This is the fleet's own pod or a Job's pod: a Deployment creates its successor under another name.
    """

    def seen(*, workers: bool) -> FleetSnapshot:
        found = acting.world()
        assert isinstance(found.kubernetes, KubernetesView)
        others = {**found.kubernetes.others, own.name: own}
        pods = found.kubernetes.pods if workers else {}
        return replace(found, kubernetes=replace(found.kubernetes, others=others, pods=pods))

    own = KubePod("slurm-fleet-7d5f-x", "own", node="n0", component="fleet")
    dead_for(acting, "n0")
    assert not changed(acting.decide(seen(workers=False)), Fence)
    deleted = []
    for _ in range(4):
        decision = acting.decide(seen(workers=True))
        deleted += [change.pod for change in decision.changes if isinstance(change, Delete)]
        for change in decision.changes:
            acting.perform(change)
    assert deleted == ["w-0"]


def test_where_slurm_hears_the_worker_its_machine_is_not_dead(acting: Worlds) -> None:
    """A machine whose slurmd responds to slurmctld is not fenced.

    The network may be cut between the fleet and the machine, but not between slurmctld and the machine.
    """
    dead_for(acting, "n0")
    acting.slurm["w-0"].responds = True
    acting.settle_in()
    assert "slurmctld still hears w-0 on it" in told(acting)["n0", "dead"]
    assert not [change for change in acting.done if isinstance(change, Fence | Delete)]


def test_where_a_provider_is_named_his_word_is_needed(acting: Worlds) -> None:
    acting.policy = Policy(fencing="act", provider=("cloud/shutdown",))
    dead_for(acting, "n0")
    acting.settle_in()
    assert "the provider has not reported it off" in told(acting)["n0", "dead"]
    acting.taint("n0", "cloud/shutdown")
    acting.settle_in()
    assert acting.pods["w-0"].node != "n0"


def test_a_machine_that_calls_itself_given_up_is_not_believed(acting: Worlds) -> None:
    """A machine's own fenced annotation is not trusted.

    Its kubelet may write annotations, and could bypass the budget and have a person's taint removed.
    """
    acting.nodes["n0"].annotations["minivm.io/fenced"] = "a lie"
    acting.nodes["n0"].taints[OUT] = "nodeshutdown"
    acting.settle_in()
    assert OUT in acting.nodes["n0"].taints, "a person's word is lifted"
    del acting.nodes["n0"].taints[OUT]
    dead_for(acting, "n0", "n1")
    acting.settle_in()
    assert not [change for change in acting.done if isinstance(change, Fence | Delete | Unfence)]


def test_machines_that_die_together_are_not_given_up(acting: Worlds) -> None:
    dead_for(acting, "n0", "n1")
    acting.settle_in()
    assert not [change for change in acting.done if isinstance(change, Fence | Delete)]
    assert "more than 1 of" in told(acting)["fleet", "fencing"]


def test_machines_that_are_given_up_count_until_they_are_back(acting: Worlds) -> None:
    dead_for(acting, "n0")
    acting.settle_in()
    dead_for(acting, "n1")
    acting.settle_in()
    assert acting.pods["w-1"].node == "n1"
    acting.ready("n0")
    acting.settle_in()
    assert acting.pods["w-1"].node != "n1"


def test_a_taint_that_a_person_set_is_his_to_lift(acting: Worlds) -> None:
    acting.taint("n0", OUT)
    dead_for(acting, "n0")
    acting.settle_in()
    acting.ready("n0")
    acting.now += 1000
    acting.settle_in()
    assert list(acting.nodes["n0"].taints) == [OUT]


def test_a_persons_drain_on_a_dead_machine_stays_and_its_pod_goes(acting: Worlds) -> None:
    acting.person_drains("w-0")
    dead_for(acting, "n0")
    acting.settle_in()
    assert (acting.slurm["w-0"].drained_by, acting.pods["w-0"].node != "n0") == ("person", True)


# Which pods may be evicted by others.


def test_a_pod_may_be_evicted_by_others_while_it_is_drained_and_idle_and_at_no_other_time(worlds: Worlds) -> None:
    assert not worlds.pods["w0"].free, "idle, and a job may come at any moment"
    worlds.slurm["w0"].jobs.add(7)
    worlds.cordon("n0")
    worlds.settle_in()
    assert not worlds.pods["w0"].free, "drained, and its job runs"
    worlds.slurm["w0"].suspended.add(7)
    worlds.settle_in()
    assert not worlds.pods["w0"].free, "its record looks idle, and a job holds it"
    worlds.jobs_end("w0")
    worlds.settle_in()
    assert worlds.pods["w0"].free
    worlds.cordon("n0", on=False)
    (protect,) = changed(worlds.decide(worlds.world()), Protect, Undrain)
    assert isinstance(protect, Protect), "before it is undrained"
    worlds.settle_in()
    assert (worlds.pods["w0"].free, worlds.slurm["w0"].drained_by) == (False, "")


def test_a_pod_whose_node_a_person_resumes_is_protected_again(worlds: Worlds) -> None:
    worlds.person_drains("w0")
    worlds.settle_in()
    assert worlds.pods["w0"].free
    worlds.person_resumes("w0")
    worlds.look()
    assert not worlds.pods["w0"].free


@pytest.mark.parametrize("what", [Free, Evict])
def test_what_lets_a_pod_go_does_nothing_where_a_person_has_resumed_its_node_since(worlds: Worlds, what: type) -> None:
    worlds.annotate("w0", "minivm.io/leave", "x")
    worlds.look()
    if what is Evict:
        worlds.look()
    seen = worlds.world()
    assert changed(worlds.decide(seen), what)
    worlds.person_resumes("w0")
    worlds.slurm["w0"].jobs.add(7)
    before = worlds.pods["w0"]
    worlds.look(world=seen)
    assert (worlds.pods["w0"], worlds.pods["w0"].free) == (before, what is Evict)


def test_a_pod_that_slurm_does_not_know_is_not_free(worlds: Worlds) -> None:
    worlds.person_drains("w0")
    worlds.settle_in()
    del worlds.slurm["w0"]
    (protect,) = changed(worlds.decide(worlds.world()), Protect)
    assert isinstance(protect, Protect)


def test_what_nobody_may_show_keeps_no_drain_from_its_turn() -> None:
    worlds = Worlds(size=5, policy=Policy(changes=2, rate=1))
    worlds.cordon("n4")
    assert [type(change) for change in worlds.decide(worlds.world()).changes] == [Drain, *[ShowOnPod] * 3]


def test_by_policy_a_persons_drain_cordons_and_its_end_uncordons() -> None:
    worlds = Worlds(policy=Policy(cordon=True))
    worlds.person_drains("w0")
    worlds.look()
    assert worlds.nodes["n0"].cordoned
    assert [change.reason for change in worlds.done if isinstance(change, Cordon)] == ["w0: look at fan 3"]
    worlds.settle()
    assert worlds.slurm["w0"].drained_by == "person"
    worlds.person_resumes("w0")
    worlds.settle()
    assert not worlds.nodes["n0"].cordoned
    assert Drain not in {type(change) for change in worlds.done}, "our cordon is no cause of our own, not for a moment"


def test_a_machine_that_calls_a_persons_cordon_the_fleets_is_not_believed() -> None:
    """A machine's claim that the fleet set a person's cordon is not trusted.

    Its kubelet may annotate its own Node, and could keep its jobs and have the cordon removed.
    """
    worlds = Worlds(policy=Policy(cordon=True))
    worlds.cordon("n0")
    worlds.nodes["n0"].annotations["minivm.io/cordoned"] = "w0: look at fan 3"
    worlds.settle()
    assert worlds.nodes["n0"].cordoned
    assert worlds.slurm["w0"].drained_by == "fleet"


def test_the_fleets_own_drain_cordons_nothing() -> None:
    worlds = Worlds(policy=Policy(cordon=True))
    worlds.nodes["n0"].taints["minivm.io/maintenance"] = "rack 4"
    worlds.settle()
    assert worlds.slurm["w0"].drained_by == "fleet"
    assert not worlds.nodes["n0"].cordoned


def test_a_persons_cordon_is_not_lifted_with_slurms_drain() -> None:
    worlds = Worlds(policy=Policy(cordon=True))
    worlds.cordon("n0")
    worlds.look()
    assert not changed(worlds.decide(worlds.world()), Cordon, Uncordon)


@pytest.mark.parametrize("cordon", [False, True])
@pytest.mark.parametrize("here", [False, True], ids=["no worker on it", "a worker on it"])
def test_a_cordon_of_another_clusters_fleet_is_lifted_by_that_one_alone(here: bool, cordon: bool) -> None:
    worlds = Worlds(policy=Policy(cordon=cordon))
    if not here:
        worlds.pods["w0"].node = "n1"
    worlds.cordon("n0")
    worlds.nodes["n0"].labels[OURS] = f"{MARK}-2"
    worlds.settle()
    assert worlds.nodes["n0"].cordoned
    assert worlds.slurm["w0"].drained_by == ("fleet" if here else "")
    # Marks of older releases do not name their cluster.
    worlds.nodes["n0"].labels[OURS] = "true"
    worlds.settle()
    assert worlds.nodes["n0"].cordoned == (not here), "gone where a worker is"


def test_a_policy_that_cordons_no_more_takes_its_cordons_back() -> None:
    worlds = Worlds(policy=Policy(cordon=True))
    worlds.person_drains("w0")
    worlds.look()
    worlds.policy = Policy()
    worlds.look()
    assert not worlds.nodes["n0"].cordoned


# Unknown state.


@pytest.mark.parametrize("blind", ["kubernetes", "slurm"])
def test_a_side_that_is_not_known_is_told_and_nothing_is_done(worlds: Worlds, blind: str) -> None:
    worlds.cordon("n0")
    worlds.look()
    worlds.cordon("n0", on=False)
    worlds.cordon("n1")
    decision = worlds.decide(worlds.world(blind=blind))
    assert not decision.changes
    assert [one.kind for one in decision.notices] == ["unknown"]


def test_a_node_that_cannot_be_read_is_not_one_without_a_cause(worlds: Worlds) -> None:
    worlds.cordon("n0")
    worlds.look()
    del worlds.nodes["n0"]
    assert not in_slurm(worlds), "the pod's Node is not there: nobody says that the cause is gone"


def test_so_many_changes_a_pass_and_the_rest_later() -> None:
    worlds = Worlds(size=5, policy=Policy(changes=2))
    worlds.settle_in()
    worlds.cordon(*worlds.nodes)
    assert worlds.look() == 2
    assert told(worlds)["fleet", "rate"] == "more than 2 changes are due; the rest follow in the next passes"
    worlds.settle()


def test_the_same_is_told_once(worlds: Worlds) -> None:
    worlds.person_drains("w0")
    worlds.cordon("n0")
    first = worlds.decide(worlds.world())
    worlds.memory = first.memory
    assert [one.kind for one in first.news] == ["held"]
    again = worlds.decide(worlds.world())
    assert (again.news, [one.kind for one in again.notices]) == ((), ["held"])


# Text from other authors.


def test_a_cordons_reason_passes_neither_for_a_verdict_nor_for_another_node() -> None:
    """A cordon's reason cannot pass for a verdict or another node.

    Otherwise the health broker would take the fleet's drain for its own, and lift it when its checks pass.
    """
    said = slurm.drain_reason({"cordon": 'x; gpu_count[rma]@9f2c001 gone\nNodeName="w9"; \x1b[31m' + "y" * 500})
    assert not broker.names(said)
    assert said.isprintable()
    assert len(said) < 220
    assert slurm.causes_in(said) == {"cordon"}
    shown = init_node.parse(f"NodeName=w0 State=IDLE+DRAIN Reason={said} [slurm@2026-11-20T10:32:18]")
    assert (shown.name, shown.reason) == ("w0", said)
    assert shown.held_by_others, "the pod's own drain leaves it to the fleet"


@pytest.mark.parametrize(
    "reason", ["minivm: fleet", "minivm: fleet: lifted", "minivm: fleet: : x", "MINIVM: fleet: cordon: x", "cordon: x"]
)
def test_what_is_nearly_our_reason_is_not_ours(reason: str) -> None:
    assert not slurm.causes_in(reason)


@pytest.mark.parametrize(
    "comment", ["", "minivm: fleet: held", "minivm: fleet: held 99999999 x", "minivm: fleet: held 1 x y"]
)
def test_a_mark_that_nobody_can_read_is_none(comment: str) -> None:
    assert slurm.mark_in_comment(comment) is None


@pytest.mark.parametrize("comes_and_goes", [False, True])
def test_a_condition_whose_message_changes_each_second_does_not_fill_the_log(comes_and_goes: bool) -> None:
    """A condition with ever new messages is rate-limited in the log: a kubelet may write any text at any rate."""
    worlds = Worlds(size=5, policy=Policy(conditions=("Sick",)))
    worlds.person_drains("w0")
    worlds.look()
    news = 0
    for second in range(600):
        worlds.now += 1
        worlds.nodes["n0"].signs = {"Sick": "False" if comes_and_goes and second % 2 else "True"}
        worlds.nodes["n0"].said = f"temperature {second}"
        decision = worlds.decide(worlds.world())
        worlds.memory = decision.memory
        news += len(decision.news)
    assert 8 <= news <= 8 * 11
    worlds.now += 60
    worlds.nodes["n0"].signs, worlds.nodes["n0"].said = {"Sick": "True"}, "and now"
    (said,) = worlds.decide(worlds.world()).news
    assert "and now" in said.text, "a minute later it is told again"
