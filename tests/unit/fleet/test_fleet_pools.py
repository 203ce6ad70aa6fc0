"""Worker pools whose pods the fleet creates: which pods it creates, replaces and deletes, and in which order."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]  # none are there
import pytest

from fleet import FleetError, crd
from fleet.act.changes import build_pod
from fleet.cli import explain
from fleet.decide.actions import Adopt, CreatePod, Drain, Evict, FleetMemory, NotePool, Undrain
from fleet.decide.pools import find_refusals
from fleet.policy import Policy
from fleet.world.kubernetes import KubeNode, assemble
from fleet.world.worker_pool import parse_pool, pod_name, pool_status_json
from tests.fleet_pools_world import POOL, PoolWorlds, SlurmNode, template

ROOT = Path(__file__).resolve().parents[3]
DAY_S = 86400.0


@pytest.fixture
def worlds() -> PoolWorlds:
    made = PoolWorlds()
    made.turns()
    return made


def done(worlds: PoolWorlds, *kinds: type) -> list[str]:
    return [getattr(one, "pod", getattr(one, "name", "")) for one in worlds.done if isinstance(one, kinds)]


def told(worlds: PoolWorlds) -> dict[tuple[str, str], str]:
    return {(one.about, one.kind): one.text for one in worlds.decide(worlds.world()).notices}


def stands(worlds: PoolWorlds) -> dict[str, tuple[str, str]]:
    return {one.type: (one.status, one.message) for one in worlds.read().status.conditions}


def test_a_pool_that_is_as_wanted_is_noted_once_and_left_alone(worlds: PoolWorlds) -> None:
    assert [type(one) for one in worlds.done if not done_shows(one)] == [NotePool]
    status = worlds.read().status
    assert (status.wanted, status.replicas, status.ready, status.updated, status.away) == (4, 4, 4, 4, 0)
    assert stands(worlds) == {"Ready": ("True", ""), "Updated": ("True", "")}


def done_shows(one: object) -> bool:
    return type(one).__name__.startswith("Show")


def test_what_is_missing_is_made_and_what_is_too_much_goes_drained_and_from_the_end(worlds: PoolWorlds) -> None:
    worlds.wants_of_it(replicas=6)
    worlds.turns()
    assert sorted(done(worlds, CreatePod)) == ["w-4", "w-5"]
    worlds.starts("w-5")
    worlds.wants_of_it(replicas=3)
    worlds.turns()
    assert sorted(worlds.pods) == ["w-0", "w-1", "w-2", "w-5"], "one with a job stays until it has ended"
    assert stands(worlds)["Updated"] == ("False", "too many: 1")
    worlds.jobs_end("w-5")
    worlds.turns()
    assert sorted(worlds.pods) == ["w-0", "w-1", "w-2"]
    assert sorted(worlds.slurm) == ["w-0", "w-1", "w-2"], "and their records go"


def test_what_is_wanted_again_takes_jobs_again(worlds: PoolWorlds) -> None:
    worlds.starts("w-3")
    worlds.wants_of_it(replicas=3)
    worlds.turns()
    assert worlds.slurm["w-3"].drained_by == "fleet"
    worlds.wants_of_it(replicas=4)
    worlds.turns()
    assert worlds.slurm["w-3"].drained_by == "" and worlds.slurm["w-3"].jobs == {7}
    assert not done(worlds, Evict)


def test_in_a_roll_a_pod_with_a_job_of_a_day_is_not_touched_and_every_other_gets_the_template() -> None:
    worlds = PoolWorlds(8, maxUnavailable=2)
    worlds.turns()
    old = worlds.pods["w-3"].uid
    worlds.starts("w-3")
    worlds.roll("2")
    begun, most = worlds.now, 0
    while worlds.now - begun < DAY_S:
        worlds.look()
        most = max(most, len(worlds.unavailable()))
        # New jobs of ten minutes start on every other node.
        for name in [one for one in worlds.pods if one != "w-3"]:
            worlds.jobs_end(name) if worlds.now % 600 < 60 else worlds.starts(name, 8)
        worlds.kubelets()
        worlds.now += 60
    assert worlds.updated() == set(worlds.pods) - {"w-3"}
    assert (worlds.pods["w-3"].uid, worlds.slurm["w-3"].jobs) == (old, {7})
    assert most == 2, "and no more than may be were away"
    worlds.jobs_end("w-3")
    worlds.turns()
    assert worlds.updated() == set(worlds.pods) and len(worlds.pods) == 8
    assert stands(worlds) == {"Ready": ("True", ""), "Updated": ("True", "")}


def test_those_that_wait_for_long_jobs_do_not_keep_the_others_from_their_turn() -> None:
    """Pods that wait for long jobs do not delay other updates: all nodes are busy, the first with the longest job."""
    worlds = PoolWorlds(4)
    worlds.turns()
    for name in worlds.names:
        worlds.starts(name)
    worlds.roll("2")
    worlds.look()
    assert done(worlds, Drain) == ["w-0"], "one at a time is kept from new jobs"
    worlds.now += 700
    worlds.look()
    assert done(worlds, Drain) == ["w-0", "w-1"]
    worlds.jobs_end("w-1")
    worlds.turns()
    assert "w-1" in worlds.updated() and worlds.slurm["w-0"].jobs


def test_one_that_gets_idle_when_there_is_no_room_takes_jobs_again() -> None:
    worlds = PoolWorlds(3)
    worlds.turns()
    for name in ("w-0", "w-1"):
        worlds.starts(name)
    worlds.roll("2")
    for _ in range(3):
        worlds.look()
        worlds.now += 700
    assert {name for name, node in worlds.slurm.items() if node.drained_by} >= {"w-0", "w-1"}
    worlds.pods["w-2"].ready = False
    worlds.leaving.discard("w-2")
    worlds.jobs_end("w-0")
    worlds.look()
    assert worlds.slurm["w-0"].drained_by == "", "w-2 is away, and that is as many as may be"
    assert done(worlds, Undrain) == ["w-0"]


def test_the_template_is_changed_back_and_who_waited_takes_jobs_again(worlds: PoolWorlds) -> None:
    for name in worlds.names:
        worlds.starts(name)
    worlds.roll("2")
    worlds.look()
    assert worlds.slurm["w-0"].reason.startswith("minivm: fleet: update: template")
    worlds.roll("1")
    worlds.turns()
    assert not [node for node in worlds.slurm.values() if node.drained_by]
    assert not done(worlds, Evict)


def test_a_template_that_never_gets_ready_stops_the_roll_and_the_next_one_replaces_it(worlds: PoolWorlds) -> None:
    worlds.roll("2")
    worlds.broken = {worlds.read().hash}
    worlds.turns()
    assert len(worlds.updated()) == 1, "the others stay as they are"
    assert stands(worlds)["Ready"] == ("False", "not ready: w-0")
    worlds.roll("3")
    worlds.turns()
    assert worlds.updated() == set(worlds.pods) == set(worlds.names)


def test_a_pool_that_never_got_ready_is_replaced_too() -> None:
    worlds = PoolWorlds(3)
    worlds.pods.clear()
    worlds.slurm.clear()
    worlds.broken = {worlds.read().hash}
    worlds.turns()
    assert len(worlds.pods) == 3 and not worlds.slurm
    worlds.roll("2")
    worlds.turns()
    assert worlds.updated() == set(worlds.pods) and all(pod.ready for pod in worlds.pods.values())


def test_pods_that_no_machine_takes_are_replaced_without_a_turn(worlds: PoolWorlds) -> None:
    worlds.wants_of_it(replicas=6)
    worlds.look()
    worlds.unplaced = {"w-4", "w-5"}
    worlds.turns()
    worlds.roll("2")
    worlds.look()
    assert set(done(worlds, Evict)) == {"w-4", "w-5"}
    worlds.turns()
    assert worlds.updated() == set(worlds.pods) and len(worlds.pods) == 6


@pytest.mark.parametrize(("within", "ended"), [({"when": "now"}, True), ({"when": "idle"}, False)])
def test_by_policy_jobs_run_elsewhere_at_once_or_never(within: dict[str, Any], ended: bool) -> None:
    worlds = PoolWorlds(3)
    worlds.turns()
    for name in worlds.names:
        worlds.starts(name)
    worlds.roll("2", **within)
    worlds.turns()
    assert (worlds.updated() == set(worlds.pods)) is ended


def test_by_policy_jobs_have_their_time_and_one_after_the_other_runs_elsewhere() -> None:
    worlds = PoolWorlds(3)
    worlds.turns()
    for name in worlds.names:
        worlds.starts(name)
    worlds.roll("2", when="deadline", deadlineSeconds=3600)
    worlds.look()
    worlds.now += 3500
    worlds.look()
    assert all(node.jobs for node in worlds.slurm.values()), "not a minute earlier"
    worlds.now += 200
    for _ in range(3):
        worlds.look()
    assert sum(not node.jobs for node in worlds.slurm.values()) == 1
    worlds.kubelets()
    for _ in range(4):
        worlds.now += 3600
        worlds.turns()
    assert worlds.updated() == set(worlds.pods)


def test_a_moment_in_which_no_pod_is_ready_ends_no_more_jobs_than_may_be_away() -> None:
    """When all pods are unready for a moment, an update ends no more jobs than `maxUnavailable`.

    A single failed probe does not mean that the jobs have stopped.
    """
    worlds = PoolWorlds(6)
    worlds.turns()
    for name in worlds.names:
        worlds.starts(name)
        worlds.pods[name].ready = False
    worlds.roll("2", when="now")
    worlds.look()
    worlds.look()
    assert sum(not node.jobs for node in worlds.slurm.values()) <= 1


@pytest.mark.parametrize("affinity", [None, {"nodeAffinity": None}, {"podAffinity": {}}])
def test_an_affinity_that_says_nothing_is_none(affinity: object) -> None:
    worlds = PoolWorlds(2, per_node=True)
    worlds.wants_of_it(template={"spec": {"containers": [{"name": "a"}], "affinity": affinity}})
    made = build_pod(CreatePod("w-n0", "n0", worlds.read()), {"a": "b"})
    required = made["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert required["nodeSelectorTerms"] == [
        {"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n0"]}]}
    ]


@pytest.mark.parametrize("affinity", ["x", {"nodeAffinity": "x"}])
def test_an_affinity_that_is_none_is_a_sentence(affinity: object) -> None:
    worlds = PoolWorlds(2)
    worlds.wants_of_it(template={"spec": {"containers": [{"name": "a"}], "affinity": affinity}})
    with pytest.raises(FleetError, match="affinity"):
        worlds.read()


def test_what_a_person_holds_stays_and_takes_nobodys_turn(worlds: PoolWorlds) -> None:
    worlds.person_drains("w-0")
    worlds.roll("2")
    worlds.turns()
    assert worlds.updated() == {"w-1", "w-2", "w-3"}
    assert worlds.slurm["w-0"].reason == "look at fan 3"
    assert "update" in told(worlds)[("w-0", "held")]
    worlds.person_resumes("w-0")
    worlds.turns()
    assert worlds.updated() == set(worlds.pods)


def test_a_person_who_resumes_it_twice_is_believed_and_keeps_nobody_else_from_it(worlds: PoolWorlds) -> None:
    worlds.starts("w-0")
    worlds.roll("2")
    for _ in range(2):
        worlds.look()
        worlds.person_resumes("w-0")
    worlds.jobs_end("w-0")
    worlds.turns()
    assert worlds.updated() == {"w-1", "w-2", "w-3"}
    assert ("w-0", "lifted") in told(worlds)


def test_maxunavailable_0_takes_nothing_away_and_lifts_what_was_begun(worlds: PoolWorlds) -> None:
    worlds.starts("w-0")
    for name in ("w-1", "w-2", "w-3"):
        worlds.starts(name)
    worlds.roll("2")
    worlds.look()
    worlds.roll("2", maxUnavailable=0)
    worlds.turns()
    assert not worlds.updated() and not done(worlds, Evict)
    assert not [node for node in worlds.slurm.values() if node.drained_by]
    assert "maxUnavailable is 0" in stands(worlds)["Updated"][1]


@pytest.mark.parametrize("blind", ["pools", "slurm", "kubernetes"])
def test_of_what_is_not_known_nothing_is_begun_and_nothing_lifted(worlds: PoolWorlds, blind: str) -> None:
    worlds.roll("2")
    worlds.look()
    worlds.wants_of_it(replicas=5)
    held = {name for name, node in worlds.slurm.items() if node.drained_by}
    assert held == {"w-0"}
    before = len(worlds.done)
    for _ in range(3):
        worlds.memory = FleetMemory()
        worlds.now += 700
        worlds.look(blind=blind)
    assert not {type(one) for one in worlds.done[before:]} & {Evict, CreatePod, Undrain, Drain, NotePool}
    assert {name for name, node in worlds.slurm.items() if node.drained_by} == held


def test_where_statefulsets_are_not_known_nothing_is_begun_and_nothing_lifted(worlds: PoolWorlds) -> None:
    worlds.roll("2")
    worlds.look()
    before, worlds.sets = len(worlds.done), None
    for _ in range(3):
        worlds.look()
    assert not {type(one) for one in worlds.done[before:]} & {Evict, CreatePod, Undrain, Drain, NotePool}
    assert (POOL, "pool") in told(worlds)
    assert [name for name, node in worlds.slurm.items() if node.drained_by] == ["w-0"]


def test_a_statefulset_of_its_name_goes_first_and_its_pods_are_taken_over_as_they_are() -> None:
    worlds = PoolWorlds(3)
    worlds.sets = {POOL: 3}
    worlds.owner = dict.fromkeys(worlds.owner, "a-statefulset")
    worlds.templates = dict.fromkeys(worlds.templates, "")
    uids = {name: pod.uid for name, pod in worlds.pods.items()}
    worlds.turns()
    assert not done(worlds, Adopt, CreatePod, Evict, Drain)
    assert "StatefulSet" in told(worlds)[(POOL, "pool")]
    worlds.sets = {}
    worlds.turns()
    assert not done(worlds, Adopt) and ("w-0", "pool") in told(worlds), "what another one makes stays his"
    worlds.owner = dict.fromkeys(worlds.owner, "")
    worlds.turns()
    assert {name: pod.uid for name, pod in worlds.pods.items()} == uids, "none was made anew"
    assert worlds.updated() == set(worlds.pods)
    worlds.roll("2")
    worlds.turns()
    assert worlds.updated() == set(worlds.pods)


def test_a_pod_that_has_ended_is_made_anew_and_it_is_said_why(worlds: PoolWorlds) -> None:
    old = worlds.pods["w-1"].uid
    worlds.starts("w-1")
    worlds.ends("w-1")
    worlds.slurm["w-1"].down = True
    worlds.look()
    worlds.look()
    worlds.look()
    assert stands(worlds)["Ready"][1].startswith("not ready: w-1")
    (evicted,) = [one for one in worlds.done if isinstance(one, Evict)]
    assert (evicted.uid, evicted.reason) == (old, "Failed: Evicted: The node was low on memory.")
    worlds.turns()
    assert worlds.pods["w-1"].uid != old and worlds.pods["w-1"].ready and not worlds.slurm["w-1"].drained_by
    (noted,) = worlds.read().status.ended
    assert (noted.name, noted.uid, noted.times) == ("w-1", old, 1)
    worlds.now += 3600
    worlds.turns()
    assert worlds.read().status.ended == (), "that it is well for a while is the end of it"


def test_one_that_ends_again_and_again_is_made_anew_ever_more_seldom(worlds: PoolWorlds) -> None:
    begun = worlds.now
    while worlds.now - begun < 7200:
        if "w-1" in worlds.pods and "w-1" not in worlds.over:
            worlds.ends("w-1")
        worlds.look()
        worlds.now += 5
        worlds.memory = FleetMemory() if worlds.now % 3 else worlds.memory  # the fleet may be restarted between passes
    times = [at - begun for _, at in worlds.made_anew]
    pauses = [after - before for before, after in pairwise(times)]
    assert pauses[:3] == sorted(pauses[:3]) and pauses[0] >= 30
    assert 6 <= len(times) <= 9, pauses
    assert "has ended" in told(worlds)[("w-1", "ended")]


def test_what_is_said_of_a_pod_that_slurm_hears_makes_nothing_go(worlds: PoolWorlds) -> None:
    """A pod status that claims an end does not remove a pod whose slurmd responds.

    Every writer of a pod's status may claim that the pod has ended.
    """
    worlds.starts("w-1")
    for name in ("w-0", "w-1"):
        worlds.ends(name, lie=True)
    worlds.turns()
    assert not done(worlds, Evict, CreatePod) and worlds.slurm["w-1"].jobs
    assert "stays until slurmctld has lost" in told(worlds)[("w-1", "ended")]


@pytest.mark.parametrize(
    ("left", "goes"),
    [
        ({"jobs": {7}, "responds": False}, False),  # slurmd does not respond for a moment
        ({"suspended": {7}, "jobs": {7}, "responds": False}, False),
        ({"jobs": {7}, "responds": False, "down": True}, True),  # Slurm has requeued its jobs
        ({"responds": False}, True),
        ({"jobs": {7}, "drained_by": "person"}, False),
    ],
)
def test_one_that_is_said_to_have_ended_keeps_its_jobs_until_slurm_gives_them_up(
    worlds: PoolWorlds, left: dict[str, Any], goes: bool
) -> None:
    worlds.ends("w-1", lie=True)
    for key, value in left.items():
        setattr(worlds.slurm["w-1"], key, value)
    for _ in range(3):
        worlds.look()
    assert ("w-1" in done(worlds, Evict)) is goes


def test_no_more_pods_that_ended_are_made_anew_at_a_time_than_are_counted() -> None:
    worlds = PoolWorlds(300, Policy(changes=1000), maxUnavailable=300)
    worlds.turns()
    for name in worlds.names:
        worlds.ends(name)
    for _ in range(5):
        worlds.look()
    assert len(worlds.made_anew) == len(worlds.read().status.ended) == 128
    worlds.turns()
    assert len(worlds.made_anew) == 300 and all(pod.ready for pod in worlds.pods.values())


def test_pods_that_cannot_be_made_keep_nothing_else_from_being_done(worlds: PoolWorlds) -> None:
    """Pods that cannot be created do not block other changes.

    A quota refuses more of them than the fleet makes changes in a pass.
    """
    worlds.refuses = lambda change: isinstance(change, CreatePod) and change.name != "w-63"
    worlds.wants_of_it(replicas=64)
    tries = []
    for _ in range(60):
        worlds.look()
        tries.append(len([one for one in worlds.memory.refused.values() if one.times]))
        worlds.now += 1
    assert "w-63" in worlds.pods, "one that can be made is"
    assert (worlds.read().status.wanted, worlds.read().status.replicas) == (64, 5), "and it is noted"
    most = max(one.times for one in worlds.memory.refused.values())
    assert most <= 6, "and each is tried less and less often"


def test_a_big_pool_that_has_none_of_its_pods_keeps_no_other_from_its_own_and_asks_seldom(worlds: PoolWorlds) -> None:
    big = replace(worlds.read(), name="a", uid="pool-a", label="a", replicas=2000)
    worlds.more["a"], full = big, True
    worlds.wants_of_it(replicas=5)
    worlds.left_alone(0)
    worlds.refuses = lambda change: isinstance(change, CreatePod) and change.name.startswith("a-") and full

    def tries() -> list[str]:
        return [one.name for one in worlds.decide(worlds.world()).changes if isinstance(one, CreatePod)]

    changes = worlds.decide(worlds.world()).changes
    assert [one.name for one in changes if isinstance(one, CreatePod)][:3] == ["a-0", "w-4", "a-1"]
    assert {one.name for one in changes if isinstance(one, NotePool)} == {"a", "w"}
    asked = tries()
    worlds.look()
    worlds.look()
    assert "w-4" in worlds.pods and done(worlds, Adopt) == ["w-0"]
    for _ in range(30):
        (name,) = tries()
        asked.append(name)
        worlds.look()
        worlds.now += 1
    assert len({*asked}) == len(asked), "one at a time, and another one each time"
    full = False
    paces: list[int] = []
    while len(paces) < 6:
        changes = worlds.decide(worlds.world()).changes
        paces.append(len([one for one in changes if isinstance(one, CreatePod)]))
        worlds.memory = worlds.memory.after_pass(changes, {}, worlds.now)
    assert paces == [1, 2, 4, 8, 16, 30], "and once it may it comes quickly"


def test_what_is_written_into_a_pods_label_neither_brings_nor_holds_off_another_template(worlds: PoolWorlds) -> None:
    """A pod's label neither starts nor prevents an update.

    Every client that may patch a pod's status may patch its labels too.
    """
    for name in worlds.names:
        worlds.starts(name)
    worlds.roll("1", when="now")
    worlds.labelled = dict.fromkeys(worlds.names, "another")
    worlds.turns()
    assert not done(worlds, Drain, Evict)
    worlds.roll("2", when="now")
    worlds.labelled = dict.fromkeys(worlds.names, worlds.read().hash)
    worlds.turns()
    assert set(done(worlds, Evict)) == set(worlds.names) and worlds.updated() == set(worlds.pods)


def test_a_pod_says_of_which_template_it_is_where_no_status_can_be_written() -> None:
    pool = PoolWorlds(1).read()
    (container,) = build_pod(CreatePod("w-0", "", pool), {"a": "b"})["spec"]["containers"]
    assert container["env"] == [{"name": "MINIVM_TEMPLATE", "value": pool.hash}]
    assert "env" not in template("1")["spec"]["containers"][0], "its hash is not of itself"


def test_what_is_taken_over_counts_as_made_of_what_was_there_then(worlds: PoolWorlds) -> None:
    """An adopted pod counts as created from the template of that moment.

    The fleet is killed between noting and adopting, and the template changes meanwhile.
    """
    worlds.left_alone(0)
    worlds.look(cut=1)
    assert not worlds.owner["w-0"] and worlds.read().status.adopted == worlds.read().hash, "noted first"
    worlds.roll("2")
    worlds.turns()
    assert "w-0" in done(worlds, Adopt) and "w-0" in done(worlds, Evict)
    assert worlds.updated() == set(worlds.pods) and worlds.read().status.adopted == "", "and that is over"


@pytest.mark.parametrize("begun", [False, True])
def test_of_two_pools_of_one_label_the_older_one_has_it_and_nothing_of_the_others_is_touched(begun: bool) -> None:
    worlds = PoolWorlds(3)
    worlds.turns()
    theirs = replace(worlds.read(), name="v", uid="pool-v", created=worlds.now, replicas=2, hash="v2")
    if begun:  # the younger pool had a label of its own until a moment ago
        worlds.born("v-0", "n0", "v1", "pool-v")
        worlds.slurm["v-0"] = SlurmNode(drained_by="fleet", reason="minivm: fleet: update: x", since=worlds.now)
    worlds.more["v"] = theirs
    worlds.roll("2")
    worlds.turns()
    assert worlds.updated() == {"w-0", "w-1", "w-2"}, "the older one goes on"
    assert {*worlds.pods} - worlds.updated() == ({"v-0"} if begun else set())
    held = {name for name, node in worlds.slurm.items() if node.drained_by}
    assert held == set(), "and what was begun of the other is lifted"
    (said,) = [one for one in worlds.more["v"].status.conditions if one.type == "Updated"]
    assert (said.status, said.reason) == ("False", "Refused") and "w, older, has its label w" in said.message
    assert told(worlds)[("v", "pool")] == said.message
    worlds.more["v"] = replace(theirs, label="v")
    assert {one.name for one in worlds.decide(worlds.world()).changes if isinstance(one, CreatePod)} >= {"v-1"}


@pytest.mark.parametrize("deleting", [False, True])
def test_who_is_younger_is_refused_also_while_the_older_one_goes(worlds: PoolWorlds, deleting: bool) -> None:
    worlds.more["v"] = replace(worlds.read(), name="v", uid="pool-v", replicas=0, created=-1.0, deleting=deleting)
    worlds.roll("2")
    worlds.look()
    assert "v, older, has its label w" in told(worlds)[("w", "pool")]
    assert not [name for name, node in worlds.slurm.items() if node.drained_by]


def test_of_two_pools_that_would_have_a_pod_of_one_name_the_older_one_makes_it() -> None:
    nodes = {"x-0": KubeNode("x-0", "u", labels={"gpu": "yes"})}
    young = PoolWorlds(1, per_node=True).read()
    old = replace(PoolWorlds(1).read(), name="w-x", uid="pool-wx", label="w-x", created=-1.0)
    found = find_refusals(assemble(nodes, {}, {}, {}, pools={"w": young, "w-x": old}))
    assert found == {"w": "the fleet touches none of its pods: w-x, older, has w-x-0 too"}


# One pod on each Node


@pytest.fixture
def per_node() -> PoolWorlds:
    made = PoolWorlds(3, per_node=True)
    made.turns()
    return made


def test_each_node_that_matches_has_one_and_one_that_matches_no_more_has_none(per_node: PoolWorlds) -> None:
    assert sorted(per_node.pods) == ["w-n0", "w-n1", "w-n2"] and not done(per_node, CreatePod)
    del per_node.nodes["n1"].labels["gpu"]
    per_node.starts("w-n1")
    per_node.turns()
    assert "w-n1" in per_node.pods, "its job ends first"
    per_node.jobs_end("w-n1")
    per_node.turns()
    assert sorted(per_node.pods) == sorted(per_node.slurm) == ["w-n0", "w-n2"]
    per_node.nodes["n1"].labels["gpu"] = "yes"
    per_node.turns()
    assert per_node.pods["w-n1"].node == "n1"


def test_a_node_that_is_closed_gets_none_until_it_is_open_and_holds_up_nobody(per_node: PoolWorlds) -> None:
    per_node.cordon("n0")
    per_node.turns()
    per_node.pod_goes("w-n0")
    per_node.roll("2")
    per_node.turns()
    assert per_node.updated() == {"w-n1", "w-n2"} == set(per_node.pods)
    per_node.cordon("n0", on=False)
    per_node.turns()
    assert per_node.updated() == {"w-n0", "w-n1", "w-n2"}


def test_what_runs_on_a_closed_node_is_replaced_when_it_is_open(per_node: PoolWorlds) -> None:
    per_node.cordon("n0")
    per_node.roll("2")
    per_node.turns()
    assert per_node.updated() == {"w-n1", "w-n2"}
    per_node.cordon("n0", on=False)
    per_node.turns()
    assert per_node.updated() == set(per_node.pods)


def test_names_are_those_of_nodes_and_always_a_hosts() -> None:
    assert pod_name("gpu", "gpu-17") == "gpu-gpu-17"
    long = ["ip-10-0-0-1.ec2.internal", "n" * 63, "a.b", "a-b.", "-", "A"]
    names = [pod_name("slurm-gpu", node) for node in long]
    assert len({*names}) == len(long)
    for name in names:
        assert len(name) <= 63 and name.startswith("slurm-gpu-") and name.replace("-", "").isalnum(), name
    assert pod_name("p", "a.b") != pod_name("p", "a-b")


def test_a_pod_is_of_its_pool_and_of_its_node_whatever_its_template_says() -> None:
    said: dict[str, Any] = {
        "metadata": {"labels": {"app.kubernetes.io/instance": "others", "x": "y"}, "annotations": {"a": "b"}},
        "spec": {
            "hostname": "x",
            "affinity": {"nodeAffinity": {"a": 1}, "podAffinity": {"b": 2}},
            "containers": [{"name": "a"}],
        },
    }
    pool = parse_pool({"metadata": {"name": "gpu", "uid": "u"}, "spec": {**SPEC, "template": said}})
    made = build_pod(
        CreatePod("gpu-n0", "n0", pool), {"app.kubernetes.io/name": "minivm", "app.kubernetes.io/instance": "slurm"}
    )
    assert made["metadata"]["labels"] == {
        "x": "y", "app.kubernetes.io/name": "minivm", "app.kubernetes.io/instance": "slurm",
        "app.kubernetes.io/component": "worker", "minivm.io/pool": "gpu", "minivm.io/template": pool.hash,
        "statefulset.kubernetes.io/pod-name": "gpu-n0",
    }  # fmt: skip
    assert (made["spec"]["hostname"], made["spec"]["subdomain"]) == ("gpu-n0", "gpu")
    affinity = made["spec"]["affinity"]
    assert affinity["podAffinity"] == {"b": 2}
    (term,) = affinity["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert term == {"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n0"]}]}
    assert said["spec"]["hostname"] == "x", "the template itself stays"


# The pool as Kubernetes stores it

DEEP: list[Any] = functools.reduce(lambda inner, _: [inner], range(100_000), [])
SPEC: dict[str, Any] = {"mode": "fixed", "replicas": 1, "template": template("1")}


@pytest.mark.parametrize(
    "wrong",
    [
        {"mode": "elastic"},
        {"replicas": -1},
        {"replicas": 70000},
        {"replicas": "2"},
        {"mode": "perNode"},
        {"mode": "perNode", "nodeSelector": {}},
        {"update": {"when": "soon"}},
        {"update": {"when": "deadline"}},
        {"update": {"when": "deadline", "deadlineSeconds": 0}},
        {"update": {"maxUnavailable": -1}},
        {"template": {"spec": {"containers": "x"}}},
        {"template": {"spec": {"containers": ["x"]}}},
        {"template": {"spec": {"containers": [{"env": ["x"]}]}}},
        {"template": {"metadata": {"labels": {"a": 1}}, "spec": {"containers": [{"name": "a"}]}}},
        {"template": {"spec": {}}},
        {"template": {"spec": {"containers": None}}},
        {"template": {"spec": {"containers": []}}},
        {"template": {"spec": {"containers": [{"name": "a"}], "x": DEEP}}},
    ],
)
def test_one_that_is_not_as_promised_is_refused_as_a_whole(wrong: dict[str, Any]) -> None:
    with pytest.raises(FleetError, match="read "):
        parse_pool({"metadata": {"name": "gpu", "uid": "u"}, "spec": {**SPEC, **wrong}})


def test_a_fixed_pool_whose_number_nothing_sets_has_one_pod() -> None:
    spec = {key: value for key, value in SPEC.items() if key != "replicas"}
    assert parse_pool({"metadata": {"name": "gpu", "uid": "u"}, "spec": spec}).replicas == 1


@pytest.mark.parametrize("name", ["a.b", "9gpu", "g" * 41, "gpu-"])
def test_a_name_that_begins_no_hosts_is_refused(name: str) -> None:
    with pytest.raises(FleetError, match=r"metadata\.name"):
        parse_pool({"metadata": {"name": name, "uid": "u"}, "spec": SPEC})


def test_a_wrong_edit_in_a_roll_leaves_the_last_good_spec_in_force(worlds: PoolWorlds) -> None:
    """An API server before 1.25 accepts it. The last good spec is in the object, so a new fleet holds it too."""
    worlds.roll("2")
    worlds.look()
    rolled = worlds.read().hash
    worlds.wants_of_it(update={"when": "deadline"}, replicas=9)
    worlds.pod_goes("w-0")
    worlds.turns()
    assert sorted(worlds.pods) == ["w-0", "w-1", "w-2", "w-3"] and set(worlds.templates.values()) == {rolled}
    assert not any(node.drained_by for node in worlds.slurm.values())
    mistake = "cannot read spec.update.deadlineSeconds: it is missing"
    assert stands(worlds)["Updated"] == ("False", f"{mistake}: the last good spec applies until you correct it")
    assert stands(worlds)["Ready"] == ("True", "")
    (updated,) = [one for one in worlds.read().status.conditions if one.type == "Updated"]
    assert updated.reason == "Mistake"
    assert told(worlds)[POOL, "pool"] == f"{mistake}: its last good spec applies until you correct it"
    snapshot = worlds.world()
    why = list(explain(POOL, snapshot, worlds.decide(snapshot)))
    assert any(mistake in line for line in why), why
    worlds.wants_of_it(update={"when": "now"}, replicas=3)
    worlds.turns()
    assert sorted(worlds.pods) == ["w-0", "w-1", "w-2"] and stands(worlds)["Updated"] == ("True", "")


@pytest.mark.parametrize("last", [None, "", "{", "[]", '{"mode": "fixed"}', "[" * 100_000])
def test_a_wrong_edit_without_a_last_good_spec_is_refused_as_before(last: str | None) -> None:
    status = {} if last is None else {"lastGood": last}
    with pytest.raises(FleetError, match=r"spec\.update\.when"):
        parse_pool({
            "metadata": {"name": "gpu", "uid": "u"}, "spec": {**SPEC, "update": {"when": "soon"}}, "status": status
        })  # fmt: skip


def test_a_definition_without_the_last_good_spec_is_not_written_to_again_and_again(worlds: PoolWorlds) -> None:
    del worlds.pool.status["lastGood"]
    worlds.done.clear()
    worlds.turns()
    assert not done(worlds, NotePool)


def test_what_is_noted_is_read_back_and_passes_the_schema(worlds: PoolWorlds) -> None:
    worlds.roll("2")
    worlds.look()
    status = replace(worlds.read().status, adopted="abc")
    assert status.conditions
    version: Any = crd.pool_definition()["spec"]
    schema = version["versions"][0]["schema"]["openAPIV3Schema"]
    item = {"spec": worlds.pool.spec, "status": pool_status_json(status)}
    assert not list(jsonschema.Draft202012Validator(schema).iter_errors(item))
    assert set(pool_status_json(status)) == set(schema["properties"]["status"]["properties"])


def test_the_charts_definition_is_the_one_that_is_written_here() -> None:
    text = (ROOT / "cluster/chart/charts/crds/crds/workerpool.json").read_text()
    said = json.dumps(crd.pool_definition(), indent=2) + "\n"
    assert text == said, "fleet crd workerpool > cluster/chart/charts/crds/crds/workerpool.json"
