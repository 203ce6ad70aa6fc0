"""Each row of the two-way state, and its reverse: what one side says, and what is done on the other."""

from __future__ import annotations

import pytest

from fleet import words
from fleet.decide.actions import Cordon, Drain, Evict, Forget, Free, Protect, ShowOnNode, ShowOnPod, Uncordon, Undrain
from fleet.decide.decide import Decision
from fleet.policy import Policy
from health.broker import decide as broker
from init.slurm import node as init_node
from tests.fleet_world import BEGIN, Worlds

REASON = "minivm: fleet: cordon: node n0 is cordoned"


def changed(decision: Decision, *kinds: type) -> list[object]:
    return [change for change in decision.changes if isinstance(change, kinds)]


def in_slurm(worlds: Worlds) -> list[object]:
    return changed(worlds.decide(worlds.world()), Drain, Undrain, Forget)


def told(worlds: Worlds) -> dict[tuple[str, str], str]:
    return {(one.about, one.kind): one.text for one in worlds.decide(worlds.world()).stands}


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
    assert told(worlds)["w0", "held"].startswith("drained by others (look at fan 3) and stays so")
    worlds.cordon("n0", on=False)
    assert not in_slurm(worlds)
    assert ("w0", "held") not in told(worlds)


def test_a_node_that_is_down_is_told_and_stays(worlds: Worlds) -> None:
    worlds.slurm["w0"].down, worlds.slurm["w0"].reason = True, "Not responding"
    worlds.cordon("n0")
    assert not in_slurm(worlds)
    assert told(worlds)["w0", "held"].startswith("down by others (Not responding)")


@pytest.mark.parametrize("reason", ["minivm: gpu_count[rma]@9f2c001 7 of 8 GPUs", init_node.STOPPING, words.LIFTED])
def test_what_the_broker_the_pod_or_slurm_itself_drains_is_not_the_fleets(worlds: Worlds, reason: str) -> None:
    """The last: Slurm's own drain keeps whatever reason it finds, also that of a drain of ours that is lifted."""
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
    assert words.kinds(worlds.slurm["w0"].reason) == {"cordon", "maintenance"}
    worlds.cordon("n0", on=False)
    worlds.look()
    assert words.kinds(worlds.slurm["w0"].reason) == {"maintenance"}
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


# A Node condition, a Node that is not ready.


def test_a_named_condition_drains_while_it_is_true() -> None:
    worlds = Worlds(policy=Policy(conditions=("HardwareIssuesSuspected",)))
    worlds.nodes["n0"].signs |= {"HardwareIssuesSuspected": "True", "DiskPressure": "True"}
    worlds.nodes["n1"].signs["DiskPressure"] = "True"
    worlds.look()
    assert [words.kinds(node.reason) for node in worlds.slurm.values()] == [{"condition"}, set(), set()]
    worlds.nodes["n0"].signs["HardwareIssuesSuspected"] = "False"
    worlds.look()
    assert not worlds.slurm["w0"].drained_by


def test_a_node_that_is_not_ready_for_a_while_takes_no_jobs_until_it_is(worlds: Worlds) -> None:
    worlds.ready("n0", False)
    worlds.now += worlds.policy.not_ready_s - 1
    assert not in_slurm(worlds)
    worlds.now += 1
    worlds.look()
    assert words.kinds(worlds.slurm["w0"].reason) == {"notready"}
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
    assert told(worlds)["fleet", "pause"].startswith("of 20 workers more than 4")
    worlds.cordon("n9")
    worlds.look()
    assert worlds.slurm["w9"].drained_by == "fleet", "a person's word counts in a pause too"
    assert words.kinds(worlds.slurm["w9"].reason) == {"cordon"}
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


# A pod that is to go.


def test_a_pod_that_is_to_go_waits_for_its_job_and_is_evicted_drained_and_idle(worlds: Worlds) -> None:
    worlds.slurm["w0"].jobs.add(7)
    worlds.annotate("w0", "minivm.io/leave", "new template")
    worlds.look()
    assert worlds.slurm["w0"].reason == "minivm: fleet: leave: new template"
    assert not changed(worlds.decide(worlds.world()), Evict)
    assert told(worlds)["w0", "leave"] == "is to go, and waits for jobs 7"
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


# What Slurm says, in Kubernetes.


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
    assert worlds.nodes["n0"].condition == ("True", "TakesJobs", "")
    worlds.person_drains("w0")
    worlds.look()
    assert worlds.nodes["n0"].condition == ("False", "Drained", "w0: Drained look at fan 3")
    worlds.pods["w1"].node = "n0"
    worlds.settle()
    assert worlds.nodes["n0"].condition == ("False", "Drained", "w0: Drained look at fan 3"), "of two, the worse"
    assert worlds.nodes["n1"].condition is None
    worlds.person_resumes("w0")
    worlds.settle()
    assert worlds.nodes["n0"].condition == ("True", "TakesJobs", "")


