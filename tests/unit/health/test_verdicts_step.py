"""The broker's step function: a table of its queries and actions in each state, and its invariants."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from health.broker.decide import Act, BrokerNode, Enter, Gpu, OtherNode, OtherNodes, Seen, names
from health.broker.step import (
    Action,
    ApplyAct,
    AskNode,
    AskOtherNodes,
    BrokerInputs,
    Failed,
    Log,
    Memory,
    Now,
    forget,
    hold_resumed,
    step,
)
from health.policy import BrokerPolicy
from health.verdict import Class, Result, Verdict

BOOT = "boot-1"
COMMIT = "9f2c1ab0000000000000000000000000deadbeef"
NOW = Now(wall=1000.0, steady=50.0)
POLICY = BrokerPolicy(
    clear_after=1, clear_wait_s={"node": 0.0, "reboot": 0.0, "manual": 0.0, "rma": -1.0}, guard_spread_s=0.0
)
REASON = "minivm: gpu_ecc[reboot]@9f2c1ab 2 errors"
DRAIN, CLEAR = Act("drain", REASON), Act("clear", "every check that drained it passes again")
IDLE, OURS, ANNS = BrokerNode(False, ""), BrokerNode(True, REASON), BrokerNode(True, "Ann: fan")
ALONE = OtherNodes((), 1)
MANY = OtherNodes((OtherNode(REASON, NOW.wall),) * 9, 10)


def verdict(result: Result = Result.PROBLEM, check: str = "gpu_ecc", **changes: Any) -> Verdict:
    made = Verdict(
        check, result, Class.REBOOT, "2 errors", commit=COMMIT, boot_id=BOOT, at=NOW.wall, expires=NOW.wall + 600
    )
    return replace(made, **changes)


def inputs(*verdicts: Verdict, **changes: Any) -> BrokerInputs:
    return replace(BrokerInputs("worker-7", POLICY, BOOT, verdicts), **changes)


# The broker has queried its node once, and the node was well.
FRESH = Memory(acted_on=frozenset())
STANDS = Seen(1, 0, 0.0, NOW.wall, NOW.wall, "reboot", "2 errors", "host", COMMIT)
DRAINED = Memory(
    seen={"gpu_ecc": STANDS}, acted_on=frozenset({STANDS.name("gpu_ecc")}), drained=True, posted=REASON, recheck=80.0
)
SICK = inputs(verdict())
WELL = inputs(verdict(Result.OK, at=NOW.wall + 1))


@pytest.mark.parametrize(
    ("what", "memory", "given", "wanted"),
    [
        ("at its start it looks at its node", Memory(), inputs(), [AskNode()]),
        ("a healthy node asks nobody", FRESH, WELL, []),
        ("a problem asks for the node", FRESH, SICK, [AskNode()]),
        ("then what the others say", FRESH, replace(SICK, node=IDLE), [AskOtherNodes()]),
        ("then it drains", FRESH, replace(SICK, node=IDLE, other_nodes=ALONE), [ApplyAct(DRAIN)]),
        ("a person's drain is left alone", FRESH, replace(SICK, node=ANNS), []),
        ("what many say drains nothing", FRESH, replace(SICK, node=IDLE, other_nodes=MANY), []),
        ("what has drained it already asks nobody", DRAINED, SICK, []),
        ("what is over asks for the node", DRAINED, WELL, [AskNode()]),
        ("and is cleared", DRAINED, replace(WELL, node=OURS), [ApplyAct(CLEAR)]),
        ("a person's word over ours is not cleared", DRAINED, replace(WELL, node=ANNS), []),
        ("a moment after a drain the fleet is asked again", replace(DRAINED, recheck=50.0), SICK, [AskOtherNodes()]),
        ("what drains for the fleet is no node's own", replace(DRAINED, recheck=50.0), replace(SICK, other_nodes=MANY),
         []),
        ("a failure waits", replace(FRESH, due=51.0), SICK, []),
        ("too many changes wait", replace(FRESH, changes=(49.0,) * 6), replace(SICK, node=IDLE, other_nodes=ALONE), []),
        ("a user's problem is nobody's", FRESH, inputs(verdict(class_=Class.USER)), []),
    ],
)  # fmt: skip
def test_what_it_does_from_where_it_stands(
    what: str, memory: Memory, given: BrokerInputs, wanted: list[Action]
) -> None:
    _, actions = step(memory, given, NOW)
    assert [action for action in actions if not isinstance(action, Log)] == wanted, what


@pytest.mark.parametrize(
    ("what", "memory", "given", "wanted"),
    [
        (
            "a drain is remembered, and looked at again",
            FRESH, replace(SICK, node=IDLE, other_nodes=ALONE, changed=DRAIN),
            {"drained": True, "posted": REASON, "recheck": 80.0, "changes": (50.0,), "due": 0.0},
        ),
        ("a refused drain is tried again", FRESH, replace(SICK, node=IDLE, other_nodes=ALONE, changed=Failed("no")),
         {"drained": False, "posted": "", "due": 55.0, "failures": 1, "status_text": "no"}),
        ("later and later", replace(FRESH, failures=9), replace(SICK, node=Failed("no")),
         {"due": 350.0, "failures": 10}),
        ("an answer ends the failures", replace(FRESH, failures=9), replace(SICK, node=ANNS),
         {"due": 0.0, "failures": 0}),
        ("what many say is held back", FRESH, replace(SICK, node=IDLE, other_nodes=MANY),
         {"held": {"gpu_ecc@9f2c1ab": 1900.0}, "drained": False}),
        ("also afterwards, and then taken back at once", replace(DRAINED, recheck=50.0),
         replace(SICK, other_nodes=MANY), {"held": {"gpu_ecc@9f2c1ab": 1900.0}, "due": 50.0, "recheck": 0.0}),
        ("a fleet that cannot be asked leaves the drain", replace(DRAINED, recheck=50.0),
         replace(SICK, other_nodes=Failed("no")),
         {"held": {}, "due": 0.0, "recheck": 0.0, "drained": True}),
        ("each node has its own part of the spread", FRESH,
         replace(SICK, policy=replace(POLICY, guard_spread_s=1e6)), {"drained": False, "acted_on": frozenset()}),
    ],
)  # fmt: skip
def test_what_it_remembers(what: str, memory: Memory, given: BrokerInputs, wanted: dict[str, object]) -> None:
    after, _ = step(memory, given, NOW)
    assert {key: getattr(after, key) for key in wanted} == wanted, what


def test_an_incident_of_a_gpu_is_entered_once_and_counts() -> None:
    gpu = Gpu("GPU-aa", "165", "00000000:3B:00.0", "H100")
    sick = inputs(verdict(subject="0000:3b:00", evidence="/capsules/1"), gpus=(gpu,))
    same, (entered,) = step(FRESH, sick, NOW)
    assert same == FRESH
    assert isinstance(entered, Enter) and (entered.uuid, entered.serial, entered.most) == ("GPU-aa", "165", 3)
    assert entered.event["evidence"] == "/capsules/1" and entered.since == NOW.wall - 30 * 86400
    known = replace(sick, incidents={"gpu_ecc": 3}, node=IDLE, other_nodes=ALONE)
    _, actions = step(FRESH, known, NOW)
    assert actions[-1] == ApplyAct(Act("drain", "minivm: gpu_ecc[rma]@9f2c1ab 2 errors (incident 3 of GPU-aa)"))
    after, _ = step(FRESH, replace(known, changed=DRAIN), NOW)
    assert step(after, sick, NOW)[1] == (), "it stands already: no other incident"


def test_a_person_s_resume_holds_back_what_stood_and_a_forgotten_check_is_as_never_seen() -> None:
    after, _ = hold_resumed(DRAINED, NOW)
    assert not after.drained and not after.list_standing(NOW)
    assert after.list_standing(replace(NOW, wall=NOW.wall + 86401)), "for a day"
    gone, words = forget(after, ["gpu_ecc"])
    assert not gone.seen and not gone.held and gone.forgotten == {"gpu_ecc"} and words


# Invariants under any events: of a node, its controller, its fleet, and a person who makes arbitrary changes.

CHECKS = ("gpu_ecc", "xid", "load")


@dataclass
class World:
    """Slurm's state and the ledger, with the broker's memory."""

    memory: Memory = field(default_factory=Memory)
    node: BrokerNode = IDLE
    fleet: OtherNodes = ALONE
    down: bool = False
    wall: float = 1000.0
    steady: float = 50.0
    verdicts: dict[str, Verdict] = field(default_factory=dict)
    changes: list[float] = field(default_factory=list)

    def look(self) -> None:
        given = inputs(*self.verdicts.values(), gpus=(Gpu("GPU-aa", "1", "0000:3b:00.0", "H100"),))
        for _ in range(len(CHECKS) + 4):
            now = Now(self.wall, self.steady)
            after, actions = step(self.memory, given, now)
            assert (after, actions) == step(self.memory, given, now), "the same step has the same outcome"
            asks = [action for action in actions if not isinstance(action, Log)]
            if asks:
                assert after == self.memory, "whoever asks has decided nothing yet"
            self.memory = after
            if not asks:
                return
            for action in asks:
                given = self.perform(action, given)
            self.steady += 0.5
        raise AssertionError("it never stops asking")

    def perform(self, action: Action, given: BrokerInputs) -> BrokerInputs:
        if isinstance(action, Enter):
            return replace(given, incidents={**given.incidents, action.check: 1})
        if isinstance(action, AskNode):
            return replace(given, node=Failed("down") if self.down else self.node)
        if isinstance(action, AskOtherNodes):
            return replace(given, other_nodes=Failed("down") if self.down else self.fleet)
        assert isinstance(action, ApplyAct)
        if self.down:
            return replace(given, changed=Failed("down"))
        self.change(action.act)
        return replace(given, changed=action.act)

    def change(self, act: Act) -> None:
        if self.node.drained:
            assert self.node.is_own_drain, f"{act} over {self.node}: a person's drain"
        assert (act.kind == "drain") is not self.node.drained
        if act.kind == "clear":
            self.node = IDLE
        else:
            assert names(act.text), "what is posted names its checks, or nobody knows it for ours again"
            raisers = {item.check for item in self.verdicts.values() if item.class_ is not Class.USER}
            assert {name.split("@")[0] for name in names(act.text)} <= raisers
            self.node = BrokerNode(True, act.text)
        self.changes.append(self.steady)
        recent = [at for at in self.changes if at > self.steady - POLICY.rate_per_s]
        assert len(recent) <= POLICY.rate_actions


Event = tuple[str, Any]
SAYS = st.tuples(st.sampled_from(CHECKS), st.sampled_from(list(Result)), st.sampled_from(list(Class)), st.booleans())
EVENTS: st.SearchStrategy[Event] = st.one_of(
    st.tuples(st.just("says"), SAYS),
    st.tuples(st.just("node"), st.sampled_from([IDLE, ANNS, BrokerNode(True, "Prolog error")])),
    st.tuples(st.just("fleet"), st.sampled_from([ALONE, MANY])),
    st.tuples(st.just("down"), st.booleans()),
    st.tuples(st.just("later"), st.sampled_from([1.0, 60.0, 1000.0])),
    st.tuples(st.just("clock is set"), st.sampled_from([-3600.0, 3600.0])),
    st.tuples(st.just("forget"), st.sampled_from(CHECKS)),
)


def happens(world: World, event: Event) -> None:
    what, value = event
    if what == "says":
        check, result, class_, is_gpu = value
        # A check that a job's user can influence has the class USER only: in this test the third check.
        class_ = Class.USER if check == "load" else class_ if class_ is not Class.USER else Class.NODE
        made = verdict(result, check, class_=class_, subject="GPU-aa" if is_gpu else "host")
        world.verdicts[check] = replace(made, at=world.wall, expires=world.wall + 600)
    elif what == "later":
        world.wall, world.steady = world.wall + value, world.steady + value
    elif what == "clock is set":
        world.wall += value
    elif what == "forget":
        world.memory, _ = forget(world.memory, [value])
    else:
        setattr(world, what, value)


def lives(events: Iterable[Event]) -> World:
    world = World()
    for event in events:
        happens(world, event)
        world.wall, world.steady = world.wall + 1, world.steady + 1
        world.look()
    return world


@settings(max_examples=300, deadline=None)
@given(st.lists(EVENTS, max_size=30))
# The last pass finds the problem on most nodes of the fleet; the following pass makes the change that this requires.
@example([("says", ("gpu_ecc", Result.PROBLEM, Class.REBOOT, False)), ("fleet", MANY), ("later", 60.0)])
def test_whatever_happens_a_person_s_drain_stays_and_the_controller_is_spared(events: list[Event]) -> None:
    world = lives(events)
    world.look()
    before = world.node
    for _ in range(3):
        world.look()
    if world.memory.acted_on is not None and not world.memory.due and not world.memory.recheck:
        assert world.node == before, "where nothing changes, nothing is changed"


@settings(max_examples=100, deadline=None)
@given(st.lists(EVENTS.filter(lambda event: event[0] in {"says", "later", "down", "forget"}), max_size=20))
def test_a_problem_that_lasts_drains_in_the_end_whatever_was_before(events: list[Event]) -> None:
    world = lives([*events, ("down", False)])
    for _ in range(3):
        happens(world, ("later", 1000.0))
        happens(world, ("says", ("xid", Result.PROBLEM, Class.MANUAL, False)))
        world.look()
    assert f"xid@{COMMIT[:7]}" in names(world.node.reason)
