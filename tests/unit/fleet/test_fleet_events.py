"""Kubernetes Events of the fleet: their objects and reasons, and their rate limit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from fleet.decide.actions import (
    Change,
    Cordon,
    CreatePod,
    Evict,
    Free,
    NotePool,
    Notice,
    Place,
    Record,
    Remove,
    ShowOnNode,
    ShowOnPod,
)
from fleet.report.events import REASONS, EventRateLimit, describe_action, event, events
from fleet.world.kubernetes import KubeCondition, KubeNode, KubePod, KubernetesView
from fleet.world.machine import HistoryEntry, MachineObject, MachineStatus
from fleet.world.slurm import Precondition
from fleet.world.worker_pool import PoolCondition, PoolStatus, WorkerPool

WORLD = KubernetesView({"n0": KubeNode("n0", "uid-n0")}, {"w0": KubePod("w0", "uid-w0")})


def test_an_event_is_of_the_pod_or_of_the_node() -> None:
    of_pod = event(Notice("w0", "held", "drained by another actor"), WORLD, "slurm")
    assert of_pod is not None
    assert of_pod["involvedObject"] == {
        "apiVersion": "v1", "kind": "Pod", "name": "w0", "uid": "uid-w0", "namespace": "slurm",
    }  # fmt: skip
    assert (of_pod["type"], of_pod["reason"], of_pod["message"]) == ("Warning", "Held", "w0: drained by another actor")
    of_node = event(Cordon("n0", "uid-n0", "1", "fan 3"), WORLD, "slurm")
    assert of_node is not None
    assert of_node["metadata"]["namespace"] == "default"
    assert (of_node["type"], of_node["reason"], of_node["message"]) == ("Normal", "Cordoned", "cordon n0: fan 3")


def test_what_is_told_of_the_whole_stands_with_a_pod_of_the_fleet() -> None:
    others = {
        name: KubePod(name, f"uid-{name}", component=of)
        for name, of in (("login", "login"), ("slurm-fleet-x", "fleet"))
    }
    said = event(
        Notice("fleet", "clock", "slurmctld's clock is behind the fleet's"), replace(WORLD, others=others), "slurm"
    )
    assert said is not None
    assert (said["involvedObject"]["name"], said["involvedObject"]["uid"]) == ("slurm-fleet-x", "uid-slurm-fleet-x")
    assert (said["type"], said["reason"]) == ("Warning", "Clock")


def test_what_is_about_nothing_that_is_there_or_shown_anyway_is_no_event() -> None:
    assert event(Notice("fleet", "pause", "x"), WORLD, "slurm") is None
    assert event(ShowOnPod("w0", "uid-w0", KubeCondition("t", "True")), WORLD, "slurm") is None
    assert event(ShowOnNode("n0", "uid-n0", KubeCondition("t", "True")), WORLD, "slurm") is None
    assert event(Free("w0", "uid-w0", "1", Precondition(True, False, "", "")), WORLD, "slurm") is None


def test_a_line_of_the_log_is_one_line_whatever_it_quotes() -> None:
    said = describe_action(Evict("w0", "u", "1", "new\nundrain w1 in Slurm\x1b[2J", Precondition(True, False, "", "")))
    assert said == "evict w0: new undrain w1 in Slurm [2J"


def test_a_thousand_things_to_tell_are_not_a_thousand_events() -> None:
    tells = [Notice("w0", f"kind{number}", "y" * 5000) for number in range(1000)]
    found = events(tells, WORLD, "slurm", 30, EventRateLimit(), 0.0)
    assert len(found) == 30
    assert max(len(one["message"]) for one in found) == 1024


def test_what_is_of_a_pool_is_told_with_the_pool() -> None:
    pools = {name: WorkerPool(name, f"uid-{name}", "1", 1, {}, "h", name) for name in ("gpu", "gpu-big")}
    world = replace(WORLD, pools=pools)
    made = event(CreatePod("gpu-big-3", "n0", pools["gpu-big"]), world, "slurm")
    gone = event(Remove("gpu-big-4", Precondition(True, True, "", "")), world, "slurm")
    assert made is not None and gone is not None
    for said, reason in ((made, "Created"), (gone, "RecordRemoved")):
        assert (said["involvedObject"]["kind"], said["involvedObject"]["name"]) == ("WorkerPool", "gpu-big")
        assert (said["reason"], said["type"]) == (reason, "Normal")
    placed = event(Place("w0", "tree:rack-3", ""), world, "slurm")
    assert placed is not None
    assert (placed["involvedObject"]["name"], placed["reason"]) == ("w0", "Placed")
    others = {"slurm-fleet-x": KubePod("slurm-fleet-x", "uid-f", component="fleet")}
    of_a_set = event(Remove("w-7", Precondition(True, True, "", "")), replace(WORLD, others=others), "slurm")
    assert of_a_set is not None and of_a_set["involvedObject"]["name"] == "slurm-fleet-x", "no pool has made it"


NODE, ILL = HistoryEntry(1, "node", "n0"), HistoryEntry(2, "verdict", "ecc[rma]@1 x")


def of_machine(
    before: tuple[HistoryEntry, ...], after: tuple[HistoryEntry, ...], name: str = "m0"
) -> tuple[Record, KubernetesView]:
    machine = MachineObject(name, f"uid-{name}", "7", status=MachineStatus(history=before))
    return Record(name, "7", MachineStatus(state="Drained", history=after)), replace(WORLD, machines={name: machine})


def test_a_new_line_of_a_machines_history_is_an_event_of_the_machine() -> None:
    note, world = of_machine((NODE,), (NODE, ILL, HistoryEntry(3, "reboot", "a\nb")))
    said = event(note, world, "slurm")
    assert said is not None
    assert said["involvedObject"] == {
        "apiVersion": "minivm.io/v1alpha1", "kind": "Machine", "name": "m0", "uid": "uid-m0", "namespace": "slurm",
    }  # fmt: skip
    assert (said["reason"], said["type"]) == ("Noted", "Normal")
    assert said["message"] == "verdict ecc[rma]@1 x; reboot a b", "what was there before is told already"
    assert said["metadata"]["namespace"] == "slurm"


def test_of_a_history_that_is_full_the_new_line_alone_is_told() -> None:
    full = tuple(HistoryEntry(at, "verdict", f"{at}") for at in range(32))
    said = event(*of_machine(full, (*full[1:], HistoryEntry(40, "well", ""))), "slurm")
    assert said is not None and said["message"] == "well"


def test_a_note_that_begins_no_line_is_no_event() -> None:
    assert event(*of_machine((NODE,), (NODE,)), "slurm") is None
    note, _ = of_machine((), (NODE,))
    assert event(note, WORLD, "slurm") is None, "of a machine that is not known any more"


def stood(*stands: tuple[str, str, str, str]) -> PoolStatus:
    return PoolStatus(3, conditions=tuple(PoolCondition(*one) for one in stands))


def of_pool(before: PoolStatus, after: PoolStatus) -> str | None:
    pool = WorkerPool("gpu", "uid-gpu", "1", 1, {}, "h", "gpu", status=before)
    said = event(NotePool("gpu", "1", after), replace(WORLD, pools={"gpu": pool}), "slurm")
    if said is None:
        return None
    assert (said["involvedObject"]["kind"], said["involvedObject"]["uid"]) == ("WorkerPool", "uid-gpu")
    assert (said["reason"], said["type"]) == ("Noted", "Normal")
    return str(said["message"])


GOOD = ("Ready", "True", "AllReady", "")
BAD = ("Ready", "False", "NotReady", "not ready: gpu-1")
ROLLS = ("Updated", "False", "Updating", "of an older template: gpu-0")


def test_a_condition_that_turns_is_an_event_of_the_pool() -> None:
    assert of_pool(stood(GOOD), stood(BAD)) == "Ready is False, NotReady: not ready: gpu-1"
    assert of_pool(stood(BAD, ROLLS), stood(GOOD, ROLLS)) == "Ready is True, AllReady"
    refused = ("Updated", "False", "Refused", "another pool has its label")
    assert of_pool(stood(ROLLS), stood(refused)) == "Updated is False, Refused: another pool has its label"
    assert of_pool(PoolStatus(), stood(BAD)) == "Ready is False, NotReady: not ready: gpu-1"


def test_a_roll_that_goes_on_is_not_an_event_for_each_pod() -> None:
    assert of_pool(stood(ROLLS), stood((*ROLLS[:3], "of an older template: gpu-1"))) is None
    assert of_pool(stood(GOOD), replace(stood(GOOD), ready=2, updated=1)) is None
    assert of_pool(PoolStatus(), stood(GOOD)) is None, "it was never otherwise"


def test_a_verdict_that_comes_and_goes_is_not_an_event_each_time() -> None:
    """A verdict that flaps does not create an Event each time.

    Root on a worker writes verdicts, so Events are limited per machine and minute; other machines are unaffected.
    """
    often, found = EventRateLimit(), 0
    for turn in range(100):
        note, world = of_machine((), (HistoryEntry(turn, "verdict" if turn % 2 else "well"),))
        found += len(events([note], world, "slurm", 30, often, turn * 0.1))
    assert found == 8
    other, beside = of_machine((), (NODE,), "m1")
    assert len(events([other], beside, "slurm", 30, often, 10.0)) == 1
    assert len(events([note], world, "slurm", 30, often, 70.0)) == 1, "in the next minute it is told again"


def test_what_is_noted_of_thousands_takes_no_place_from_what_is_done_and_told() -> None:
    many = {f"m{number}": MachineObject(f"m{number}", f"uid-{number}", "7") for number in range(5000)}
    notes: list[Change | Notice] = [Record(name, "7", MachineStatus(history=(NODE,))) for name in many]
    notes += [Cordon("n0", "uid-n0", "1", "fan 3"), Notice("w0", "held", "x")]
    found = events(notes, replace(WORLD, machines=many), "slurm", 30, EventRateLimit(), 0.0)
    assert [one["reason"] for one in found] == ["Cordoned", "Held", *["Noted"] * 28]


def test_each_reason_stands_in_the_reference() -> None:
    text = (Path(__file__).parents[3] / "docs" / "reference" / "fleet.md").read_text()
    _, _, table = text.partition("\n## Events\n")
    table = table.partition("\n## ")[0]
    assert {reason for reason in REASONS.values() if f"`{reason}`" not in table} == set()
