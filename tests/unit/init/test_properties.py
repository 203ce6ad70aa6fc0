"""Random service graphs and random orders of events.

A service never starts before its needs are ready, never stops before the services that need it, and the pod always
ends.
"""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from init.engine.engine import Engine
from init.engine.machine import Trace
from init.engine.states import (
    MAIN,
    STOPPER,
    Exited,
    Kill,
    Notified,
    Phase,
    PodPhase,
    ProbeFailed,
    ProbePassed,
    Spawn,
    Spawned,
    SpawnFailed,
    is_idle,
    is_satisfied,
)
from init.plan import service
from init.plan.compile import compile_plan, plan_from_json, plan_to_json
from init.plan.service import Kind, Probe, Service
from init.plan.spec import parse_drain, parse_service
from init.view import reasons
from init.view.reasons import cause_text
from init.view.status import to_mapping

KINDS = st.sampled_from(["longrun", "longrun", "longrun", "oneshot", "periodic", "gate"])

LATE = {"tcp": "localhost:1", "within": 3, "late": "wait"}


@st.composite
def services(draw: st.DrawFn) -> list[Service]:
    """Draw an acyclic set of services, in which each may wait for earlier ones."""
    found = []
    for number in range(draw(st.integers(1, 7))):
        before = [f"s{other}" for other in range(number)]
        kind = draw(KINDS)
        mapping: dict[str, object] = {
            "kind": kind,
            "needs": draw(st.lists(st.sampled_from(before), unique=True, max_size=3)) if before else [],
            "after": draw(st.lists(st.sampled_from(before), unique=True, max_size=2)) if before else [],
            "required": draw(st.booleans()),
            "stop": {"grace": draw(st.sampled_from([0.5, 2, 10, 40]))},
        }
        restart: dict[str, object] = {"limit": draw(st.sampled_from([0, 0, 1, 3]))}
        restart["exhausted"] = draw(st.sampled_from(["degrade", "end-pod"]))
        if kind == "gate":
            mapping["ready"] = {"tcp": "localhost:1", "within": draw(st.sampled_from([0, 5]))}
        else:
            mapping["command"] = ["/bin/x"]
            if draw(st.booleans()):
                mapping["prepare"] = [["/bin/p"]]
            if kind == "longrun":
                mapping["ready"] = draw(
                    st.sampled_from(["none", "notify", {"tcp": "localhost:1"}, {"file": "/x", "within": 3}, LATE])
                )
                restart["when"] = draw(st.sampled_from(["always", "failure", "never"]))
                if draw(st.booleans()) and mapping["ready"] == "notify":
                    mapping["watchdog"] = 4
                if draw(st.booleans()):
                    mapping["stop"] = {"grace": 3, "command": ["/bin/stop"]}
            if kind == "periodic":
                mapping["every"] = 7
            if kind == "oneshot":
                mapping["timeout"] = draw(st.sampled_from([0, 6]))
        mapping["restart"] = restart
        found.append(parse_service(f"s{number}", mapping, "test"))
    return found


