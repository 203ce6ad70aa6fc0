"""Display during an outage of slurmctld: never the state from before the outage as if it were current."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fleet import FleetError
from fleet.cli import explain
from fleet.policy import Policy
from fleet.report.status import detail, lines, picture, report
from fleet.world.kubernetes import KubeCondition, KubePod, KubernetesView, StatefulSet, Taint
from fleet.world.slurm import SlurmView
from fleet.world.snapshot import FleetSnapshot
from tests.fleet_pools_world import PoolWorlds
from tests.fleet_world import Worlds, stamp


def settled(policy: Policy | None = None) -> Worlds:
    worlds = Worlds(3, policy)
    worlds.machines = {}
    worlds.settle_in()
    return worlds


def outage(worlds: Worlds, seconds: float) -> float:
    """Make slurmctld stop answering for some seconds, and return when that began."""
    assert not worlds.look_without("slurm")
    began = worlds.now
    worlds.now += seconds
    assert not worlds.look_without("slurm")
    return began


def test_after_a_minute_every_object_shows_the_outage_and_the_last_state() -> None:
    worlds = settled()
    worlds.slurm["w1"].drained_by, worlds.slurm["w1"].reason = "person", "fan 3"
    worlds.settle_in()
    began = outage(worlds, 61)
    since = f"slurmctld has not answered since {stamp(began)}"
    pods = {name: pod.condition for name, pod in worlds.pods.items()}
    assert pods["w0"] == ("Unknown", "SlurmUnknown", f"{since}; last known: TakesJobs")
    assert pods["w1"] == ("Unknown", "SlurmUnknown", f"{since}; last known: Drained fan 3")
    node = worlds.nodes["n0"].condition
    assert node is not None
    assert node[:2] == ("Unknown", "SlurmUnknown")
    assert node[2].startswith("lab.slurm: slurmctld has not answered since ")
    assert {worlds.status(name).state for name in worlds.nodes} == {"SlurmUnknown"}
    assert worlds.status("n0").why == f"{since}; last known: TakesJobs"


def test_a_pool_has_no_ready_worker_then_and_says_why_in_the_printed_column() -> None:
    worlds = PoolWorlds(3)
    worlds.settle_in()
    assert worlds.read().status.ready == 3
    outage(worlds, 61)
    status = worlds.read().status
    assert status.ready == 0
    ready, updated = status.conditions[:2]
    assert (ready.status, ready.reason) == ("False", "SlurmUnknown")
    assert ready.message.endswith("last known: 3 of 3 ready")
    assert updated.message.startswith("paused: slurmctld has not answered since ")
    worlds.settle_in()
    assert worlds.read().status.ready == 3
    assert {stand.status for stand in worlds.read().status.conditions} == {"True"}


def test_a_short_silence_rewrites_nothing() -> None:
    worlds = settled()
    before = {name: pod.condition for name, pod in worlds.pods.items()}
    outage(worlds, 59)
    assert {name: pod.condition for name, pod in worlds.pods.items()} == before


def test_a_restarted_operator_does_not_move_the_time_of_the_outage() -> None:
    worlds = settled()
    outage(worlds, 61)
    shown, kept = worlds.pods["w0"].condition, worlds.status("n0")
    worlds.memory = type(worlds.memory)()
    outage(worlds, 600)
    assert (worlds.pods["w0"].condition, worlds.status("n0")) == (shown, kept)


def test_everything_is_as_before_once_slurmctld_answers() -> None:
    worlds = settled()
    before = {name: pod.condition for name, pod in worlds.pods.items()}, {n: worlds.status(n) for n in worlds.nodes}
    outage(worlds, 61)
    worlds.settle_in()
    after = {name: pod.condition for name, pod in worlds.pods.items()}, {n: worlds.status(n) for n in worlds.nodes}
    assert after == before


def away(worlds: Worlds, *, remembered: bool) -> FleetSnapshot:
    """Return the snapshot without slurmctld, as the running operator sees it or as the command line does."""
    slurm = worlds.world().slurm
    assert isinstance(slurm, SlurmView)
    gone = worlds.world(blind="slurm")
    return replace(gone, last=slurm, last_at=1_790_000_000.0) if remembered else gone


@pytest.mark.parametrize("remembered", [True, False])
def test_status_and_page_list_every_worker_with_its_last_state(remembered: bool) -> None:
    worlds = settled()
    worlds.slurm["w1"].drained_by, worlds.slurm["w1"].reason = "person", "fan 3"
    worlds.settle_in()
    world = away(worlds, remembered=remembered)
    decision = worlds.decide(world)
    text = list(lines(report(world, decision, worlds.policy, worlds.now)))
    assert "Slurm does not answer: no answer" in text
    assert [line.split()[0] for line in text if line.startswith("w")] == ["w0", "w1", "w2"]
    (drained,) = [line for line in text if line.startswith("w1 ")]
    assert drained.endswith("pod ready; last known: Drained fan 3")
    assert "pool p: 3 workers: 1 Drained, 2 TakesJobs; 0 of 1 away" in text
    page = picture(world, decision, worlds.policy, worlds.now)
    assert [cell["state"] for cell in page["cells"]] == ["TakesJobs", "Drained", "TakesJobs"]
    assert page["slurmAt"] == (1_790_000_000 if remembered else None)
    one = detail("w1", world, decision, None)
    assert one is not None
    assert (one["state"], one["reason"]) == ("Drained", "fan 3")


def test_what_a_pod_shows_of_the_outage_is_not_said_twice() -> None:
    worlds = settled()
    began = outage(worlds, 61)
    world = away(worlds, remembered=False)
    text = list(lines(report(world, worlds.decide(world), worlds.policy, worlds.now)))
    (first,) = [line for line in text if line.startswith("w0 ")]
    assert first.endswith(f"pod ready; slurmctld has not answered since {stamp(began)}; last known: TakesJobs")


def explained(worlds: Worlds, name: str, *, blind: str = "") -> str:
    world = worlds.world(blind=blind)
    return "\n".join(explain(name, world, worlds.decide(world)))


def test_every_name_that_kubectl_prints_is_explained() -> None:
    worlds = settled()
    world = worlds.world()
    assert isinstance(world.kubernetes, KubernetesView)
    here = world.kubernetes
    names = [*here.nodes, *here.pods, *here.others, *(here.machines or {})]
    unexplained = [
        (name, blind) for blind in ("", "slurm") for name in names if name not in explained(worlds, name, blind=blind)
    ]
    assert unexplained == []
    explained(worlds, "fleet")


@pytest.mark.parametrize("blind", ["", "slurm"])
def test_the_name_of_a_pool_and_of_its_pods_is_explained(blind: str) -> None:
    worlds = PoolWorlds(3)
    worlds.settle_in()
    pool = worlds.read().name
    assert f"{pool}: Ready True" in explained(worlds, pool, blind=blind)
    assert [name for name in worlds.pods if name not in explained(worlds, name, blind=blind)] == []


def test_the_finished_pod_of_a_job_has_completed() -> None:
    worlds = settled()
    world = worlds.world()
    assert isinstance(world.kubernetes, KubernetesView)
    kinds = ("Ready", "ContainersReady", "PodReadyToStartContainers")
    conditions = {kind: KubeCondition(kind, "False", "PodCompleted") for kind in kinds}
    pod = KubePod("slurm-keys-x", "u", node="n0", component="keys", conditions=conditions)
    world = replace(world, kubernetes=replace(world.kubernetes, others={pod.name: pod}))
    decision = worlds.decide(worlds.world())
    assert list(explain(pod.name, world, decision)) == ["slurm-keys-x on n0: has completed"]


def test_a_node_without_a_worker_is_explained() -> None:
    worlds = settled()
    del worlds.pods["w2"]
    assert explained(worlds, "n2").startswith("Node n2: Ready")


def test_a_pool_that_is_a_statefulset_is_explained_and_a_taint_with_two_effects_is_named_once() -> None:
    worlds = settled()
    world = worlds.world()
    assert isinstance(world.kubernetes, KubernetesView)
    taints = tuple(Taint("node.kubernetes.io/unreachable", "", effect) for effect in ("NoSchedule", "NoExecute"))
    node = replace(world.kubernetes.nodes["n0"], taints=taints)
    here = replace(world.kubernetes, sets={"w": StatefulSet(4)}, nodes={**world.kubernetes.nodes, "n0": node})
    pods = {name.replace("w", "w-"): replace(pod, name=name.replace("w", "w-")) for name, pod in here.pods.items()}
    world = replace(world, kubernetes=replace(here, pods=pods))
    decision = worlds.decide(worlds.world())
    assert list(explain("w", world, decision)) == ["w: a StatefulSet, 3 of 4 pods ready"]
    assert next(iter(explain("n0", world, decision))) == "Node n0: Ready, tainted node.kubernetes.io/unreachable"


def test_a_name_that_is_nowhere_is_refused_with_the_nearest() -> None:
    worlds = settled()
    with pytest.raises(FleetError, match=r"no pod, Node, machine or pool 'n33'"):
        explained(worlds, "n33")


def test_an_object_that_cannot_be_read_is_explained_by_its_mistake() -> None:
    why = "cannot read spec.update.deadlineSeconds: it is missing"
    worlds = settled()
    world = worlds.world()
    assert isinstance(world.kubernetes, KubernetesView)
    world = replace(world, kubernetes=replace(world.kubernetes, unread={"WorkerPool/gpu": why}))
    text = "\n".join(explain("gpu", world, worlds.decide(world)))
    assert f"WorkerPool/gpu {why}: the fleet changes nothing of it until you correct it" in text


def test_a_machine_that_was_given_up_says_so_until_it_is_back() -> None:
    worlds = Worlds(4, Policy(fencing="act", dead_s=30))
    worlds.machines = {}
    worlds.settle_in()
    machine = next(name for name in worlds.machines if worlds.machine(name).status.node == "n0")
    worlds.dies("n0")
    worlds.now += 60
    worlds.settle_in()
    text = explained(worlds, "n0")
    assert "Node n0: not Ready since" in text
    assert "given up by the fleet" in text
    assert "n0: given up: the machine does not answer" in text
    assert "delete the Node if the machine does not come back" in text
    assert "given up" in explained(worlds, machine)
    del worlds.pods["w0"]  # the pod's successor starts on another Node
    worlds.settle_in()
    assert worlds.status("n0").state == "GivenUp"
    world = worlds.world()
    assert any("given up" in line for line in lines(report(world, worlds.decide(world), worlds.policy, worlds.now)))


def test_a_proposed_taint_names_its_way_back() -> None:
    worlds = Worlds(4, Policy(fencing="propose", dead_s=30))
    worlds.settle_in()
    worlds.dies("n0")
    worlds.now += 60
    text = explained(worlds, "n0")
    assert "kubectl taint nodes n0 node.kubernetes.io/out-of-service=nodeshutdown:NoExecute" in text
    assert "before Kubernetes 1.26 also: kubectl delete pod --force --grace-period=0 w0" in text
    back = "When the machine is back: kubectl taint nodes n0 node.kubernetes.io/out-of-service-"
    assert back in text
    world = worlds.world()
    page = picture(world, worlds.decide(world), worlds.policy, worlds.now)
    assert [one["about"] for one in page["proposals"] if back in one["text"]] == ["n0"]


def test_a_taint_that_a_person_forgot_on_a_ready_node_is_named() -> None:
    worlds = settled()
    worlds.nodes["n1"].taints["node.kubernetes.io/out-of-service"] = "nodeshutdown"
    assert "the fleet did not set it; remove it: kubectl taint nodes n1" in explained(worlds, "n1")
