"""Machines that a pool lends to pods of others: to whom, which, when, how many, and how they come back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fleet.decide.actions import Drain, Evict
from fleet.decide.memory import Memory
from fleet.errors import FleetError
from fleet.policy import Lend, policy_from_json
from fleet.world.guests import amount, guest, requests
from tests.fleet_lend_world import LENDS, NOTICE_S, Asked, LendWorlds
from tests.unit.fleet.test_fleet_pool_properties import EVENTS

ALL = {"w-n0", "w-n1", "w-n2", "w-n3"}


@pytest.fixture
def worlds() -> LendWorlds:
    made = LendWorlds()
    made.turns()
    made.done.clear()
    return made


def told(worlds: LendWorlds) -> dict[str, str]:
    return {one.about: one.text for one in worlds.decide(worlds.world()).stands if one.kind == "lend"}


def whole(worlds: LendWorlds) -> tuple[str, str]:
    (found,) = [(one.status, one.message) for one in worlds.read().status.conditions if one.type == "Whole"]
    return found


def test_who_finds_no_room_gets_an_idle_machine_and_the_pool_takes_it_back_when_he_is_gone(worlds: LendWorlds) -> None:
    worlds.starts("w-n0")
    worlds.wants_machine("a")
    worlds.look()
    assert worlds.slurm["w-n1"].reason.startswith("minivm: fleet: lend: wanted by llm/a of class inference at 20")
    assert "wanted by llm/a of class inference" in told(worlds)["w-n1"]
    worlds.goes_on()
    assert worlds.asked["a"].node == "n1" and set(worlds.pods) == ALL - {"w-n1"}
    assert told(worlds) == {"n1": "is lent to llm/a of class inference"}
    assert whole(worlds) == ("False", "w-n1 to llm/a of class inference")
    ready = {one.type: one.status for one in worlds.read().status.conditions}
    assert ready["Ready"] == "True" and worlds.read().status.wanted == 3
    worlds.goes_on(86400)
    assert set(worlds.pods) == ALL - {"w-n1"} and worlds.slurm["w-n1"].reason.startswith("minivm: fleet: lend:")
    del worlds.asked["a"]
    worlds.goes_on()
    assert set(worlds.pods) == ALL and not worlds.lent() and not told(worlds)
    assert worlds.slurm["w-n1"].drained_by == "" and whole(worlds) == ("True", "")


def test_jobs_have_notice_and_are_requeued_at_its_end_and_not_before(worlds: LendWorlds) -> None:
    for name in ALL:
        worlds.starts(name)
    worlds.wants_machine("a")
    worlds.goes_on(0)
    assert worlds.lent() == {"w-n0"} and worlds.slurm["w-n0"].jobs and "w-n0" in worlds.pods
    worlds.now = worlds.began["w-n0"] + NOTICE_S - 1
    worlds.look()
    assert worlds.slurm["w-n0"].jobs, "a moment before"
    worlds.now += 1
    worlds.goes_on(0)
    downs = [one for one in worlds.done if isinstance(one, Drain) and one.down]
    assert [one.name for one in downs] == ["w-n0"] and "its jobs had 600 s" in downs[0].reason
    assert worlds.asked["a"].node == "n0" and set(worlds.pods) == ALL - {"w-n0"}
    del worlds.asked["a"]
    worlds.turns()
    assert set(worlds.pods) == ALL and worlds.starts("w-n0")


def test_who_does_not_want_it_any_more_leaves_it_as_it_was(worlds: LendWorlds) -> None:
    for name in ALL:
        worlds.starts(name)
    worlds.wants_machine("a")
    worlds.goes_on(0)
    del worlds.asked["a"]
    worlds.goes_on(NOTICE_S)
    assert not worlds.lent() and worlds.slurm["w-n0"].jobs == {7}
    assert not [one for one in worlds.done if isinstance(one, Evict)]


def test_a_machine_that_gets_idle_is_given_in_place_of_a_busy_one(worlds: LendWorlds) -> None:
    for name in ALL:
        worlds.starts(name)
    worlds.wants_machine("a")
    worlds.goes_on(0)
    worlds.jobs_end("w-n2")
    worlds.goes_on(0)
    assert worlds.lent() == {"w-n2"} and worlds.asked["a"].node == "n2"
    assert worlds.slurm["w-n0"].jobs == {7} and not worlds.slurm["w-n0"].drained_by


def test_no_more_than_its_share_and_several_on_one_machine(worlds: LendWorlds) -> None:
    for name in "abcdef":
        worlds.wants_machine(name, gpus=4)
    worlds.turns()
    assert len(worlds.lent()) == 2 and len(worlds.pods) == 2
    assert sum(bool(one.node) for one in worlds.asked.values()) == 4


def test_who_fits_nowhere_keeps_nobody_else_from_it(worlds: LendWorlds) -> None:
    for number in range(300):
        worlds.wants_machine(f"a{number}", gpus=9, hindered=True)
    worlds.now += 1
    worlds.wants_machine("b")
    worlds.goes_on()
    assert worlds.asked["b"].node


Change = Callable[[LendWorlds], object]
NOTHING: dict[str, Change] = {
    "another class": lambda w: setattr(w.asked["a"], "class_", "batch"),
    "more than a machine has": lambda w: setattr(w.asked["a"], "gpus", 9),
    "other machines": lambda w: setattr(w.asked["a"], "more", {"nodeSelector": {"gpu": "h200"}}),
    "a taint that he does not tolerate": lambda w: list(map(partial(LendWorlds.taint, w, key="gpu"), w.nodes)),
    "cordoned": lambda w: w.cordon(*w.nodes),
    "it fits beside the worker": lambda w: (
        w.__dict__.update(full=4),
        w.asked.update(a=Asked(4, w.now, hindered=True)),
    ),
    "nothing is lent": lambda w: setattr(w, "policy", replace(w.policy, lend=Lend())),
    "another pool lends": lambda w: setattr(w, "policy", replace(w.policy, lend=replace(LENDS, pools={"x": 1.0}))),
    "less than one": lambda w: setattr(w, "policy", replace(w.policy, lend=replace(LENDS, pools={"w": 0.2}))),
    "none may be away": lambda w: w.wants_of_it(update={"maxUnavailable": 0}),
}


@pytest.mark.parametrize("what", NOTHING)
def test_for_whom_nothing_goes(worlds: LendWorlds, what: str) -> None:
    worlds.wants_machine("a", hindered=True)
    NOTHING[what](worlds)
    worlds.goes_on()
    assert not worlds.lent() and set(worlds.pods) == ALL


@pytest.mark.parametrize("blind", ["guests", "pools", "slurm", "kubernetes"])
def test_what_is_not_known_begins_nothing_and_gives_nothing_back(worlds: LendWorlds, blind: str) -> None:
    worlds.wants_machine("a")
    for _ in range(3):
        worlds.look(blind=blind)
    assert not worlds.lent()
    worlds.goes_on()
    before = worlds.lent()
    assert len(before) == 1
    del worlds.asked["a"]
    for _ in range(3):
        worlds.now += NOTICE_S
        worlds.look(blind=blind)
    assert worlds.lent() == before and not before & worlds.pods.keys()


def test_where_clocks_differ_nothing_is_begun_and_no_deadline_comes(worlds: LendWorlds) -> None:
    for name in ALL:
        worlds.starts(name)
    worlds.wants_machine("a")
    for _ in range(2):
        worlds.look(world=replace(worlds.world(), clocks="ours is another"))
    assert not worlds.lent()
    worlds.look()
    worlds.now += 2 * NOTICE_S
    worlds.look(world=replace(worlds.world(), clocks="ours is another"))
    assert worlds.lent() and all(worlds.slurm[name].jobs for name in ALL)


def test_what_a_person_holds_or_resumes_twice_is_not_taken(worlds: LendWorlds) -> None:
    worlds.person_drains("w-n0")
    worlds.wants_machine("a", hindered=True)
    worlds.starts("w-n1")
    worlds.starts("w-n2")
    worlds.starts("w-n3")
    worlds.look()
    assert worlds.lent() == {"w-n1"}
    for _ in range(2):
        worlds.person_resumes("w-n1")
        worlds.look()
    assert worlds.lent() == {"w-n2"} and worlds.slurm["w-n0"].drained_by == "person"


def test_a_machine_that_is_lent_is_no_loss(worlds: LendWorlds) -> None:
    worlds.wants_machine("a")
    worlds.goes_on()
    (name,) = worlds.lent()
    worlds.goes_on(3600)
    assert not worlds.slurm[name].down and LENDS.pools["w"] == 0.5
    assert not [one for one in worlds.decide(worlds.world()).stands if one.kind == "pause"]


def test_whoever_lends_no_more_takes_back_what_he_lent_when_there_is_room(worlds: LendWorlds) -> None:
    worlds.wants_machine("a")
    worlds.goes_on()
    worlds.policy = replace(worlds.policy, lend=Lend())
    worlds.goes_on()
    assert set(worlds.pods) == ALL, "its pod waits for the machine"


LOOKS = ("look", "cut", "sees", "late", "blind to guests", "blind to slurm", "blind to pools")
OF_GUESTS: dict[str, Callable[[LendWorlds, int], object]] = {
    "asks": lambda w, number: w.wants_machine(f"g{number}", 5 + number, hindered=False),
    "asks in vain": lambda w, number: w.wants_machine(f"g{number}", 8, hindered=True),
    "leaves": lambda w, number: w.asked.pop(f"g{number}", None),
    "kubelets": lambda w, number: w.kubelets(),
    "less": lambda w, number: setattr(w, "policy", replace(w.policy, lend=replace(LENDS, pools={"w": number / 8}))),
    "time": lambda w, number: setattr(w, "now", w.now + 70),
    "hours": lambda w, number: setattr(w, "now", w.now + 7200),
    "template": lambda w, number: w.roll(str(number)),
}
STEPS = st.lists(
    st.tuples(
        st.sampled_from([*EVENTS, *OF_GUESTS, *LOOKS, "look", "look", "look", "asks", "job", "job", "kubelets"]),
        st.integers(0, 3),
        st.integers(0, 6),
    ),
    max_size=40,
)


@settings(max_examples=150, deadline=None)
@given(STEPS)
# Decided by a world before which two machines were lent.
@example([("job", 0, 0), ("asks", 0, 0), ("sees", 0, 0), ("job", 1, 0), ("asks", 1, 0), ("cut", 0, 2), ("late", 0, 0)])
def test_whatever_happens_it_keeps_its_share_its_notice_and_all_comes_back(steps: list[tuple[str, int, int]]) -> None:
    """Asserted by the worlds at each change: no more than its share, no job ends before its time or with its pod."""
    worlds = LendWorlds()
    seen = worlds.world()
    for what, number, cut in steps:
        match what:
            case "look":
                seen = worlds.world()
                worlds.look()
            case "sees":
                seen = worlds.world()
            case "cut":
                worlds.look(cut=cut)
            case "late":
                worlds.look(world=seen)
            case "blind to guests" | "blind to slurm" | "blind to pools":
                worlds.look(blind=what.rpartition(" ")[2])
            case what if what in OF_GUESTS:
                OF_GUESTS[what](worlds, number)
            case _:
                name = worlds.names[number]
                if name in worlds.pods and name in worlds.slurm:
                    EVENTS[what](worlds, name, f"n{number}")
    worlds.all_well()
    assert set(worlds.pods) == ALL and not worlds.lent()
    assert not [name for name, node in worlds.slurm.items() if node.drained_by == "fleet"], "and nothing is left behind"
    assert {one.status for one in worlds.read().status.conditions} == {"True"}


def test_killed_between_any_two_changes_it_ends_the_same() -> None:
    def ends(cut: int) -> tuple[object, int]:
        worlds = LendWorlds(2)
        worlds.starts("w-n0")
        worlds.starts("w-n1")
        worlds.wants_machine("a")
        left = cut
        for turn in range(40):
            many = len(worlds.decide(worlds.world()).changes)
            if 0 <= left <= many:
                worlds.look(cut=left)
                worlds.memory, left = Memory(), -1
            else:
                worlds.look()
                left -= many if left >= 0 else 0
            worlds.kubelets()
            worlds.now += 60
            if turn == 25:
                del worlds.asked["a"]
        pods = {name: (pod.free, worlds.owner[name]) for name, pod in worlds.pods.items()}
        return (pods, {name: (node.drained_by, node.comment) for name, node in worlds.slurm.items()}), len(worlds.done)

    wanted, many = ends(-1)
    for cut in range(many + 1):
        assert ends(cut)[0] == wanted, cut


# As it is read


@pytest.mark.parametrize(
    ("said", "thousandths"),
    [
        ("8", 8000), ("1500m", 1500), ("0.5", 500), ("2k", 2_000_000), ("1Ki", 1_024_000), ("1.5Gi", 1_610_612_736_000),
        ("1e3", 1_000_000), ("1n", 1), ("0", 0), ("3Ei", 3 * 2**60 * 1000),
    ],
)  # fmt: skip
def test_a_quantity_is_as_kubernetes_counts(said: str, thousandths: int) -> None:
    assert amount(said, "cpu") == thousandths


@pytest.mark.parametrize("said", ["", "-1", "1x", "9" * 40, "1e999999", 5, None, " 1", "0x10", "1\n"])
def test_what_is_no_quantity_is_refused(said: object) -> None:
    with pytest.raises(FleetError, match="no quantity"):
        amount(said, "cpu")


def of(**kinds: Any) -> dict[str, Any]:
    return {"resources": {"requests": kinds}}


def test_a_pod_asks_for_what_its_containers_ask_for() -> None:
    spec = {
        "containers": [of(cpu="1"), of(cpu="500m", gpu="2"), {}],
        "initContainers": [of(cpu="4"), {**of(cpu="1"), "restartPolicy": "Always"}],
        "overhead": {"cpu": "100m"},
    }
    assert requests(spec) == {"cpu": 4000, "gpu": 2000}


AFFINITY = {
    "nodeAffinity": {
        "requiredDuringSchedulingIgnoredDuringExecution": {
            "nodeSelectorTerms": [
                {"matchExpressions": [{"key": "gpu", "operator": "In", "values": ["h200"]}]},
                {"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n7"]}]},
            ]
        }
    }
}


@pytest.mark.parametrize(
    ("spec", "labels", "taints", "fits"),
    [
        ({}, {}, [], True),
        ({"nodeSelector": {"a": "b"}}, {"a": "b"}, [], True),
        ({"nodeSelector": {"a": "b"}}, {}, [], False),
        ({"affinity": AFFINITY}, {"gpu": "h200"}, [], True),
        ({"affinity": AFFINITY}, {"gpu": "a100"}, [], False),
        ({"affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {
            "nodeSelectorTerms": [{"matchExpressions": [{"key": "n", "operator": "Gt", "values": ["1"]}]}]}}}},
         {"n": "2"}, [], False),
        ({}, {}, [("gpu", "yes", "NoSchedule")], False),
        ({}, {}, [("gpu", "yes", "PreferNoSchedule")], True),
        ({"tolerations": [{"key": "gpu", "operator": "Exists"}]}, {}, [("gpu", "yes", "NoSchedule")], True),
        ({"tolerations": [{"operator": "Exists"}]}, {}, [("gpu", "yes", "NoExecute")], True),
        ({"tolerations": [{"key": "gpu", "value": "no"}]}, {}, [("gpu", "yes", "NoSchedule")], False),
        ({"tolerations": [{"key": "gpu", "value": "yes", "effect": "NoExecute"}]}, {},
         [("gpu", "yes", "NoSchedule")], False),
    ],
)  # fmt: skip
def test_which_machines_suit(
    spec: dict[str, Any], labels: dict[str, str], taints: list[tuple[str, str, str]], fits: bool
) -> None:
    one = guest({"metadata": {"name": "a", "namespace": "llm"}, "spec": spec})
    assert one.suits("n0", labels, taints) is fits


def test_who_is_placed_going_or_over_waits_for_nothing() -> None:
    no = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
    named = {"name": "a", "namespace": "llm"}
    item = {"metadata": named, "status": {"conditions": [no]}}
    assert guest(item).waits
    assert not guest({**item, "spec": {"nodeName": "n0"}}).waits
    assert not guest({**item, "status": {"conditions": [{**no, "reason": "SchedulingGated"}]}}).waits
    assert not guest({**item, "metadata": {**named, "deletionTimestamp": "2026-11-22T00:00:00Z"}}).waits
    over = guest({**item, "spec": {"nodeName": "n0"}, "status": {"phase": "Succeeded"}})
    assert (over.node, over.waits) == ("", False)


def test_the_policy_says_to_whom() -> None:
    said = '{"lend": {"namespaces": ["llm"], "classes": ["inference"], "pools": {"w": 0.5}, "notice": "10m"}}'
    assert policy_from_json(said).lend == LENDS