class World:
    """Processes and time as the engine sees them, with every guarantee checked where it could break."""

    def __init__(self, found: list[Service], draw: st.DataObject, *, drain: bool) -> None:
        errand = parse_drain({"command": ["/bin/drain"], "budget": 8}, "test") if drain else None
        self.draw = draw
        self.now = 100.0
        self.engine = Engine(compile_plan("test", found, errand), 20.0, lambda: 0.5, Trace())
        self.alive: dict[int, str] = {}
        self.deaf: set[int] = set()  # pids that ignore all signals but KILL
        self.next_pid = 10
        self.words = ""  # text of the services and of their probes
        self.by_hand: set[str] = set()  # stopped alone before the pod: with their own grace

    def perform(self, todo: list[tuple[str, object]]) -> None:
        queue = list(todo)
        while queue:
            name, action = queue.pop(0)
            if isinstance(action, Spawn) and not self.engine.still_wanted(name, action.step):
                queue += self.engine.handle(name, SpawnFailed("no longer wanted"), self.now)
            elif isinstance(action, Spawn):
                self.check_start(name, action)
                self.next_pid += 1
                self.alive[self.next_pid] = name
                if self.draw.draw(st.integers(0, 4)) == 0:
                    self.deaf.add(self.next_pid)
                queue += self.engine.handle(name, Spawned(self.next_pid, action.step), self.now)
            elif isinstance(action, Kill):
                assert action.pid in self.alive, f"{name}: a signal to pid {action.pid}, which is gone"
                assert self.alive[action.pid] == name
                self.check_stop(name, action)
                if action.signal == "KILL" or action.pid not in self.deaf:
                    queue += self.end(action.pid, 0 if action.signal != "KILL" else -9)
        if self.engine.phase is not PodPhase.STOPPING:
            self.by_hand = {name for name, state in self.engine.states.items() if state.phase is Phase.STOPPING}

    def end(self, pid: int, code: int) -> list[tuple[str, object]]:
        name = self.alive.pop(pid)
        event = Exited(pid, max(code, 0), max(-code, 0), self.words)
        return list(self.engine.handle(name, event, self.now))

    def check_start(self, name: str, action: Spawn) -> None:
        spec = self.engine.specs.get(name)
        if spec is None or action.step == STOPPER:
            return
        assert self.engine.phase not in (PodPhase.STOPPING, PodPhase.STOPPED), f"{name} started while stopping"
        first = action.step == 0 or (action.step == MAIN and not spec.prepare)
        if first and spec.kind is not Kind.PERIODIC:
            for need in spec.needs:
                if need in self.engine.states:
                    assert is_satisfied(self.engine.states[need]), f"{name} started before {need} is ready"
        mains = [pid for pid, owner in self.alive.items() if owner == name and pid == self.engine.states[name].pid]
        assert not mains, f"{name} started twice"

    def check_stop(self, name: str, action: Kill) -> None:
        overran = self.engine.ending.deadline is not None and self.engine.ending.killed_at is not None
        if self.engine.phase is not PodPhase.STOPPING or overran or name not in self.engine.specs:
            return
        state = self.engine.states[name]
        if state.after_stop is None or state.after_stop.value == "fail" or name in self.by_hand:
            return
        for other in service.stop_edges(self.engine.specs.values())[name]:
            assert is_idle(self.engine.states[other]), f"{name} stopped before {other}, which needs it"

    def something(self) -> None:
        """Perform one random event."""
        names = sorted(self.engine.specs)
        name = self.draw.draw(st.sampled_from(names))
        spec, state = self.engine.specs[name], self.engine.states[name]
        pids = sorted(pid for pid, owner in self.alive.items() if owner in self.engine.states)
        choice = self.draw.draw(st.integers(0, 9))
        if choice <= 2 and state.phase is Phase.STARTING and spec.kind in (Kind.LONGRUN, Kind.GATE):
            event = Notified(ready=True) if spec.ready.probe is Probe.NOTIFY else ProbePassed()
            self.perform(list(self.engine.handle(name, event, self.now)))
        elif choice == 3 and state.phase is Phase.STARTING:
            self.perform(list(self.engine.handle(name, ProbeFailed("no", quoted=self.words), self.now)))
        elif choice <= 5 and pids:
            pid = self.draw.draw(st.sampled_from(pids))
            self.perform(self.end(pid, self.draw.draw(st.sampled_from([0, 0, 1, -9]))))
        elif choice == 6 and state.pid and state.phase is Phase.READY and spec.kind is Kind.LONGRUN:
            self.next_pid += 1  # a hand-over: the old process may end now or never
            self.alive[self.next_pid] = name
            self.perform(list(self.engine.handle(name, Notified(ready=True, main_pid=self.next_pid), self.now)))
        elif choice == 7 and self.engine.phase in (PodPhase.BOOT, PodPhase.RUNNING):
            ask = self.draw.draw(st.sampled_from([self.engine.up, self.engine.down, self.engine.again]))
            self.perform(list(ask(name, self.now)))
        else:
            self.pass_time(self.draw.draw(st.sampled_from([0.1, 1.0, 5.0])))

    def pass_time(self, most: float) -> None:
        wake = self.engine.next_wake()
        self.now = max(self.now, min(wake, self.now + most)) if wake is not None else self.now + most
        self.perform(list(self.engine.tick(self.now)))


