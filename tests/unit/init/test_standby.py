"""A service that stands by, and those bound to it: ready without them, and none of them outlives its turn."""

from __future__ import annotations

from collections.abc import Sequence

from init.engine import order
from init.engine.engine import Engine
from init.engine.machine import Trace, advance
from init.engine.states import (
    LOST_WAIT,
    MAIN,
    AfterStop,
    BindingLost,
    Exited,
    Kill,
    Notified,
    Phase,
    Spawn,
    Spawned,
    State,
    StopProbe,
    Tick,
)
from init.plan.compile import compile_plan, plan_from_json, plan_to_json, select
from init.plan.spec import parse_service
from init.view import reasons
from tests.support.plans import plan_of

OURS = ["/opt/minivm/bin/python3", "-I", "-m", "init.helpers.lease"]
SERVICES: dict[str, dict[str, object]] = {
    "pod": {"kind": "oneshot"},
    "lease": {"command": OURS, "ready": "notify", "watchdog": "4s", "needs": ["pod"]},
    "config": {"kind": "oneshot", "bound-to": ["lease"]},
    "daemon": {"ready": "notify", "needs": ["config"], "bound-to": ["lease"]},
    "rest": {"needs": ["daemon"]},
    "check": {"kind": "periodic", "every": "9s", "required": True, "bound-to": ["lease"]},
    "keys": {"kind": "periodic", "every": "9s", "after": ["daemon"]},
}


class Pod:
    """An engine whose processes are numbers."""

    def __init__(self) -> None:
        found = [parse_service(name, {"command": ["/x"]} | item, "t") for name, item in SERVICES.items()]
        self.engine = Engine(compile_plan("controller", found), 30, lambda: 0.5, Trace())
        self.pids: dict[str, int] = {}
        self.killed: list[tuple[str, str]] = []
        self.take(self.engine.begin(0.0), 0.0)

    def take(self, todo: Sequence[tuple[str, object]], now: float) -> None:
        for name, action in todo:
            if isinstance(action, Spawn):
                self.pids[name] = len(self.pids) + 100 * (1 + self.engine.states[name].starts)
                self.take(self.engine.handle(name, Spawned(self.pids[name], MAIN), now), now)
            if isinstance(action, Kill):
                self.killed.append((name, action.signal))

    def tell(self, name: str, event: Notified, now: float) -> None:
        self.take(self.engine.handle(name, event, now), now)

    def ends(self, name: str, now: float, code: int = 0, signal: int = 0) -> None:
        self.take(self.engine.handle(name, Exited(self.pids[name], code, signal), now), now)

    def phases(self) -> dict[str, Phase]:
        return {name: self.engine.states[name].phase for name in SERVICES}


def standing_by() -> Pod:
    pod = Pod()
    pod.ends("pod", 0.1)
    pod.tell("lease", Notified(standby=True, status="slurm-controller-1 has term 4"), 0.2)
    return pod


def active() -> Pod:
    pod = standing_by()
    pod.tell("lease", Notified(ready=True, status="active, term 5"), 1.0)
    pod.ends("config", 1.1)
    pod.tell("daemon", Notified(ready=True), 1.2)
    pod.ends("check", 1.3)
    return pod


def test_a_pod_that_stands_by_is_ready_and_says_so() -> None:
    pod = standing_by()
    view = reasons.snapshot(pod.engine, "p", 0.3, quoting=False)
    assert view.ready and not view.degraded and view.turn == "standby: slurm-controller-1 has term 4"
    assert pod.phases()["daemon"] is Phase.WAITING and "config" not in pod.pids
    # What comes after the daemon does not wait for a turn that may never come.
    assert "keys" in pod.pids


def test_before_it_stands_by_the_pod_is_not_ready() -> None:
    pod = Pod()
    pod.ends("pod", 0.1)
    view = reasons.snapshot(pod.engine, "p", 0.3)
    assert not view.ready and view.turn == ""


def test_the_active_pod_waits_for_everything() -> None:
    pod = standing_by()
    pod.tell("lease", Notified(ready=True, status="active, term 5"), 1.0)
    view = reasons.snapshot(pod.engine, "p", 1.05, quoting=False)
    assert not view.ready and view.turn == "active, term 5"
    assert reasons.snapshot(active().engine, "p", 2.0).ready


def test_a_lost_turn_kills_what_is_bound_to_it_and_it_starts_again_with_the_next_one() -> None:
    pod = active()
    pod.tell("lease", Notified(standby=True), 5.0)
    assert pod.killed == [("daemon", "KILL")]
    phases = pod.phases()
    assert phases["config"] is Phase.WAITING and phases["check"] is Phase.WAITING and phases["rest"] is Phase.READY
    pod.ends("daemon", 5.1, -1, 9)
    assert pod.phases()["daemon"] is Phase.WAITING and reasons.snapshot(pod.engine, "p", 5.2).ready
    before = dict(pod.pids)
    pod.tell("lease", Notified(ready=True), 9.0)
    assert pod.pids["config"] != before["config"]


def test_the_end_of_the_lease_s_process_is_a_lost_turn() -> None:
    pod = active()
    pod.ends("lease", 5.0, 1)
    assert pod.killed == [("daemon", "KILL")]


def test_a_lease_that_hangs_is_a_lost_turn() -> None:
    pod = active()
    pod.take(pod.engine.tick(4.9), 4.9)
    assert pod.killed == []
    pod.tell("lease", Notified(watchdog=True), 4.9)
    pod.take(pod.engine.tick(8.8), 8.8)
    assert pod.killed == []
    pod.take(pod.engine.tick(8.9), 8.9)
    assert sorted(pod.killed) == [("daemon", "KILL"), ("lease", "ABRT")]


