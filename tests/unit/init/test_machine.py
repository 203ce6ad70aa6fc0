"""State machine of one service, event by event: its next state and its actions."""

from __future__ import annotations

from typing import Any

import pytest

from init.engine.machine import advance
from init.engine.order import has_had_its_turn
from init.engine.states import (
    MAIN,
    STOPPER,
    AfterStop,
    EndPod,
    Exited,
    ImpossibleEvent,
    Kill,
    NeedsMet,
    Notified,
    Phase,
    ProbeFailed,
    ProbePassed,
    ShortenGrace,
    Spawn,
    Spawned,
    SpawnFailed,
    StartProbe,
    StartRequested,
    State,
    StopProbe,
    StopRequested,
    Tick,
    is_satisfied,
)
from init.lean import replace
from init.plan.service import Service
from init.plan.spec import parse_service


def service(**mapping: Any) -> Service:
    kind = mapping.get("kind", "longrun")
    return parse_service("s", ({} if kind == "gate" else {"command": ["/bin/x"]}) | mapping, "test")


def live(spec: Service, *events: tuple[float, Any], state: State | None = None) -> tuple[State, list[Any]]:
    """Return the state after the timed events, and the actions of the last event."""
    state = state or State()
    actions: list[Any] = []
    for now, event in events:
        state, actions = advance(spec, state, event, now)
    return state, list(actions)


NOTIFY = service(ready="notify")
READY = ((0.0, NeedsMet()), (0.0, Spawned(7, MAIN)), (1.0, Notified(ready=True)))


def test_started_is_not_ready() -> None:
    state, _ = live(NOTIFY, *READY[:2])
    assert state.phase is Phase.STARTING and not is_satisfied(state)
    assert is_satisfied(live(NOTIFY, *READY)[0])


def test_without_a_probe_started_is_ready_but_after_a_failure_it_must_stay() -> None:
    plain = service()
    state, _ = live(plain, (0, NeedsMet()), (0, Spawned(7, MAIN)))
    assert state.phase is Phase.READY
    state, _ = live(plain, (1, Exited(7, 1)), (1, NeedsMet()), (1, Spawned(8, MAIN)), state=state)
    assert state.phase is Phase.STARTING
    assert live(plain, (1.9, Tick()), state=state)[0].phase is Phase.STARTING
    assert live(plain, (2.0, Tick()), state=state)[0].phase is Phase.READY


def test_first_restart_is_immediate_then_it_doubles_up_to_the_most() -> None:
    spec = service(ready="notify", restart={"delay": 1, "max-delay": 5, "jitter": 0})
    state, now, waits = State(), 0.0, []
    for number in range(6):
        state, _ = live(
            spec, (now, NeedsMet()), (now, Spawned(10 + number, MAIN)), (now, Exited(10 + number, 1)), state=state
        )
        if state.phase is Phase.WAITING:
            waits.append(0.0)
            continue
        assert state.phase is Phase.BACKOFF and state.deadline is not None
        waits.append(state.deadline - now)
        now = state.deadline
        state, _ = live(spec, (now, Tick()), state=state)
    assert waits == [0, 1, 2, 4, 5, 5]


def test_jitter_spreads_the_delay_both_ways() -> None:
    spec = service(ready="notify", restart={"delay": 10, "max-delay": 10, "jitter": 0.5})
    base, _ = live(
        spec, (0, NeedsMet()), (0, Spawned(1, MAIN)), (0, Exited(1, 1)), (0, NeedsMet()), (0, Spawned(2, MAIN))
    )
    assert advance(spec, base, Exited(2, 1), 0, jitter=0.0)[0].deadline == 5
    assert advance(spec, base, Exited(2, 1), 0, jitter=0.999)[0].deadline == pytest.approx(15, abs=0.1)


def test_a_long_good_life_earns_an_immediate_restart_again() -> None:
    spec = service(ready="notify", restart={"window": 60})
    state, _ = live(spec, *READY, (2, Exited(7, 1)), (2, NeedsMet()), (2, Spawned(8, MAIN)), (3, Notified(ready=True)))
    assert live(spec, (10, Exited(8, 1)), state=state)[0].phase is Phase.BACKOFF
    assert live(spec, (100, Exited(8, 1)), state=state)[0].phase is Phase.WAITING