def test_of_a_node_one_of_whose_workers_is_not_known_nothing_is_shown(worlds: Worlds) -> None:
    worlds.pods["w1"].node = "n0"
    worlds.person_drains("w0")
    del worlds.slurm["w1"]
    assert not [one for one in changed(worlds.decide(worlds.world()), ShowOnNode) if one.node == "n0"]  # type: ignore[attr-defined]


def test_the_nodes_condition_is_named_or_left_out_by_policy() -> None:
    worlds = Worlds(policy=Policy(shows=""))
    worlds.settle()
    assert worlds.nodes["n0"].condition is None


# Which pods others may evict.


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
    worlds = Worlds(size=5, policy=Policy(changes=2))
    worlds.cordon("n4")
    assert [type(change) for change in worlds.decide(worlds.world()).changes] == [Drain, ShowOnPod]


def test_by_policy_a_persons_drain_cordons_and_its_end_uncordons() -> None:
    worlds = Worlds(policy=Policy(cordon=True))
    worlds.person_drains("w0")
    worlds.look()
    assert worlds.nodes["n0"].cordoned
    assert worlds.nodes["n0"].annotations == {"minivm.io/cordoned": "w0: look at fan 3"}
    worlds.settle()
    assert worlds.slurm["w0"].drained_by == "person"
    worlds.person_resumes("w0")
    worlds.settle()
    assert not worlds.nodes["n0"].cordoned
    assert Drain not in {type(change) for change in worlds.done}, "our cordon is no cause of our own, not for a moment"


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


def test_a_policy_that_cordons_no_more_takes_its_cordons_back() -> None:
    worlds = Worlds(policy=Policy(cordon=True))
    worlds.person_drains("w0")
    worlds.look()
    worlds.policy = Policy()
    worlds.look()
    assert not worlds.nodes["n0"].cordoned


# What is not known.


@pytest.mark.parametrize("blind", ["kubernetes", "slurm"])
def test_a_side_that_is_not_known_is_told_and_nothing_is_done(worlds: Worlds, blind: str) -> None:
    worlds.cordon("n0")
    worlds.look()
    worlds.cordon("n0", on=False)
    worlds.cordon("n1")
    decision = worlds.decide(worlds.world(blind=blind))
    assert not decision.changes
    assert [one.kind for one in decision.stands] == ["unknown"]


def test_a_node_that_cannot_be_read_is_not_one_without_a_cause(worlds: Worlds) -> None:
    worlds.cordon("n0")
    worlds.look()
    del worlds.nodes["n0"]
    assert not in_slurm(worlds), "the pod's Node is not there: nobody says that the cause is gone"


def test_so_many_changes_a_pass_and_the_rest_later() -> None:
    worlds = Worlds(size=5, policy=Policy(changes=2))
    assert worlds.look() == 2
    assert told(worlds)["fleet", "rate"] == "more than 2 changes are due: the rest follow"
    worlds.settle()


def test_the_same_is_told_once(worlds: Worlds) -> None:
    worlds.person_drains("w0")
    worlds.cordon("n0")
    first = worlds.decide(worlds.world())
    worlds.memory = first.memory
    assert [one.kind for one in first.news] == ["held"]
    again = worlds.decide(worlds.world())
    assert (again.news, [one.kind for one in again.stands]) == ((), ["held"])


# Words from others.


def test_a_cordons_reason_passes_neither_for_a_verdict_nor_for_another_node() -> None:
    """Else the health broker would take our drain for its own, and lift it when its checks pass."""
    said = words.reason({"cordon": 'x; gpu_count[rma]@9f2c001 gone\nNodeName="w9"; \x1b[31m' + "y" * 500})
    assert not broker.names(said)
    assert said.isprintable()
    assert len(said) < 220
    assert words.kinds(said) == {"cordon"}
    shown = init_node.parse(f"NodeName=w0 State=IDLE+DRAIN Reason={said} [slurm@2026-11-20T10:32:18]")
    assert (shown.name, shown.reason) == ("w0", said)
    assert shown.held_by_others, "the pod's own drain leaves it to the fleet"


@pytest.mark.parametrize(
    "reason", ["minivm: fleet", "minivm: fleet: lifted", "minivm: fleet: : x", "MINIVM: fleet: cordon: x", "cordon: x"]
)
def test_what_is_nearly_our_reason_is_not_ours(reason: str) -> None:
    assert not words.kinds(reason)


@pytest.mark.parametrize(
    "comment", ["", "minivm: fleet: held", "minivm: fleet: held 99999999 x", "minivm: fleet: held 1 x y"]
)
def test_a_mark_that_nobody_can_read_is_none(comment: str) -> None:
    assert words.marked(comment) is None
