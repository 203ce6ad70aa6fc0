"""Which Events are written: of what they are about, and no more than a few at a time."""

from __future__ import annotations

from dataclasses import replace

from fleet.act.events import event, events
from fleet.act.words import in_words
from fleet.decide.actions import Cordon, CreatePod, Evict, Free, Remove, ShowOnNode, ShowOnPod, Tell
from fleet.topology.place import Place
from fleet.world.kubernetes import Condition, Kubernetes, Node, Pod
from fleet.world.pool import WorkerPool
from fleet.world.slurm import Seen

WORLD = Kubernetes({"n0": Node("n0", "uid-n0")}, {"w0": Pod("w0", "uid-w0")})


def test_an_event_is_of_the_pod_or_of_the_node() -> None:
    of_pod = event(Tell("w0", "held", "drained by others"), WORLD, "slurm")
    assert of_pod is not None
    assert of_pod["involvedObject"] == {
        "apiVersion": "v1", "kind": "Pod", "name": "w0", "uid": "uid-w0", "namespace": "slurm",
    }  # fmt: skip
    assert (of_pod["type"], of_pod["reason"], of_pod["message"]) == ("Warning", "Held", "w0: drained by others")
    of_node = event(Cordon("n0", "uid-n0", "1", "fan 3"), WORLD, "slurm")
    assert of_node is not None
    assert of_node["metadata"]["namespace"] == "default"
    assert (of_node["type"], of_node["reason"], of_node["message"]) == ("Normal", "Cordoned", "cordon n0: fan 3")


def test_what_is_told_of_the_whole_stands_with_a_pod_of_the_fleet() -> None:
    others = {
        name: Pod(name, f"uid-{name}", component=of) for name, of in (("login", "login"), ("slurm-fleet-x", "fleet"))
    }
    said = event(Tell("fleet", "clock", "slurmctld's clock is behind ours"), replace(WORLD, others=others), "slurm")
    assert said is not None
    assert (said["involvedObject"]["name"], said["involvedObject"]["uid"]) == ("slurm-fleet-x", "uid-slurm-fleet-x")
    assert (said["type"], said["reason"]) == ("Warning", "Clock")


def test_what_is_about_nothing_that_is_there_or_shown_anyway_is_no_event() -> None:
    assert event(Tell("fleet", "pause", "x"), WORLD, "slurm") is None
    assert event(ShowOnPod("w0", "uid-w0", Condition("t", "True")), WORLD, "slurm") is None
    assert event(ShowOnNode("n0", "uid-n0", Condition("t", "True")), WORLD, "slurm") is None
    assert event(Free("w0", "uid-w0", "1", Seen(True, False, "", "")), WORLD, "slurm") is None


def test_a_line_of_the_log_is_one_line_whatever_it_quotes() -> None:
    said = in_words(Evict("w0", "u", "1", "new\nundrain w1 in Slurm\x1b[2J", Seen(True, False, "", "")))
    assert said == "evict w0: new undrain w1 in Slurm [2J"


def test_a_thousand_things_to_tell_are_not_a_thousand_events() -> None:
    tells = [Tell("w0", f"kind{number}", "y" * 5000) for number in range(1000)]
    found = events(tells, WORLD, "slurm", 30)
    assert len(found) == 30
    assert max(len(one["message"]) for one in found) == 1024


def test_what_is_of_a_pool_is_told_with_the_pool() -> None:
    pools = {name: WorkerPool(name, f"uid-{name}", "1", 1, {}, "h", name) for name in ("gpu", "gpu-big")}
    world = replace(WORLD, pools=pools)
    made = event(CreatePod("gpu-big-3", "n0", pools["gpu-big"]), world, "slurm")
    gone = event(Remove("gpu-big-4", Seen(True, True, "", "")), world, "slurm")
    assert made is not None and gone is not None
    for said, reason in ((made, "Created"), (gone, "RecordRemoved")):
        assert (said["involvedObject"]["kind"], said["involvedObject"]["name"]) == ("WorkerPool", "gpu-big")
        assert (said["reason"], said["type"]) == (reason, "Normal")
    placed = event(Place("w0", "tree:rack-3", ""), world, "slurm")
    assert placed is not None
    assert (placed["involvedObject"]["name"], placed["reason"]) == ("w0", "Placed")
    others = {"slurm-fleet-x": Pod("slurm-fleet-x", "uid-f", component="fleet")}
    of_a_set = event(Remove("w-7", Seen(True, True, "", "")), replace(WORLD, others=others), "slurm")
    assert of_a_set is not None and of_a_set["involvedObject"]["name"] == "slurm-fleet-x", "no pool has made it"