@pytest.mark.parametrize(
    ("restart", "exit_", "phase"),
    [
        ({}, Exited(7, 0), Phase.WAITING),
        ({}, Exited(7, 3), Phase.WAITING),
        ({"when": "failure"}, Exited(7, 0), Phase.DONE),
        ({"when": "failure"}, Exited(7, 0, signal=9), Phase.WAITING),
        ({"when": "never"}, Exited(7, 0), Phase.DONE),
        ({"when": "never"}, Exited(7, 1), Phase.FAILED),
        ({"fatal-codes": [3]}, Exited(7, 3), Phase.FAILED),
        ({"fatal-codes": [3]}, Exited(7, 4), Phase.WAITING),
        ({"limit": 1}, Exited(7, 4), Phase.WAITING),
    ],
)
def test_what_an_exit_leads_to(restart: dict[str, object], exit_: Exited, phase: Phase) -> None:
    assert live(service(ready="notify", restart=restart), *READY, (2, exit_))[0].phase is phase


def test_exhausted_counts_failures_within_the_window_only() -> None:
    spec = service(restart={"limit": 1, "window": 10, "exhausted": "end-pod"})
    first = ((0, NeedsMet()), (0, Spawned(1, MAIN)), (0, Exited(1, 1)))
    state, _ = live(spec, *first, (11, NeedsMet()), (11, Spawned(2, MAIN)), (11, Exited(2, 1)))
    assert state.phase is Phase.BACKOFF
    state, actions = live(
        spec, *first, (9, NeedsMet()), (9, Spawned(2, MAIN)), (9, Exited(2, 1, last_line="no licence"))
    )
    assert state.phase is Phase.FAILED
    assert str(state.last_failure) == "exited 1: no licence; gave up after 2 failures within 10 s"
    assert [action for action in actions if isinstance(action, EndPod)]
    assert live(spec, (20, StartRequested()), state=state)[0].phase is Phase.WAITING, (
        "asked by a person, it tries again"
    )


def test_prepare_steps_run_in_order_and_a_failure_is_a_failed_start() -> None:
    spec = service(prepare=[["/p0"], ["/p1"]])
    state, actions = live(spec, (0, NeedsMet()))
    assert (state.phase, actions) == (Phase.PREPARING, [Spawn(0)])
    state, actions = live(spec, (0, Spawned(5, 0)), (0, Exited(5, 0)), state=state)
    assert actions == [Spawn(1)]
    bad, _ = live(spec, (0, Spawned(6, 1)), (0, Exited(6, 2, last_line="no disk")), state=state)
    assert str(bad.last_failure) == "/p1 (prepare) exited 2: no disk"
    _, actions = live(spec, (0, Spawned(6, 1)), (0, Exited(6, 0)), state=state)
    assert actions == [Spawn(MAIN)]


def test_a_hand_over_keeps_it_ready_and_the_old_exit_is_no_death() -> None:
    state, _ = live(NOTIFY, *READY, (2, Notified(reloading=True)))
    assert state.reloading and is_satisfied(state)
    state, _ = live(NOTIFY, (3, Notified(ready=True, main_pid=8)), (4, Exited(7, 0)), state=state)
    assert (state.pid, state.phase, state.failure_count, state.reloading) == (8, Phase.READY, 0, False)


def test_the_other_order_waits_for_the_successor_to_speak() -> None:
    gone, _ = live(NOTIFY, *READY, (2, Exited(7, 0, heirs=(8,))))
    assert gone.phase is Phase.HANDOVER and is_satisfied(gone)
    back, _ = live(NOTIFY, (2.5, Notified(ready=True, main_pid=8)), state=gone)
    assert (back.pid, back.phase, back.failure_count) == (8, Phase.READY, 0)
    never, _ = live(NOTIFY, (4, Tick()), state=gone)
    assert never.failure_count == 1 and "none of the processes it left took over" in str(never.last_failure)
    stopped, actions = live(NOTIFY, (2.1, StopRequested(AfterStop.STOP, 5)), (2.5, Notified(main_pid=8)), state=gone)
    assert stopped.phase is Phase.STOPPING and actions == [Kill(8, "TERM")]


