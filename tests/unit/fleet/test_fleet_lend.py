"""Lending machines of a pool to guest pods: to which pods, which machines, when, how many, and how they return."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fleet.act.observer import needs_claims
from fleet.decide import lending
from fleet.decide.actions import Drain, Evict, FleetMemory
from fleet.decide.lending import plan_loans
from fleet.policy import Lend, parse_policy_text
from fleet.world import slurm
from fleet.world.guests import Guest
from fleet.world.kubernetes import KubernetesView
from fleet.world.slurm import SlurmView
from tests.fleet_lend_world import GPU, LENDS, NOTICE_S, Asked, LendWorlds
from tests.support.pool_events import EVENTS

ALL = {"w-n0", "w-n1", "w-n2", "w-n3"}


@pytest.fixture
def worlds() -> LendWorlds:
    made = LendWorlds()
    made.turns()
    made.done.clear()
    return made


def told(worlds: LendWorlds) -> dict[str, str]:
    return {one.about: one.text for one in worlds.decide(worlds.world()).notices if one.kind == "lend"}


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


def another(number: int) -> dict[str, Any]:
    return {"nodeSelector": {"number": str(number)}}


def test_thousands_of_pods_each_another_one_keep_no_other_namespace_from_a_machine(
    worlds: LendWorlds, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lending, "WORK", 4800)
    tried: list[str] = []
    suits = Guest.suits

    def counted(one: Guest, *where: Any) -> bool:
        tried.append(one.name)
        return suits(one, *where)

    monkeypatch.setattr(Guest, "suits", counted)
    for number in range(2000):
        worlds.wants_machine(f"a{number}", namespace="noisy", hindered=True, **another(number))
    worlds.now += 1
    worlds.wants_machine("b")
    worlds.decide(worlds.world())
    assert len(tried) < 600, "of the work of one look"
    assert [one for one in told(worlds).values() if "so many different pods wait in namespace noisy" in one]
    worlds.goes_on()
    assert worlds.asked["b"].node and len(worlds.lent()) == 1


def test_the_namespace_that_has_fewest_machines_is_next(worlds: LendWorlds) -> None:
    for name in ("a", "b", "c"):
        worlds.wants_machine(name, namespace="early")
    worlds.now += 60
    worlds.wants_machine("d")
    assert {one.split()[2] for one in told(worlds).values()} == {"early/a", "llm/d"}


def of_two_pools(worlds: LendWorlds) -> dict[str, set[str]]:
    """Return the guests of each pool's loans when two of the four machines belong to a second lending pool."""
    here, slurm = worlds.world().kubernetes, worlds.world().slurm
    assert isinstance(here, KubernetesView) and isinstance(slurm, SlurmView)
    pool = worlds.read()
    wanted = {"w": {"w-n0": "n0", "w-n1": "n1"}, "v": {"w-n2": "n2", "w-n3": "n3"}}
    pools = [replace(pool, name="v", label="v"), pool]
    policy = replace(worlds.policy, lend=replace(LENDS, pools={"w": 1.0, "v": 1.0}))
    found = plan_loans(
        pools, list(worlds.world().workers()), replace(here, desired_pods=wanted), slurm, worlds.now, policy
    )
    return {name: set(one.guests_of) for name, one in found.items()}


def test_two_pools_lend_one_machine_to_one_who_asks_and_the_one_that_has_begun_goes_on(worlds: LendWorlds) -> None:
    worlds.wants_machine("a")
    assert of_two_pools(worlds) == {"v": set(), "w": {"w-n0"}}
    for name in ("w-n0", "w-n1", "w-n2"):
        worlds.starts(name)
    assert of_two_pools(worlds) == {"v": {"w-n3"}, "w": set()}
    worlds.goes_on(0)
    assert worlds.lent() == {"w-n3"} and worlds.asked["a"].node == "n3"
    worlds.jobs_end("w-n0")
    assert of_two_pools(worlds) == {"v": {"w-n3"}, "w": set()}
    worlds.wants_machine("b")
    assert of_two_pools(worlds) == {"v": {"w-n3"}, "w": {"w-n0"}}


