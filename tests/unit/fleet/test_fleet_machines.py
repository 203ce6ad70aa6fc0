"""Mapping of Nodes to machines, and each machine's history: it outlives pods and Nodes, and no machine has two."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import jsonschema  # type: ignore[import-untyped]  # none are there
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet import FleetError, crd
from fleet.decide.actions import Make, Record
from fleet.world.kubernetes import KubernetesView
from fleet.world.machine import (
    ActiveHistory,
    HistoryEntry,
    MachineObject,
    MachineStatus,
    Remedy,
    machine_status_json,
    parse_machine,
)
from tests.fleet_world import Node, Worlds

ROOT = Path(__file__).resolve().parents[3]
A, B = ("GPU-aaaaaaaa-1", "GPU-aaaaaaaa-2"), ("GPU-bbbbbbbb-1", "GPU-bbbbbbbb-2")


@pytest.fixture
def worlds() -> Worlds:
    made = Worlds(2)
    made.machines = {}
    made.settle_in()
    return made


def kept(worlds: Worlds) -> dict[str, MachineObject]:
    return {name: worlds.machine(name) for name in worlds.machines or {}}


def told(worlds: Worlds) -> dict[tuple[str, str], str]:
    return {(one.about, one.kind): one.text for one in worlds.decide(worlds.world()).notices}


def moved(worlds: Worlds, name: str, uid: str, **more: str) -> None:
    """Replace the Node by another one of the same name."""
    worlds.nodes[name] = Node(uid, **more)  # type: ignore[arg-type]


def test_each_node_with_a_worker_is_a_machine_and_nothing_is_noted_twice(worlds: Worlds) -> None:
    assert {(one.status.node, one.status.worker, one.status.state) for one in kept(worlds).values()} == {
        ("n0", "w0", "TakesJobs"),
        ("n1", "w1", "TakesJobs"),
    }
    worlds.now += 1000
    assert not worlds.look(), "no news, no note"


def test_unasked_none_is_kept() -> None:
    worlds = Worlds()
    worlds.settle_in()
    assert not [one for one in worlds.done if isinstance(one, Make | Record)]


def test_a_verdict_outlives_the_pod_and_repeats_are_counted(worlds: Worlds) -> None:
    worlds.verdict("w0")
    worlds.settle_in()
    status = worlds.status("n0")
    assert (status.verdict, status.ill, status.repeats) == ("gpu_count[rma]@9f2c001 7 of 8 GPUs", True, 1)
    worlds.person_resumes("w0")
    worlds.replace("w0")
    worlds.settle_in()
    status = worlds.status("n0")
    assert (status.ill, status.repeats, status.history[-1].what) == (False, 1, "well")
    worlds.verdict("w0", "gpu_count[rma]@9f2c001 6 of 8 GPUs")
    worlds.settle_in()
    assert worlds.status("n0").repeats == 2
    worlds.now += worlds.policy.machines.window_s
    worlds.settle_in()
    assert worlds.status("n0").repeats == 0, "what is long ago does not count"


def test_the_same_verdict_in_other_words_is_one(worlds: Worlds) -> None:
    worlds.verdict("w0")
    worlds.settle_in()
    worlds.verdict("w0", "gpu_count[rma]@9f2c001 6 of 8 GPUs")
    worlds.settle_in()
    assert (worlds.status("n0").repeats, worlds.status("n0").verdict[-11:]) == (1, "6 of 8 GPUs"[-11:])


def test_a_persons_drain_is_no_verdict(worlds: Worlds) -> None:
    worlds.person_drains("w0")
    worlds.settle_in()
    assert (worlds.status("n0").verdict, worlds.status("n0").state) == ("", "Drained")


def test_a_person_who_says_up_forgives(worlds: Worlds) -> None:
    worlds.verdict("w0")
    worlds.settle_in()
    worlds.wants("n0", "up", "new cable")
    worlds.settle_in()
    assert (worlds.status("n0").repeats, worlds.status("n0").history[-1].what) == (0, "forgiven")


def test_hardware_keeps_its_history_behind_another_node_of_its_provider(worlds: Worlds) -> None:
    worlds.nodes["n0"].provider = "cloud:///a/1"
    worlds.verdict("w0")
    worlds.settle_in()
    before = {one.status.node: one.name for one in kept(worlds).values()}
    moved(worlds, "n0", "node-new", provider="cloud:///a/1")
    worlds.settle_in()
    assert {one.status.node: one.name for one in kept(worlds).values()} == before
    assert (worlds.status("n0").node_uid, worlds.status("n0").repeats) == ("node-new", 1)


def test_another_node_without_a_name_of_its_provider_is_other_hardware(worlds: Worlds) -> None:
    first = next(one.name for one in kept(worlds).values() if one.status.node == "n0")
    moved(worlds, "n0", "node-new")
    worlds.settle_in()
    assert len(kept(worlds)) == 3
    assert kept(worlds)[first].status.state == "Absent"
    assert kept(worlds)[first].status.history[-1] == HistoryEntry(int(worlds.now), "left", "n0")


def test_gpus_say_more_than_a_node_and_its_provider(worlds: Worlds) -> None:
    """GPUs identify a machine before its Node and provider ID do.

    A board that moves to another machine takes its history along, and the hardware in its old place is new.
    """
    worlds.nodes["n0"].provider = "cloud:///a/1"
    worlds.pods["w0"].gpus = A
    worlds.settle_in()
    first = next(one.name for one in kept(worlds).values() if one.status.node == "n0")
    assert kept(worlds)[first].status.gpus == A
    worlds.pods["w0"].gpus = B
    worlds.boots("n0")
    worlds.settle_in()
    assert kept(worlds)[first].status.state == "Absent"
    assert len(kept(worlds)) == 3
    moved(worlds, "n1", "node-new")
    worlds.pods["w1"].gpus = A
    worlds.settle_in()
    assert kept(worlds)[first].status.node == "n1"


def test_one_gpu_of_it_is_enough_and_what_is_new_is_noted(worlds: Worlds) -> None:
    worlds.pods["w0"].gpus = A
    worlds.settle_in()
    worlds.pods["w0"].gpus = (A[1], B[0])
    worlds.boots("n0")
    worlds.settle_in()
    assert len(kept(worlds)) == 2
    assert worlds.status("n0").gpus == (A[1], B[0])


def test_a_pod_that_has_not_told_its_gpus_yet_is_no_other_hardware(worlds: Worlds) -> None:
    worlds.pods["w0"].gpus = A
    worlds.settle_in()
    worlds.replace("w0")
    worlds.settle_in()
    assert len(kept(worlds)) == 2
    assert worlds.status("n0").gpus == A


def test_who_says_that_he_has_anothers_gpus_is_told_and_not_believed(worlds: Worlds) -> None:
    worlds.pods["w1"].gpus = A
    worlds.settle_in()
    worlds.verdict("w1")
    worlds.settle_in()
    before = kept(worlds)
    moved(worlds, "n0", "node-new")
    worlds.pods["w0"].gpus = A
    worlds.settle_in()
    assert told(worlds)["n0", "twice"].startswith("reports GPUs of machine n1-")
    assert worlds.status("n1") == next(one.status for one in before.values() if one.status.node == "n1")


def test_nor_while_the_other_one_has_a_pod_that_has_not_told_its_own_yet(worlds: Worlds) -> None:
    worlds.pods["w1"].gpus = A
    worlds.settle_in()
    name = next(one.name for one in kept(worlds).values() if one.status.node == "n1")
    worlds.replace("w1")
    moved(worlds, "n0", "node-new")
    worlds.pods["w0"].gpus = A
    worlds.settle_in()
    assert kept(worlds)[name].status.node == "n1"


FAKES = tuple(f"GPU-{number:08x}-ffff" for number in range(200))
LIES: dict[str, tuple[str, ...]] = {
    "another's": B,
    "its own and another's": (*A, *B),
    "one that is away": ("GPU-cccccccc-1",),
    "nobody's": FAKES,
    "its own and nobody's": (*A, *FAKES),
}


@pytest.mark.parametrize("after", ["", "one of its own and nobody's", "nobody's", "a boot"])
@pytest.mark.parametrize("lie", LIES)
def test_a_pod_that_lies_about_its_gpus_moves_nobodys_history_nor_goal(lie: str, after: str) -> None:
    """A pod that lies about its GPUs does not move any history or goal.

    Root in a pod may write the conditions of its own pod and of other pods.
    """
    worlds = Worlds(3)
    worlds.machines = {}
    for name, gpus in (("w0", A), ("w1", B), ("w2", ("GPU-cccccccc-1",))):
        worlds.pods[name].gpus = gpus
    worlds.verdict("w1")
    worlds.settle_in()
    worlds.person_resumes("w1")
    for node in worlds.nodes:
        worlds.wants(node, "drain", "fan 3")
    worlds.settle_in()
    worlds.controller.node = "n1"
    del worlds.nodes["n2"], worlds.pods["w2"]
    worlds.settle_in()
    before = {name: one.status.node for name, one in kept(worlds).items()}
    worlds.pods["w0"].gpus = LIES[lie]
    worlds.settle_in()
    if after == "a boot":
        worlds.pods["w0"].gpus = A
        worlds.boots("n0")
    elif after:
        worlds.pods["w0"].gpus = (*A[:1], *FAKES) if "own" in after else FAKES
    worlds.settle_in()
    assert {name: one.status.node for name, one in kept(worlds).items()} == before
    assert [worlds.slurm[name].drained_by for name in ("w0", "w1")] == ["fleet", "fleet"]
    assert worlds.status("n1").repeats == 1
    assert set(worlds.status("n1").gpus) == set(B)
    assert set(A) <= set(worlds.status("n0").gpus)
    if lie in ("another's", "nobody's", "one that is away") and not after:
        assert "the fleet ignores" in told(worlds)["n0", "twice"]
    assert ("n1", "twice") not in told(worlds)
    assert not jsonschema_errors(worlds.status("n0"))


def test_of_two_new_ones_that_claim_one_that_is_away_neither_is_it(worlds: Worlds) -> None:
    worlds.pods["w0"].gpus = A
    worlds.settle_in()
    (first,) = [one.name for one in kept(worlds).values() if one.status.node == "n0"]
    for node in ("n0", "n1"):
        moved(worlds, node, f"{node}-new")
    worlds.pods["w1"].gpus = A
    worlds.settle_in()
    assert kept(worlds)[first].status.state == "Absent"
    assert "on another Node: the fleet ignores" in told(worlds)["n1", "twice"]
    worlds.pods["w1"].gpus = B
    worlds.settle_in()
    assert kept(worlds)[first].status.node == "n0"


def test_gpus_that_are_told_late_still_say_which_one_it_is(worlds: Worlds) -> None:
    worlds.pods["w0"].gpus = A
    worlds.settle_in()
    (first,) = [one.name for one in kept(worlds).values() if one.status.node == "n0"]
    moved(worlds, "n0", "node-new")
    worlds.pods["w0"].gpus = ()
    worlds.settle_in()
    assert kept(worlds)[first].status.state == "Absent"
    worlds.pods["w0"].gpus = A
    worlds.settle_in()
    assert kept(worlds)[first].status.node == "n0"


@pytest.mark.parametrize("blind", ["kubernetes", "slurm", "machines"])
def test_of_what_is_not_known_nothing_is_noted(worlds: Worlds, blind: str) -> None:
    worlds.verdict("w0")
    decision = worlds.decide(worlds.world(blind=blind))
    assert not [one for one in decision.changes if isinstance(one, Make | Record)]


def test_a_node_that_cannot_be_read_has_not_left(worlds: Worlds) -> None:
    world = worlds.world()
    here = world.kubernetes
    assert isinstance(here, KubernetesView)
    nodes = {name: node for name, node in here.nodes.items() if name != "n0"}
    world = replace(world, kubernetes=replace(here, nodes=nodes, unread={"Node/n0": "x"}))
    assert not [one for one in worlds.decide(world).changes if isinstance(one, Record)]


def test_a_worker_that_slurm_does_not_tell_of_is_not_well(worlds: Worlds) -> None:
    worlds.verdict("w0")
    worlds.settle_in()
    del worlds.slurm["w0"]
    worlds.deaf.add("w0")
    worlds.look()
    assert (worlds.status("n0").state, worlds.status("n0").ill) == ("Unregistered", True)


def test_history_is_bounded(worlds: Worlds) -> None:
    for number in range(60):
        worlds.verdict("w0", f"c{number}[node]@1 {'x' * 900}\n\x1b[2J")
        worlds.settle_in()
    status = worlds.status("n0")
    assert (len(status.history), status.history[-1].text[:4]) == (crd.EVENTS, "c59[")
    assert not jsonschema_errors(status)
    assert status.history[-1].text.isprintable()


def reports_active(worlds: Worlds, *results: str) -> tuple[ActiveHistory, ...]:
    worlds.pods["w0"].states["minivm.io/ActiveChecks"] = ("True", "; ".join(results))
    worlds.settle_in()
    return worlds.status("n0").active_checks


def test_results_of_active_checks_count_once_and_outlive_the_pod(worlds: Worlds) -> None:
    first, second = int(worlds.now) - 9000, int(worlds.now) - 100
    known = (ActiveHistory("cpu", first, first, "P"), ActiveHistory("tcp", first, 0, "F"))
    for _ in range(2):
        assert reports_active(worlds, f"cpu passed {first}", f"tcp failed {first}") == known
    assert reports_active(worlds, f"cpu failed {second}")[0] == ActiveHistory("cpu", second, first, "PF")
    worlds.replace("w0")
    worlds.settle_in()
    assert worlds.status("n0").active_checks == (ActiveHistory("cpu", second, first, "PF"), known[1])
    # An older result, a pod whose clock is ahead, and what no pod writes.
    odd = (f"cpu passed {first}", f"cpu passed {int(worlds.now) + 9000}", "x", "cpu maybe 5", "cpu passed 1 2", "a b")
    assert reports_active(worlds, *odd)[0] == ActiveHistory("cpu", second, first, "PF")


def test_results_of_active_checks_are_bounded(worlds: Worlds) -> None:
    for number in range(crd.RESULTS + 5):
        results = reports_active(worlds, *(f"c{check} passed {1000 + number}" for check in range(30)))
    assert len(results) == crd.CHECKS and {entry.results for entry in results} == {"P" * crd.RESULTS}
    assert not jsonschema_errors(worlds.status("n0"))


def jsonschema_errors(status: MachineStatus) -> list[str]:
    schema = json.loads(json.dumps(crd.STATUS))
    lists = (schema["properties"][name]["items"] for name in ("history", "activeChecks"))
    for place in (schema, schema["properties"]["remedy"], *lists):
        place["additionalProperties"] = False
    return [error.message for error in jsonschema.Draft7Validator(schema).iter_errors(machine_status_json(status))]


WORD = st.text(max_size=8)
AT = st.integers(0, 4_000_000_000)
EVENTS = st.builds(HistoryEntry, AT, st.text(min_size=1, max_size=8), WORD)
ACTIVE = st.builds(ActiveHistory, st.text(min_size=1, max_size=8), AT, AT, st.text("PF", min_size=1, max_size=16))
REMEDIES = st.builds(Remedy, st.sampled_from(crd.GOALS), st.integers(0, 9), AT, WORD, st.booleans())


@given(
    st.builds(
        MachineStatus,
        goal=st.sampled_from(crd.GOALS),
        state=st.sampled_from(crd.STATES),
        why=WORD,
        gpus=st.lists(st.sampled_from([*A, *B]), unique=True).map(tuple),
        ill=st.booleans(),
        history=st.lists(EVENTS, max_size=3).map(tuple),
        active_checks=st.lists(ACTIVE, max_size=3).map(tuple),
        remedy=st.none() | REMEDIES,
    )
)
def test_what_is_written_is_read_and_passes_the_schema(status: MachineStatus) -> None:
    item = {"metadata": {"name": "m", "uid": "u"}, "spec": {}, "status": machine_status_json(status)}
    assert parse_machine(item).status == status
    assert not jsonschema_errors(status)


@pytest.mark.parametrize(
    "broken",
    [
        {"spec": {"goal": "sleep"}},
        {"spec": "x"},
        {"status": {"gpus": [1]}},
        {"status": {"ill": "yes"}},
        {"status": {"history": [{"at": "soon", "what": "x"}]}},
        {"status": {"remedy": {"goal": 1}}},
        {"metadata": {"name": "m"}},
    ],
)
def test_one_that_is_not_as_promised_is_refused_as_a_whole(broken: dict[str, object]) -> None:
    with pytest.raises(FleetError, match="read "):
        parse_machine({"metadata": {"name": "m", "uid": "u"}, **broken})


def test_the_charts_definition_is_the_one_that_is_written_here() -> None:
    text = (ROOT / "cluster/chart/charts/crds/crds/machine.json").read_text()
    assert text == json.dumps(crd.definition(), indent=2) + "\n", (
        "fleet crd > cluster/chart/charts/crds/crds/machine.json"
    )


def test_the_definitions_have_nothing_that_an_api_server_drops() -> None:
    """Lists of versions are atomic: server-side apply by a second tool would conflict with an unchanged definition."""
    assert '"description": ""' not in json.dumps([crd.definition(), crd.pool_definition()])