def test_an_exit_that_is_not_well_hands_over_to_nobody() -> None:
    assert live(NOTIFY, *READY, (2, Exited(7, 1, heirs=(8,))))[0].phase is Phase.WAITING


def test_stopping_signals_then_kills_and_hurry_only_shortens() -> None:
    state, actions = live(NOTIFY, *READY, (2, StopRequested(AfterStop.STOP, 10)))
    assert actions == [StopProbe(), Kill(7, "TERM")] and state.deadline == 12
    assert live(NOTIFY, (3, ShortenGrace(1)), state=state)[0].deadline == 4
    assert live(NOTIFY, (11.5, ShortenGrace(1)), state=state)[0].deadline == 12
    assert live(NOTIFY, (12, Tick()), state=state)[1] == [Kill(7, "KILL")]
    assert live(NOTIFY, (3, Exited(7, 0)), state=state)[0].phase is Phase.STOPPED


def test_a_stop_command_replaces_the_signal_unless_it_fails() -> None:
    spec = service(ready="notify", stop={"command": ["/bin/stop"], "signal": "INT"})
    state, actions = live(spec, *READY, (2, StopRequested(AfterStop.STOP, 10)))
    assert actions == [StopProbe(), Spawn(STOPPER)]
    state, _ = live(spec, (2, Spawned(9, STOPPER)), state=state)
    assert live(spec, (3, Exited(9, 1)), state=state)[1] == [Kill(7, "INT")]
    first, _ = live(spec, (3, Exited(7, 0)), state=state)
    assert first.phase is Phase.STOPPING, "its stop command still runs"
    assert live(spec, (4, Exited(9, 0)), state=first)[0].phase is Phase.STOPPED


def test_a_stop_between_the_decision_and_the_fork() -> None:
    state, _ = live(NOTIFY, (0, NeedsMet()), (0, StopRequested(AfterStop.STOP, 5)))
    assert state.phase is Phase.STOPPING
    assert live(NOTIFY, (0, Spawned(7, MAIN)), state=state)[1] == [Kill(7, "TERM")]
    assert live(NOTIFY, (0, SpawnFailed("no")), state=state)[0].phase is Phase.STOPPED


def test_a_restart_is_no_failure() -> None:
    state, _ = live(NOTIFY, *READY, (2, StopRequested(AfterStop.RESTART, 5)), (3, Exited(7, 0, signal=15)))
    assert (state.phase, state.failure_count, state.failures_in_row) == (Phase.WAITING, 0, 0)


def test_a_watchdog_bites_when_it_is_not_fed() -> None:
    spec = service(ready="notify", watchdog=5)
    state, _ = live(spec, *READY, (4, Notified(watchdog=True)))
    assert live(spec, (8.9, Tick()), state=state)[1] == []
    bitten, actions = live(spec, (9, Tick()), state=state)
    assert actions == [StopProbe(), Kill(7, "ABRT")] and bitten.phase is Phase.STOPPING
    assert live(spec, (9.5, Exited(7, 0, signal=6)), state=bitten)[0].failure_count == 1


def test_not_ready_within_is_a_failed_start_with_the_probes_reason() -> None:
    spec = service(ready={"tcp": "h:1", "within": 3})
    state, actions = live(spec, (0, NeedsMet()), (0, Spawned(7, MAIN)))
    assert actions == [StartProbe()]
    state, _ = live(spec, (1, ProbeFailed("refused")), (3, Tick()), (3.5, Exited(7, 0, signal=15)), state=state)
    assert str(state.last_failure) == "not ready within 3 s: refused" and state.failure_count == 1


def test_a_service_that_may_be_late_goes_on() -> None:
    spec = service(ready={"tcp": "h:1", "within": 3, "late": "wait"})
    state, _ = live(spec, (0, NeedsMet()), (0, Spawned(7, MAIN)))
    assert not has_had_its_turn(state)
    state, actions = live(spec, (3, Tick()), state=state)
    assert actions == [] and state.phase is Phase.STARTING and state.pid == 7 and has_had_its_turn(state)
    assert live(spec, (900, Tick()), state=state) == (state, []), "for as long as it needs"
    state, _ = live(spec, (901, ProbePassed()), state=state)
    assert state.phase is Phase.READY and not state.late and state.failure_count == 0