def test_what_is_told_of_long_names_is_no_longer_than_the_api_server_takes() -> None:
    worlds = LendWorlds(12)
    for number in range(6):
        worlds.wants_machine(f"{'n' * 250}{number}")
    worlds.goes_on()
    assert len(worlds.lent()) == 6
    assert 900 < len(whole(worlds)[1]) <= 1024


def test_what_a_reservation_names_is_not_lent_nor_what_may_be_named(worlds: LendWorlds) -> None:
    worlds.wants_machine("a")
    worlds.reserved = None
    worlds.goes_on()
    assert not worlds.lent(), "nobody has asked"
    assert needs_claims(worlds.world())
    worlds.reserved = frozenset({"w-n0", "w-n1", "w-n3"})
    worlds.goes_on()
    assert worlds.lent() == {"w-n2"}
    for worlds.reserved in (None, frozenset(ALL)):
        worlds.goes_on()
        assert worlds.lent() == {"w-n2"} and worlds.asked["a"].node == "n2", "who has it keeps it"
    del worlds.asked["a"]
    worlds.goes_on()
    assert not worlds.lent() and not needs_claims(worlds.world())


def test_that_a_reservation_cannot_be_read_is_told_and_by_whom_nothing_is_lent(worlds: LendWorlds) -> None:
    worlds.wants_machine("a")
    worlds.reserved = None
    seen = worlds.world()
    assert isinstance(seen.slurm, SlurmView)
    why = "it names more nodes than can be told apart"
    doubts = {"reservation later": f"cannot read reservation.node_list: {why}"}
    unread = replace(seen, slurm=replace(seen.slurm, doubts=doubts))
    worlds.look(world=unread)
    assert not worlds.lent()
    stands = worlds.decide(unread).notices
    (told,) = [one for one in stands if (one.about, one.kind) == ("fleet", "unread")]
    assert "Slurm's reservation later cannot be read" in told.text and told.text.endswith(why)
    assert "lends" in told.text, "and what waits for it"


def test_what_leaves_room_for_the_worker_keeps_no_machine(worlds: LendWorlds) -> None:
    worlds.full = 6
    worlds.pool.spec["template"]["spec"]["containers"][0]["resources"] = {"limits": {GPU: "6"}}
    worlds.wants_machine("a")
    worlds.goes_on()
    (name,) = worlds.lent()
    worlds.asked["beside"] = Asked(2, worlds.now, node=worlds.asked["a"].node)
    worlds.goes_on()
    assert worlds.lent() == {name} and name not in worlds.pods
    del worlds.asked["a"]
    worlds.goes_on()
    assert not worlds.lent() and name in worlds.pods


def test_a_worker_whose_machine_others_took_first_waits_for_it_and_nobody_misses_it(worlds: LendWorlds) -> None:
    worlds.wants_machine("a")
    worlds.goes_on()
    (name,) = worlds.lent()
    node = worlds.asked.pop("a").node
    before = worlds.world()
    worlds.asked["b"] = Asked(8, worlds.now, node=node)
    worlds.look(world=before)
    worlds.unplaced.add(name)
    worlds.roll("2")
    worlds.turns()
    assert worlds.updated() == ALL - {name} and worlds.lent() == {name} == worlds.unplaced, "the others have rolled"
    assert whole(worlds) == ("False", f"{name} to llm/b of class inference")
    assert {one.type: one.status for one in worlds.read().status.conditions}["Ready"] == "True"
    del worlds.asked["b"]
    worlds.unplaced.clear()
    worlds.turns()
    assert not worlds.lent() and all(pod.ready for pod in worlds.pods.values())


