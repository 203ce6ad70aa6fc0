"""Elastic pools, sized by the jobs that wait: when a pod is created, which pod is removed, and what never happens."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from fleet import FleetError
from fleet.decide.actions import Adopt, CreatePod, Drain, Evict, FleetMemory, Remove, Undrain
from fleet.decide.pools import find_refusals
from fleet.policy import Policy
from fleet.world.kubernetes import KubernetesView
from fleet.world.slurm import Offer, PendingJob, gpus, mismatch, nodes_needed, parse_pending_jobs, parse_slurm, tasks
from fleet.world.worker_pool import WorkerPool, parse_pool
from tests.fleet_elastic_world import ElasticWorlds, Job, template


def done(worlds: ElasticWorlds, *kinds: type) -> list[str]:
    return [getattr(one, "pod", getattr(one, "name", "")) for one in worlds.done if isinstance(one, kinds)]


def told(worlds: ElasticWorlds) -> dict[tuple[str, str], str]:
    return {(one.about, one.kind): one.text for one in worlds.decide(worlds.world()).notices}


def fits(worlds: ElasticWorlds) -> tuple[str, str, str]:
    return next((one.status, one.reason, one.message) for one in worlds.read().status.conditions if one.type == "Fits")


def test_a_job_that_waits_gets_the_nodes_that_it_asks_for_and_none_before_it_has_waited() -> None:
    worlds = ElasticWorlds()
    worlds.goes_on()
    assert not worlds.pods, "nobody asks"
    job = worlds.submit(3)
    worlds.goes_on(20)
    assert not worlds.pods, "it may begin by itself"
    worlds.goes_on(20)
    assert sorted(worlds.pods) == ["w-0", "w-1", "w-2"] == worlds.queue[job].on
    worlds.goes_on(3600)
    assert len(worlds.pods) == 3, "no more come for a job that runs"
    assert worlds.read().status.wanted == 3


def test_who_is_idle_for_long_goes_the_soonest_done_first_and_its_record_stays_asleep() -> None:
    worlds = ElasticWorlds(4, min=1)
    jobs = [worlds.submit() for _ in range(4)]
    worlds.goes_on()
    assert all(worlds.queue[one].on for one in jobs)
    for number in (2, 0, 1):
        worlds.is_done(jobs[number])
        worlds.goes_on(300, looks=1)
    for _ in range(3):
        worlds.goes_on(1)
    assert sorted(worlds.pods) == ["w-1", "w-3"], "w-1 was not idle for ten minutes yet"
    for _ in range(8):
        worlds.goes_on(300)
    assert sorted(worlds.pods) == ["w-3"], "it has a job, and is the one that there is always"
    assert done(worlds, Evict) == ["w-2", "w-0", "w-1"]
    assert {name: node.drained_by for name, node in worlds.slurm.items()} == {
        "w-0": "fleet", "w-1": "fleet", "w-2": "fleet", "w-3": ""
    }  # fmt: skip
    assert worlds.slurm["w-0"].reason == "minivm: fleet: surplus: idle for 600 s, w grows again when jobs ask"
    worlds.goes_on(7200)
    assert not done(worlds, Remove), "what may come back is what people see of it"


def test_who_is_asleep_wakes_under_its_old_name_and_takes_jobs() -> None:
    worlds = ElasticWorlds(3)
    for _ in range(4):
        worlds.goes_on(700)
    assert not worlds.pods and len(worlds.slurm) == 3
    job = worlds.submit(2)
    worlds.goes_on(40, looks=5)
    assert worlds.queue[job].on == ["w-0", "w-1"] and set(done(worlds, Undrain)) == {"w-0", "w-1"}
    assert worlds.slurm["w-2"].drained_by == "fleet"


def test_what_goes_takes_jobs_again_where_one_asks_before_it_is_gone() -> None:
    worlds = ElasticWorlds(2)
    worlds.now += 700
    worlds.look()
    assert {node.drained_by for node in worlds.slurm.values()} == {"fleet"}
    job = worlds.submit(2)
    worlds.goes_on(1)
    assert not done(worlds, Evict) and worlds.queue[job].on == ["w-0", "w-1"], "also one that has not waited yet"


REASONS = [
    ("Resources", True),
    ("Priority", True),
    ("ReqNodeNotAvail, May be reserved for other job", True),
    ("ReqNodeNotAvail,_UnavailableNodes:w-0", True),
    ("Nodes_required_for_job_are_DOWN,_DRAINED_or_reserved_for_jobs_in_higher_priority_partitions", True),
    ("PartitionConfig", True),
    ("PartitionNodeLimit", True),
    ("Dependency", False),
    ("DependencyNeverSatisfied", False),
    ("JobHeldUser", False),
    ("JobHeldAdmin", False),
    ("BeginTime", False),
    ("QOSMaxJobsPerUserLimit", False),
    ("AssocGrpCpuLimit", False),
    ("Licenses", False),
    ("PartitionDown", False),
    ("BadConstraints", False),
    ("None", False),
    ("", False),
]


@pytest.mark.parametrize(("reason", "comes"), REASONS)
def test_it_grows_for_what_more_nodes_cure_and_for_nothing_else(reason: str, comes: bool) -> None:
    worlds = ElasticWorlds()
    worlds.submit(reason=reason)
    worlds.goes_on(60, looks=1)
    assert bool(worlds.pods) is comes


def test_a_job_that_names_nodes_or_may_not_run_yet_asks_for_none() -> None:
    worlds = ElasticWorlds()
    worlds.submit(required_nodes="w-7")
    worlds.submit(eligible_time=0)
    worlds.submit(eligible_time=int(worlds.now) + 3600)
    worlds.goes_on(60)
    assert not worlds.pods


def test_no_more_are_on_their_way_than_step_and_min_comes_at_once() -> None:
    worlds = ElasticWorlds(max=40, min=6, step=3)
    worlds.look()
    assert len(worlds.pods) == 6
    worlds.kubelets()
    worlds.submit(20)
    worlds.now += 60
    worlds.look()
    worlds.look()
    assert len(worlds.pods) == 9, "three that are not ready yet"
    worlds.kubelets()
    worlds.look()
    assert len(worlds.pods) == 12


def test_a_template_that_never_gets_ready_costs_no_more_than_step() -> None:
    worlds = ElasticWorlds(max=40, step=3)
    worlds.broken = {worlds.read().hash}
    worlds.submit(20)
    for _ in range(5):
        worlds.goes_on(60)
    assert len(worlds.pods) == 3


def test_max_is_never_passed_and_told() -> None:
    worlds = ElasticWorlds(max=2)
    for _ in range(5):
        worlds.submit()
    worlds.goes_on()
    assert len(worlds.pods) == 2
    assert fits(worlds) == ("False", "AtMost", "5 pods would have work, but max is 2")


MISFITS: list[tuple[dict[str, Any], str]] = [
    ({"nodes": 5}, "5 nodes, but max is 4"),
    ({"features": "a100"}, "feature a100"),
    ({"features": "minivm&a100*2"}, "feature a100"),
    ({"minimum_cpus_per_node": 64, "cpus": 64}, "64 CPUs on a node, and one has 8"),
    ({"memory_per_node": 99000}, "99000 MB of memory on a node, and one has 1000"),
    ({"memory_per_cpu": 600, "minimum_cpus_per_node": 2}, "1200 MB of memory on a node, and one has 1000"),
    ({"tres_per_node": "gres/gpu:h100:9"}, "9 GPUs on a node, and one has 8"),
]


@pytest.mark.parametrize(("asks", "why"), MISFITS)
def test_a_job_that_can_never_fit_is_told_and_nothing_comes_for_it(asks: dict[str, Any], why: str) -> None:
    worlds = ElasticWorlds()
    conf = "Gres=gpu:h100:8 CPUs=8 RealMemory=1000"
    env = [{"name": "MINIVM_NODE_FEATURES", "value": "w"}, {"name": "MINIVM_NODE_CONF", "value": conf}]
    worlds.wants_of_it(template={"spec": {"containers": [{"name": "worker", "env": env}]}})
    job = worlds.submit(reason="PartitionConfig", **asks)
    worlds.goes_on(60)
    said = f"job {job} can never run here: it asks for {why}"
    assert not worlds.pods and fits(worlds) == ("False", "NeverFits", said)
    assert told(worlds)[("w", "fit")] == said
    worlds.is_done(job)
    worlds.goes_on(60)
    assert fits(worlds)[0] == "True" and ("w", "fit") not in told(worlds)


def test_what_a_pod_has_is_learned_from_the_first_one() -> None:
    worlds = ElasticWorlds()
    job = worlds.submit(minimum_cpus_per_node=64, cpus=64, stuck=True)
    worlds.goes_on(60)
    assert len(worlds.pods) == 1, "nobody knows yet how many it has"
    worlds.cpus = 8
    for _ in range(5):
        worlds.goes_on(700)
    assert not worlds.pods and f"job {job}" in told(worlds)[("w", "fit")], "and its record tells it"


def test_other_partitions_and_what_other_nodes_can_do_are_none_of_its_business() -> None:
    worlds = ElasticWorlds(partitions=["gpu"])
    worlds.submit(stuck=True)
    worlds.submit(20, partition="other,third")
    worlds.goes_on(60)
    assert not worlds.pods and fits(worlds)[0] == "True"
    job = worlds.submit(partition="main,gpu")
    worlds.goes_on(60)
    assert worlds.queue[job].on == sorted(worlds.pods) == ["w-0"]


def test_small_jobs_share_a_node_where_it_is_known_how_big_it_is() -> None:
    worlds = ElasticWorlds(1, max=20)
    worlds.cpus, worlds.megabytes = 8, 8000
    worlds.person_drains("w-0")
    for _ in range(10):
        worlds.submit(cpus=2, memory_per_cpu=500)
    worlds.now += 60
    worlds.look()
    assert len(worlds.pods) == 1 + 3, "ten of a quarter"
    worlds.submit(cpus=2, shared=["none"])
    worlds.now += 60
    worlds.look()
    assert len(worlds.pods) == 1 + 4, "and one that shares with nobody"


def test_an_array_asks_for_as_many_as_may_run_at_once() -> None:
    assert [tasks(said, most) for said, most in (("", 0), ("1-3", 0), ("1-9:2,20", 0), ("1-100%5", 5))] == [1, 3, 6, 5]
    assert tasks("1-3,...", 0) == 3 and tasks("0-999999999", 0) == 1 << 20
    worlds = ElasticWorlds()
    worlds.submit(array_task_string="1-3")
    worlds.goes_on(60, looks=1)
    assert len(worlds.pods) == 3


def test_a_job_that_does_not_begin_on_idle_nodes_keeps_none_and_has_no_more_made() -> None:
    worlds = ElasticWorlds()
    job = worlds.submit(2, stuck=True)
    most = 0
    for _ in range(40):
        worlds.goes_on(60)
        most = max(most, len(worlds.pods))
    assert most == 2 and not worlds.pods
    assert "has not started although" in told(worlds)[("w", "fit")]
    made = len(done(worlds, CreatePod))
    for _ in range(20):
        worlds.goes_on(60)
    assert len(done(worlds, CreatePod)) == made, "once was enough"
    other = worlds.submit()
    worlds.goes_on(60)
    assert worlds.queue[other].on, "others are served"
    worlds.is_done(job)
    worlds.goes_on(60)
    assert ("w", "fit") not in told(worlds)


def test_a_job_that_idle_nodes_were_kept_from_for_another_gets_its_own_once_it_is_the_first() -> None:
    worlds = ElasticWorlds(1, idleSeconds=7200)
    worlds.queue[5] = behind = Job(worlds.now, reason="Priority", stuck=True)
    for _ in range(8):
        worlds.goes_on(60)
    assert ("w", "fit") not in told(worlds) and sorted(worlds.pods) == ["w-0"]
    worlds.starts("w-0")  # the job for which these nodes were kept
    behind.reason, behind.stuck = "Resources", False
    worlds.goes_on(60)
    assert behind.on == ["w-1"]


def test_of_two_pools_that_serve_a_job_the_first_by_name_grows_in_whatever_order_they_are_read() -> None:
    worlds = ElasticWorlds()
    worlds.submit(2)
    worlds.now += 60
    worlds.more["v"] = replace(worlds.read(), name="v", uid="pool-v", label="v")
    world = worlds.world()
    assert isinstance(world.kubernetes, KubernetesView) and world.kubernetes.pools is not None
    pools = [*world.kubernetes.pools.items()]
    either = [replace(world, kubernetes=replace(world.kubernetes, pools=dict(one))) for one in (pools, pools[::-1])]
    changes = [worlds.decide(one).changes for one in either]
    assert changes[0] == changes[1]
    assert [one.name for one in changes[0] if isinstance(one, CreatePod)] == ["v-0", "v-1"]


def test_one_that_ends_whenever_it_comes_is_made_anew_ever_more_seldom() -> None:
    worlds = ElasticWorlds(max=1)
    worlds.submit(stuck=True)
    begun = worlds.now
    while worlds.now - begun < 3600:
        if "w-0" in worlds.pods and "w-0" not in worlds.over:
            worlds.ends("w-0")
        worlds.look()
        worlds.asked = not worlds.asked  # on every other pass the queue is unknown and no pod is due
        worlds.now += 5
    pauses = [after - before for (_, before), (_, after) in pairwise(worlds.made_anew)]
    assert 5 <= len(pauses) <= 7, pauses
    assert all(after > 1.5 * before for before, after in pairwise(pauses)), "twice as long each time"
    (noted,) = worlds.read().status.ended
    assert noted.times > len(pauses)
    worlds.queue.clear()
    worlds.asked = True
    worlds.now += 7200
    worlds.turns()
    worlds.now += 7200
    worlds.turns()
    assert not worlds.pods and not worlds.read().status.ended, "and a name that nobody wants is forgotten"


def test_those_that_are_taken_over_count_before_they_are() -> None:
    worlds = ElasticWorlds(4, min=4, max=8)
    worlds.owner = dict.fromkeys(worlds.owner, "")
    worlds.templates = dict.fromkeys(worlds.templates, "")
    for name in worlds.pods:
        worlds.starts(name)
    worlds.goes_on()
    assert len(done(worlds, Adopt)) == 4 and not done(worlds, CreatePod)


def test_by_a_clock_that_is_not_believed_nothing_comes_goes_or_is_called_back() -> None:
    worlds = ElasticWorlds(2, max=8)
    worlds.now += 3600
    worlds.submit(3)
    wrong = "slurmctld's clock is ahead"
    worlds.look(world=replace(worlds.world(), clocks=wrong))
    assert not done(worlds, CreatePod, Drain)
    worlds.queue.clear()
    worlds.look(world=replace(worlds.world(), clocks=wrong))
    assert not done(worlds, Drain), "a hundred years idle, it says"
    worlds.look()
    assert len(done(worlds, Drain)) == 2
    worlds.submit(3)
    worlds.look(world=replace(worlds.world(), clocks=wrong))
    assert not done(worlds, Undrain, CreatePod)
    for _ in range(3):
        worlds.goes_on()
    assert len(worlds.pods) == 3, "once it is right it goes on"


KEEPS: dict[str, Any] = {
    "a job": lambda w: w.starts("w-0"),
    "a suspended job": lambda w: (w.starts("w-0"), w.slurm["w-0"].suspended.add(7)),
    "a reservation": lambda w: w.reserved.add("w-0"),
    "a job that names it": lambda w: w.pending.add("w-0"),
    "a person": lambda w: w.person_drains("w-0"),
    "a verdict": lambda w: w.verdict("w-0"),
}


@pytest.mark.parametrize("by", KEEPS)
def test_what_somebody_needs_stays_whatever_was_last_done_on_it(by: str) -> None:
    worlds = ElasticWorlds(2)
    KEEPS[by](worlds)
    for _ in range(6):
        worlds.goes_on(3600)
    assert sorted(worlds.pods) == ["w-0"] and "w-0" not in done(worlds, Drain)


def test_a_node_that_is_reserved_serves_no_job_that_waits() -> None:
    worlds = ElasticWorlds(1)
    worlds.reserved.add("w-0")
    worlds.submit(stuck=True)
    worlds.goes_on(60, looks=1)
    assert sorted(worlds.pods) == ["w-0", "w-1"]


@pytest.mark.parametrize("what", ["asked", "claims"])
def test_of_what_was_not_asked_nothing_is_concluded(what: str) -> None:
    worlds = ElasticWorlds(2, max=8)
    setattr(worlds, what, False)
    worlds.submit(3) if what == "asked" else None
    for _ in range(3):
        worlds.goes_on(3600)
    assert len(worlds.pods) == 2 and not done(worlds, Drain, CreatePod, Evict)
    setattr(worlds, what, True)
    worlds.queue.clear()
    worlds.look()
    held = {name for name, node in worlds.slurm.items() if node.drained_by}
    assert held == {"w-0", "w-1"}
    setattr(worlds, what, False)
    worlds.look()
    assert not done(worlds, Undrain), "and what has begun to go is not called back by it"


@pytest.mark.parametrize(("unread", "comes"), [("w-1", False), ("w-big-0", True), ("w-01", True), ("login-0", True)])
def test_a_pod_that_cannot_be_read_keeps_its_own_pool_alone_from_its_size(unread: str, comes: bool) -> None:
    worlds = ElasticWorlds(2, max=8)
    worlds.submit(5)
    worlds.now += 3600
    world = worlds.world()
    assert isinstance(world.kubernetes, KubernetesView)
    here = replace(world.kubernetes, unread={f"Pod/{unread}": "x"})
    worlds.look(world=replace(world, kubernetes=here))
    assert bool(done(worlds, CreatePod)) == comes


@pytest.mark.parametrize("blind", ["pools", "slurm", "kubernetes"])
def test_of_what_is_not_known_nothing_is_concluded(blind: str) -> None:
    worlds = ElasticWorlds(2, max=8)
    worlds.submit(5)
    worlds.now += 3600
    for _ in range(3):
        worlds.look(blind=blind)
    assert not done(worlds, CreatePod, Drain, Evict, Undrain)


def test_many_that_sleep_are_no_mass_event_and_no_loss() -> None:
    worlds = ElasticWorlds(20, Policy(), max=20, min=0)
    for _ in range(6):
        worlds.goes_on(700)
    assert not worlds.pods and len(worlds.slurm) == 20
    before = len(worlds.done)
    for name in worlds.slurm:
        worlds.slurmd_goes(name)
    for _ in range(3):
        worlds.goes_on(3600)
    assert worlds.done[before:] == [] and ("fleet", "pause") not in told(worlds)


def test_records_beyond_max_go_once_they_are_down() -> None:
    worlds = ElasticWorlds(4)
    for _ in range(5):
        worlds.goes_on(700)
    for node in worlds.slurm.values():
        node.responds, node.down = False, True
    worlds.elastic_is(max=2)
    worlds.goes_on(60)
    assert sorted(worlds.slurm) == ["w-0", "w-1"]


def test_a_busy_one_beyond_max_goes_when_it_is_done() -> None:
    worlds = ElasticWorlds(4)
    worlds.submit(4)
    worlds.goes_on()
    worlds.elastic_is(max=2)
    worlds.goes_on(7200)
    assert len(worlds.pods) == 4
    worlds.is_done(next(iter(worlds.queue)))
    for _ in range(5):
        worlds.goes_on(700)
    assert not worlds.pods


def test_maxunavailable_0_takes_nothing_away() -> None:
    worlds = ElasticWorlds(2)
    worlds.roll("1", maxUnavailable=0)
    for _ in range(3):
        worlds.goes_on(3600)
    assert len(worlds.pods) == 2 and not done(worlds, Drain)


def test_a_name_that_a_person_holds_is_the_last_that_comes() -> None:
    worlds = ElasticWorlds(2)
    for _ in range(3):
        worlds.goes_on(700)
    worlds.person_drains("w-0")
    worlds.submit()
    worlds.goes_on(60)
    assert sorted(worlds.pods) == ["w-1"]


def test_a_new_template_reaches_it_and_a_job_is_left_alone() -> None:
    worlds = ElasticWorlds(3, min=2)
    job = worlds.submit()
    worlds.goes_on()
    (name,) = worlds.queue[job].on
    worlds.roll("2")
    for _ in range(12):
        worlds.goes_on(60)
    assert worlds.queue[job].on == [name] and worlds.updated() == set(worlds.pods) - {name}
    assert len(worlds.pods) >= 2


def test_a_fleet_that_begins_anew_concludes_the_same() -> None:
    worlds = ElasticWorlds(3)
    for _ in range(6):
        worlds.memory = FleetMemory()
        worlds.goes_on(700, looks=1)
    assert not worlds.pods
    job = worlds.submit(2)
    for _ in range(6):
        worlds.memory = FleetMemory()
        worlds.goes_on(20, looks=1)
    assert worlds.queue[job].on


# Jobs as Slurm reports them


def test_a_job_as_slurmrestd_tells_of_it() -> None:
    """Pending jobs parse alike for Slurm 24.11 (v0.0.42) and 26.05 (v0.0.44), which report the same fields."""

    def number(said: int, *, on: bool = True) -> dict[str, object]:
        return {"set": on, "infinite": False, "number": said}

    said = {
        "job_id": 16, "job_state": ["PENDING"], "state_reason": "PartitionConfig", "node_count": number(6),
        "cpus": number(12), "features": "gpu", "partition": "main", "required_nodes": "", "array_task_string": "",
        "array_max_tasks": number(0), "eligible_time": number(1795386381), "memory_per_node": number(0, on=False),
        "memory_per_cpu": number(100), "minimum_cpus_per_node": number(1), "tres_per_node": "gres/gpu:1",
        "tres_per_job": "", "shared": ["oversubscribe"],
    }  # fmt: skip
    found = PendingJob(
        "16", "PartitionConfig", 1795386381.0, 1, 6, ("main",), "gpu", 1, 100, 1, all_cpus=12, all_memory=1200
    )
    assert parse_pending_jobs([said, {**said, "job_state": ["RUNNING"]}, {**said, "required_nodes": "w-1"}]) == (found,)
    unread = parse_slurm([], [said, {**said, "node_count": "many"}])
    assert unread.pending is None, "then what is asked for is not known"
    assert [*unread.doubts] == ["job 16"] and "job.node_count" in unread.doubts["job 16"]


def test_what_a_job_takes() -> None:
    has = Offer(features=frozenset({"a", "b"}), cpus=8, memory=1000, gpus=4)
    assert nodes_needed(has, PendingJob("1", "", 1, nodes=2, all_cpus=2)) == 2
    assert nodes_needed(has, PendingJob("1", "", 1, all_cpus=17)) == 3, "Slurm counts nodes by what it knows of"
    assert nodes_needed(has, PendingJob("1", "", 1, all_gpus=6)) == 2
    assert nodes_needed(has, PendingJob("1", "", 1, all_cpus=2, all_memory=500)) == 0.5
    assert nodes_needed(has, PendingJob("1", "", 1, all_cpus=2, alone=True)) == 1
    assert nodes_needed(Offer(), PendingJob("1", "", 1, all_cpus=2)) == 1
    for features, why in (("a&b", ""), ("a|c", ""), ("[a*2&c*2]", ""), ("c|d", "feature c"), ("a,c", "feature c")):
        assert mismatch(has, PendingJob("1", "", 1, features=features)) == why
    for said, many in (("gres/gpu:2", 2), ("gres/gpu:h100=8,gres/shard:9", 8), ("gpu:h100:8(S:0-1)", 8), ("", 0)):
        assert gpus(said) == many


# The pool as Kubernetes stores it

SPEC: dict[str, Any] = {"mode": "elastic", "elastic": {"min": 0, "max": 4}, "template": template("1")}


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"min": 0},
        {"max": 4},
        {"min": -1, "max": 4},
        {"min": 5, "max": 4},
        {"min": 0, "max": 0},
        {"min": 0, "max": 70000},
        {"min": 0, "max": 4, "step": 0},
        {"min": 0, "max": 4, "idleSeconds": "soon"},
        {"min": 0, "max": 4, "partitions": [1]},
    ],
)
def test_an_elastic_that_is_none_is_a_sentence(wrong: dict[str, Any]) -> None:
    with pytest.raises(FleetError, match=r"spec\.elastic"):
        parse_pool({"metadata": {"name": "w", "uid": "u"}, "spec": {**SPEC, "elastic": wrong}})


@pytest.mark.parametrize("env", ["x", ["x"], [1]])
def test_an_environment_that_is_none_is_a_sentence_and_stops_nobody(env: object) -> None:
    spec = {**SPEC, "template": {"spec": {"containers": [{"name": "x", "env": env}]}}}
    with pytest.raises(FleetError, match="env"):
        parse_pool({"metadata": {"name": "w", "uid": "u"}, "spec": spec})


def test_which_names_are_its() -> None:
    pool = parse_pool({"metadata": {"name": "w", "uid": "u"}, "spec": SPEC})
    names = ("w-0", "w-3", "w-4", "w-03", "w-", "w", "x-1", "w-a")
    assert [pool.number_of(name) for name in names] == [0, 3, 4, -1, -1, -1, -1, -1]
    assert [name for name in names if pool.may_create(name)] == ["w-0", "w-3"]


def test_of_two_pools_that_may_have_one_name_the_older_has_its_pods() -> None:
    def read(name: str, **spec: object) -> WorkerPool:
        own = {"metadata": {"labels": {"minivm.io/pool": name}}, **template("1")}
        return parse_pool({"metadata": {"name": name, "uid": name}, "spec": {**SPEC, **spec, "template": own}})

    pools = {one.name: one for one in (read("w-b"), read("w", mode="perNode", nodeSelector={"a": "b"}))}
    for first, name, refused in (("w", "w-b-0", "w-b"), ("w-b", "w-b-0", "w"), ("w", "w-b-9", "")):
        aged = {one.name: replace(one, created=float(one.name != first)) for one in pools.values()}
        found = find_refusals(KubernetesView(pools=aged, desired_pods={"w": {name: "n"}, "w-b": {}}))
        assert "".join(found) == refused