def test_a_oneshot_is_ready_once_it_exited_0() -> None:
    spec = service(kind="oneshot", timeout=5)
    state, _ = live(spec, (0, NeedsMet()), (0, Spawned(7, MAIN)))
    assert not is_satisfied(state)
    assert live(spec, (1, Exited(7, 0)), state=state)[0].phase is Phase.DONE
    late, actions = live(spec, (5, Tick()), state=state)
    assert Kill(7, "TERM") in actions and str(late.last_failure) == "did not finish within 5 s"


def test_a_periodic_service_runs_again_after_its_interval_whatever_the_outcome() -> None:
    spec = service(kind="periodic", every=60, timeout=5)
    state, _ = live(spec, (0, NeedsMet()), (0, Spawned(7, MAIN)))
    assert is_satisfied(state)
    state, _ = live(spec, (2, Exited(7, 3, last_line="bad disk")), state=state)
    assert state.deadline == 62 and str(state.last_failure) == "exited 3: bad disk" and is_satisfied(state)
    state, actions = live(spec, (62, Tick()), state=state)
    assert actions == [Spawn(MAIN)]
    state, _ = live(spec, (62, Spawned(8, MAIN)), state=state)
    assert live(spec, (67, Tick()), state=state)[1] == [Kill(8, "KILL")], "over its time"


def test_a_gate_has_no_process_and_opens_once() -> None:
    spec = service(kind="gate", ready={"tcp": "h:1"})
    state, actions = live(spec, (0, NeedsMet()))
    assert actions == [StartProbe()] and not is_satisfied(state)
    assert is_satisfied(live(spec, (1, ProbePassed()), state=state)[0])
    assert live(spec, (1, StopRequested(AfterStop.STOP, 5)), state=state)[0].phase is Phase.STOPPED


@pytest.mark.parametrize(
    "event",
    [ProbePassed(), ProbeFailed("x"), Notified(ready=True), Notified(main_pid=9), Exited(99, 1), Tick(), NeedsMet()],
)
def test_what_comes_too_late_changes_nothing(event: Any) -> None:
    """After the end, a late probe, message or pid must not bring a service back."""
    state = replace(live(NOTIFY, *READY, (2, StopRequested(AfterStop.STOP, 5)), (3, Exited(7, 0)))[0], status="")
    assert advance(NOTIFY, state, event, 4.0) == (state, [])


def test_the_last_exit_is_the_services_own_and_not_that_of_a_preparation_that_succeeded() -> None:
    spec = service(ready="notify", prepare=[["/bin/p"]])
    prepared = (
        (0.0, NeedsMet()),
        (0.0, Spawned(5, 0)),
        (0.1, Exited(5, 0)),
        (0.1, Spawned(7, MAIN)),
        (1.0, Notified(ready=True)),
    )
    killed, _ = live(spec, *prepared, (2.0, Exited(7, 0, 9, last_line="its last words")))
    again, _ = live(
        spec, (2.0, NeedsMet()), (2.0, Spawned(8, 0)), (2.1, Exited(8, 0, last_line="prepared")), state=killed
    )
    assert (again.last_exit, again.last_line) == ("killed by KILL", "its last words")
    assert again.last_end == "exited 0"
    failed, _ = live(
        spec, (2.0, NeedsMet()), (2.0, Spawned(8, 0)), (2.1, Exited(8, 3, last_line="no key")), state=killed
    )
    assert (failed.last_exit, failed.last_line) == ("exited 3", "no key"), "what keeps it from starting is told"


@pytest.mark.parametrize(
    ("phase", "event"),
    [
        (Phase.FAILED, Spawned(7, MAIN)),
        (Phase.READY, Spawned(8, MAIN)),
        (Phase.READY, SpawnFailed("no such file")),
        (Phase.DONE, Exited(7, 0)),
        (Phase.WAITING, Tick()),
    ],
)
def test_an_event_that_a_phase_cannot_have_changes_nothing_and_is_counted(phase: Phase, event: Any) -> None:
    state = State(phase=phase, pid=7, deadline=5.0 if isinstance(event, Tick) else None)
    after, actions = advance(NOTIFY, state, event, 9.0)
    assert actions == [ImpossibleEvent(f"{type(event).__name__} while {phase.value}")]
    assert replace(after, deadline=state.deadline) == state