def test_a_namespace_of_which_nothing_is_known_keeps_what_it_has_and_no_other_from_its_turn() -> None:
    """A namespace that cannot be read keeps its loan and does not block other namespaces.

    This happens when a person removes the fleet's RoleBinding there.
    """
    worlds = LendWorlds(8)
    worlds.wants_machine("a", namespace="one")
    worlds.goes_on()
    (first,) = worlds.lent()
    worlds.silent = frozenset({"one"})
    worlds.goes_on(3600)
    assert worlds.lent() == {first}, "it may be anybody's of that namespace"
    worlds.wants_machine("b", namespace="two")
    worlds.wants_machine("c", namespace="two")
    worlds.goes_on(3600)
    assert first in worlds.lent() and len(worlds.lent()) == 2, "one of them is thought to have room where a is"
    del worlds.asked["b"], worlds.asked["c"]
    before = worlds.lent()
    worlds.goes_on(3600)
    assert worlds.lent() == before, "nothing is given back, for nobody knows whose it is"
    worlds.silent = frozenset()
    worlds.goes_on()
    assert worlds.lent() == {first}
    del worlds.asked["a"]
    worlds.goes_on()
    assert not worlds.lent()


def test_a_name_of_a_pool_that_is_not_there_is_told(worlds: LendWorlds) -> None:
    worlds.policy = replace(worlds.policy, lend=replace(LENDS, pools={"w": 0.5, "ww": 0.5}))
    assert told(worlds) == {
        "fleet": "the policy's lend.pools names ww, but no WorkerPool has that label; correct the name"
    }


def test_a_share_is_as_many_as_people_count() -> None:
    worlds = LendWorlds(100, replace(LENDS, pools={"w": 0.29}))
    for number in range(40):
        worlds.wants_machine(f"a{number}")
    assert len(told(worlds)) == 29


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
    assert not [one for one in worlds.decide(worlds.world()).notices if one.kind == "pause"]


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
# The decision is based on a snapshot from before two machines were lent.
@example([("job", 0, 0), ("asks", 0, 0), ("sees", 0, 0), ("job", 1, 0), ("asks", 1, 0), ("cut", 0, 2), ("late", 0, 0)])
# The decision is based on a snapshot from before a person drained a lent node.
@example([("asks", 0, 0), ("look", 0, 0), ("look", 0, 0), ("look", 0, 0), ("drains", 0, 0), ("late", 0, 0)])
# The decision is based on a snapshot from before a pod became unready.
@example([("job", 0, 0), ("template", 0, 0), ("sees", 0, 0), ("pod is not ready", 0, 0), ("late", 0, 0)])
def test_whatever_happens_it_keeps_its_share_its_notice_and_all_comes_back(steps: list[tuple[str, int, int]]) -> None:
    """Every loan returns in the end, whatever happens.

    The worlds assert the limits at each change: no more machines than the pool's share, and no job ends before its
    notice has passed or with its pod.
    """
    worlds = LendWorlds()
    seen, away = worlds.world(), worlds.unavailable()
    for what, number, cut in steps:
        match what:
            case "look":
                seen, away = worlds.world(), worlds.unavailable()
                worlds.look()
            case "sees":
                seen, away = worlds.world(), worlds.unavailable()
            case "cut":
                worlds.look(cut=cut)
            case "late":
                worlds.look(world=seen, away=away)
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
    # A node that a person resumed twice takes jobs in spite of the update.
    lifted = {"Updated"} if any(slurm.mark_in_comment(node.comment) for node in worlds.slurm.values()) else set()
    assert {one.type for one in worlds.read().status.conditions if one.status != "True"} <= lifted


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
                worlds.memory, left = FleetMemory(), -1
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


def test_the_policy_says_to_whom() -> None:
    said = '{"lend": {"namespaces": ["llm"], "classes": ["inference"], "pools": {"w": 0.5}, "notice": "10m"}}'
    assert parse_policy_text(said).lend == LENDS