@settings(max_examples=150, deadline=None)
@given(services(), st.data(), st.booleans(), st.integers(0, 60))
def test_order_holds_and_it_always_ends(found: list[Service], data: st.DataObject, drain: bool, length: int) -> None:
    world = World(found, data, drain=drain)
    world.perform(list(world.engine.begin(world.now)))
    for _ in range(length):
        if world.engine.phase in (PodPhase.STOPPING, PodPhase.STOPPED):
            break
        world.something()
    began = world.now
    if world.engine.phase in (PodPhase.BOOT, PodPhase.RUNNING):
        world.perform(list(world.engine.end(world.now)))
    for _ in range(500):
        if world.engine.phase is PodPhase.STOPPED:
            break
        if data.draw(st.integers(0, 3)) == 0:
            world.something()
        else:
            world.pass_time(5.0)
    assert world.engine.phase is PodPhase.STOPPED, "the end never came"
    assert world.now - began <= 20.0 + 1.0, "the deadline was passed"
    assert not world.engine.impossible, world.engine.trace.happenings()


SECRET = "\u2603"  # part of all text of services, and of no other text
SAYINGS = st.sampled_from(
    ["{}", "db; gave up after {}", "{}; gave up after 5 failures within 60 s", "exited 1: {}", "x\t{}", "({})",
     "no retry can mend exit code {}", "{}: No space left on device", "killed by KILL: {}", "status: {}"]
)  # fmt: skip


@settings(max_examples=100, deadline=None)
@given(services(), st.data(), SAYINGS, st.text(max_size=9), st.booleans(), st.integers(0, 60))
def test_nothing_that_a_service_says_is_told_to_everybody(
    found: list[Service], data: st.DataObject, saying: str, secret: str, drain: bool, length: int
) -> None:
    """Text of a service is never shown to unprivileged readers.

    This holds for any text, also init's own phrases, and for any place: a cause, a condition, the last log line.
    """
    world = World(found, data, drain=drain)
    world.words = saying.format(SECRET + secret)
    world.perform(list(world.engine.begin(world.now)))
    if drain:
        world.perform(list(world.engine.drain(world.now)))
    for _ in range(length):
        if world.engine.phase is PodPhase.STOPPED:
            break
        name = data.draw(st.sampled_from(sorted(world.engine.states)))
        world.perform(list(world.engine.handle(name, Notified(status=world.words), world.now)))
        world.something()
        shown = to_mapping(reasons.snapshot(world.engine, "pod", world.now, quoting=False))
        assert SECRET not in str(shown)
        assert SECRET not in cause_text(world.engine.ending.why, quoting=False)


@settings(max_examples=60, deadline=None)
@given(services(), st.data())
def test_with_services_that_behave_everything_becomes_ready(found: list[Service], data: st.DataObject) -> None:
    """Every graph becomes ready once each service has done its part: nothing waits for an event that cannot come."""
    world = World(found, data, drain=False)
    world.perform(list(world.engine.begin(world.now)))
    for _ in range(200):
        if world.engine.phase is PodPhase.RUNNING:
            break
        for name, state in list(world.engine.states.items()):
            spec = world.engine.specs[name]
            running = state.pid and state.phase is Phase.STARTING
            if state.phase is Phase.PREPARING or (running and spec.kind is Kind.ONESHOT):
                world.perform(world.end(state.pid, 0))
            elif state.phase is Phase.STARTING:
                event = Notified(ready=True) if spec.ready.probe is Probe.NOTIFY else ProbePassed()
                world.perform(list(world.engine.handle(name, event, world.now)))
    assert world.engine.all_ready()
    assert not world.engine.impossible, world.engine.trace.happenings()


@settings(max_examples=60, deadline=None)
@given(services())
def test_a_plan_survives_the_way_through_json(found: list[Service]) -> None:
    plan = compile_plan("test", found, parse_drain({"command": ["/d"], "resume": ["/r"]}, "test"))
    text = plan_to_json(plan)
    again = plan_from_json(text, "test")
    assert [service.name for service in again.services] == [service.name for service in plan.services]
    assert again.services == plan.services
    assert plan_to_json(again) == text


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.sampled_from("abcdef"), st.frozensets(st.sampled_from("abcdef"), max_size=3), max_size=6))
def test_a_cycle_is_found_exactly_when_there_is_no_order(edges: dict[str, frozenset[str]]) -> None:
    found = service.cycle(edges)
    if found:
        assert found[0] == found[-1]
        for name, other in pairwise(found):
            assert other in edges[name]
    else:
        placed: set[str] = set()
        for wave in service.waves(edges):
            for name in wave:
                assert edges[name] & set(edges) <= placed
            placed |= set(wave)
        assert placed == set(edges)
