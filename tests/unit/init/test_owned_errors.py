"""Attribution of errors: a callback's error fails its service, the core's call is retried, and a bug stays visible."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from init.engine.machine import advance
from init.engine.states import EndPod, Phase, SpawnFailed, State
from init.lean import replace
from init.pid1.wait import IN, Poller, Scope
from init.plan.spec import parse_service
from tests.waiting import until


class World:
    def __init__(self) -> None:
        self.poller = Poller()
        self.said: list[str] = []
        self.poller.report_trouble = self.said.append
        self.read, self.write = os.pipe()
        os.write(self.write, b"x")

    def turn(self) -> bool:
        self.poller.wait(self.poller.now() + 0.01)
        return True


@pytest.fixture
def made() -> Iterator[World]:
    world = World()
    yield world
    os.close(world.read)
    os.close(world.write)


def test_a_call_of_the_core_is_made_again_and_not_at_full_speed(made: World) -> None:
    asked: list[float] = []

    def call(_: int) -> None:
        asked.append(made.poller.now())
        if len(asked) < 3:
            raise OSError(5, "Input/output error")
        os.read(made.read, 1)

    made.poller.add(made.read, IN, call)
    until(lambda: made.turn() and len(asked) == 3, "it was made until it went well")
    assert len(made.said) == 2 and made.said[0].endswith("call: Input/output error")
    assert all(later - before >= 0.09 for before, later in pairwise(asked))


def test_what_was_put_off_can_be_changed_and_removed_meanwhile(made: World) -> None:
    asked: list[int] = []

    def call(_: int) -> None:
        asked.append(1)
        raise MemoryError

    made.poller.add(made.read, IN, call)
    until(lambda: made.turn() and asked, "it was asked")
    made.poller.change(made.read, 0)
    until(lambda: made.turn() and not made.poller._put_off, "it is looked at again")
    for _ in range(5):
        made.turn()
    assert len(asked) == 1, "nothing was to be looked for"
    made.poller.remove(made.read)
    made.poller.add(made.read, IN, lambda _: asked.append(os.read(made.read, 1)[0]))
    until(lambda: made.turn() and len(asked) == 2, "the number is free for another")


def test_a_timer_of_the_core_that_fails_is_due_again(made: World) -> None:
    asked: list[int] = []

    def due() -> None:
        asked.append(1)
        if len(asked) == 1:
            raise ImportError("no module")

    made.poller.after(0, due)
    until(lambda: made.turn() and len(asked) == 2, "made again")
    assert "no module" in made.said[0]


def test_an_owners_callback_fails_its_owner_alone(made: World) -> None:
    heard: list[str] = []
    scope = Scope(made.poller, heard.append)

    def call(_: int) -> None:
        os.read(made.read, 1)
        raise RecursionError

    scope.add(made.read, IN, call)
    scope.after(0, Path("/no/such/path").unlink)
    until(lambda: made.turn() and len(heard) == 2, "both are heard of")
    assert sorted(heard) == ["/no/such/path: No such file or directory", "nested too deeply"]
    assert made.said == []


@pytest.mark.parametrize("bug", [KeyError, TypeError, AttributeError, AssertionError, RuntimeError])
def test_a_bug_is_nobodys(made: World, bug: type[Exception]) -> None:
    def call(*_: object) -> None:
        raise bug

    with pytest.raises(bug):
        Scope(made.poller, made.said.append).attempt(call)
    made.poller.add(made.read, IN, call)
    with pytest.raises(bug):
        made.turn()
    assert made.said == []


RESTART = {"limit": 2, "delay": 1, "max-delay": 8, "jitter": 0, "exhausted": "end-pod"}


def test_what_the_machine_lacks_uses_up_no_restart() -> None:
    """A lack of machine resources does not count as a restart.

    The delay grows however often it happens, and PID 1 never gives up; the service's own failures still count.
    """
    spec = parse_service("a", {"command": ["/x"], "restart": RESTART}, "t")
    state, now = State(), 0.0
    for _ in range(20):
        state, actions = advance(spec, replace(state, spawning=True), SpawnFailed("no room", scarce=True), now)
        assert state.phase in (Phase.WAITING, Phase.BACKOFF) and str(state.last_failure) == "no room"
        assert not any(isinstance(action, EndPod) for action in actions)
        if state.deadline is not None:
            assert state.deadline <= now + 8
        now += 8
    for count in range(3):
        state, actions = advance(spec, replace(state, spawning=True), SpawnFailed("no such file"), now)
        assert any(isinstance(action, EndPod) for action in actions) is (count == 2)


def test_a_periodic_run_that_finds_no_room_is_degraded_and_tried_again() -> None:
    spec = parse_service("a", {"kind": "periodic", "command": ["/x"], "every": "1h", "restart": {"delay": 2}}, "t")
    ready = State(phase=Phase.READY, ready_at=0.0, spawning=True)
    state, actions = advance(spec, ready, SpawnFailed("no room", scarce=True), 100.0)
    assert (state.phase, str(state.last_failure), state.deadline, actions) == (Phase.READY, "no room", 102.0, [])