def test_a_person_s_stop_outlasts_a_lost_turn() -> None:
    pod = active()
    pod.take(pod.engine.down("check", 2.0), 2.0)
    pod.tell("lease", Notified(standby=True), 5.0)
    assert pod.phases()["check"] is Phase.STOPPED


def test_a_process_that_is_being_started_is_killed_too() -> None:
    spec = parse_service("s", {"command": ["/x"], "bound-to": ["lease"]}, "t")
    state, actions = advance(spec, State(phase=Phase.STARTING, spawning=True), BindingLost(), 1.0)
    assert state.phase is Phase.STOPPING and actions == [StopProbe()]
    state, actions = advance(spec, state, Spawned(7, MAIN), 1.1)
    assert actions == [Kill(7, "TERM")]
    state, actions = advance(spec, state, Tick(), 1.0 + LOST_WAIT)
    assert actions == [Kill(7, "KILL")]
    state, _ = advance(spec, state, Exited(7, -1, 9), 2.5)
    assert state.phase is Phase.WAITING and state.after_stop is None


def test_a_handover_that_is_under_way_ends_at_once() -> None:
    spec = parse_service("s", {"command": ["/x"], "ready": "notify", "bound-to": ["lease"]}, "t")
    state, _ = advance(spec, State(phase=Phase.HANDOVER, ready_at=0.0, deadline=3.0), BindingLost(), 1.0)
    assert state.after_stop is AfterStop.RESTART and state.deadline == 1.0
    state, _ = advance(spec, state, Tick(), 1.0)
    assert state.phase is Phase.WAITING


def test_a_failed_service_gets_another_chance_with_the_next_turn() -> None:
    spec = parse_service("s", {"command": ["/x"], "bound-to": ["lease"]}, "t")
    state, _ = advance(spec, State(phase=Phase.FAILED, failures_in_row=3, recent_failures=(0.5,)), BindingLost(), 1.0)
    assert state.phase is Phase.WAITING and state.failures_in_row == 0 and state.recent_failures == ()


def test_a_controller_alone_has_no_lease_and_waits_for_none() -> None:
    plan = plan_of("controller")
    alone = select(plan, {}, lambda _: True)
    assert alone.service("lease") is None
    slurmctld = alone.service("slurmctld")
    assert slurmctld is not None and slurmctld.bound_to == ()
    one_of_two = select(plan, {"MINIVM_CONTROLLERS": "2"}, lambda _: True)
    slurmctld = one_of_two.service("slurmctld")
    assert slurmctld is not None and slurmctld.bound_to == ("lease",)
    assert plan_from_json(plan_to_json(one_of_two), "t") == one_of_two


def test_everything_that_speaks_for_the_cluster_is_bound_to_the_lease() -> None:
    plan = select(plan_of("controller"), {"MINIVM_CONTROLLERS": "2", "MINIVM_SLURMRESTD": "x:1"}, lambda _: True)
    states = {item.name: State() for item in plan.services} | {"lease": State(phase=Phase.STARTING, standby=True)}
    held = order.on_standby({item.name: item for item in plan.services}, states)
    assert {"slurmctld", "slurmdbd", "slurmrestd", "slurm-config", "serving", "node-records"} <= held
    assert not held & {"pod", "munged", "sssd", "keys", "room", "gitsync", "clockwatch", "supervisor", "conditions"}


def test_a_gentle_restart_stops_what_is_bound_first_and_starts_nothing_before_the_next_turn() -> None:
    pod = active()
    before = dict(pod.pids)
    pod.take(pod.engine.again("lease", 5.0, bound=True), 5.0)
    assert pod.killed == [("daemon", "TERM")]
    assert pod.phases()["check"] is Phase.WAITING and pod.phases()["lease"] is Phase.READY
    pod.tell("lease", Notified(watchdog=True), 6.0)
    pod.ends("daemon", 6.1)
    assert pod.killed == [("daemon", "TERM"), ("lease", "TERM")] and pod.phases()["config"] is Phase.WAITING
    assert pod.pids == before
    pod.ends("lease", 6.2)
    assert pod.pids["lease"] != before["lease"] and pod.pids["daemon"] == before["daemon"]
    pod.tell("lease", Notified(standby=True), 6.3)
    assert reasons.snapshot(pod.engine, "p", 6.4).ready
    pod.tell("lease", Notified(ready=True), 9.0)
    assert pod.pids["config"] != before["config"] and pod.killed == [("daemon", "TERM"), ("lease", "TERM")]


def test_a_lease_that_hangs_during_a_gentle_restart_is_a_lost_turn() -> None:
    pod = active()
    pod.take(pod.engine.again("lease", 2.0, bound=True), 2.0)
    pod.take(pod.engine.tick(4.9), 4.9)
    assert pod.killed == [("daemon", "TERM")]
    pod.take(pod.engine.tick(5.0), 5.0)
    assert ("daemon", "KILL") in pod.killed and ("lease", "ABRT") in pod.killed
    assert pod.killed.count(("daemon", "KILL")) == 1


def test_a_gentle_restart_leaves_what_a_person_stopped() -> None:
    pod = active()
    pod.take(pod.engine.down("check", 2.0), 2.0)
    pod.take(pod.engine.again("lease", 5.0, bound=True), 5.0)
    assert pod.phases()["check"] is Phase.STOPPED
