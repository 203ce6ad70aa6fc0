"""One service's life as a pure function, and all services of the pod with their states. No clock, no processes.

`advance` takes a state and an event, and returns the new state and actions. The engine (`init.engine.engine`) and the
pod's end (`init.engine.ending`) advance `Services`; this module knows neither.
"""

from __future__ import annotations

from init.engine.states import (  # fmt: skip
    HANDOVER_WAIT,
    LOST_WAIT,
    MAIN,
    OVER,
    STOPPER,
    Cause,
    Down,
    EndPod,
    Exited,
    Go,
    Hurry,
    Impossible,
    Kill,
    Lost,
    Notified,
    Passed,
    Phase,
    PodPhase,
    Said,
    Spawn,
    Spawned,
    SpawnFailed,
    StartProbe,
    State,
    Then,
    Tick,
    Unwatch,
    Up,
)
from init.lean import replace
from init.plan.service import Exhausted, Kind, Probe, RestartWhen

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from init.engine.states import Action, Event, State, Step
    from init.engine.trace import Trace
    from init.plan.compile import Plan
    from init.plan.service import Service

    Todo = list[tuple[str, Action]]


# After a failure: an immediate start, a later start, or none. Pure functions.
def postponed(service: Service, state: State, why: Cause, now: float, jitter: float) -> Step:
    """Retry later without limit when the machine, not the service, caused the failure."""
    if service.kind is Kind.PERIODIC and state.phase is Phase.READY:
        return replace(state, failed=state.failed + 1, why=why, deadline=now + service.restart.delay), []
    state = replace(state, since=now, ready_at=None, failed=state.failed + 1, streak=state.streak + 1, why=why)
    return _again(service, state, now, jitter)


def failed(service: Service, state: State, why: Cause, code: int | None, now: float, jitter: float) -> Step:
    """Count a failure; restart the service, or give up as its restart rule says."""
    rule = service.restart
    failures = (*(at for at in state.failures if now - at < rule.window), now)
    rested = state.ready_at is not None and now - state.ready_at > rule.window
    streak = 1 if rested else state.streak + 1
    state = replace(
        state, pid=0, since=now, ready_at=None, deadline=None, then=None, reloading=False,
        failures=failures, failed=state.failed + 1, streak=streak, why=why,
    )  # fmt: skip
    final: Cause | None = None
    if code is not None and code in rule.fatal_codes:
        final = replace(why, verdict=f"no retry can mend exit code {code}")
    elif rule.when is RestartWhen.NEVER:
        final = why
    elif rule.limit and len(failures) > rule.limit:
        final = replace(why, verdict=f"gave up after {len(failures)} failures within {rule.window:g} s")
    if final is not None:
        state = replace(state, phase=Phase.FAILED, why=final)
        return state, [Unwatch(), *([EndPod(final)] if rule.exhausted is Exhausted.END_POD else [])]
    return _again(service, state, now, jitter)


def _again(service: Service, state: State, now: float, jitter: float) -> Step:
    """Restart at once after the first failure in a row, then after growing delays."""
    rule = service.restart
    if state.streak == 1:
        return replace(state, phase=Phase.WAITING, deadline=None), [Unwatch()]
    delay = min(rule.max_delay, rule.delay * 2.0 ** min(state.streak - 2, 20)) * (1 + rule.jitter * (2 * jitter - 1))
    return replace(state, phase=Phase.BACKOFF, deadline=now + delay), [Unwatch()]


def advance(service: Service, state: State, event: Event, now: float, jitter: float = 0.5) -> Step:
    """Handle every event in every phase. `jitter` in [0, 1) is an argument, so that tests can fix it."""
    match event:
        case Go():
            return _go(service, state, now) if state.phase is Phase.WAITING else (state, [])
        case Spawned():
            return _spawned(service, state, event, now)
        case SpawnFailed():
            if not state.spawning:
                return _impossible(state, event)
            state = replace(state, spawning=False)
            if state.phase is Phase.STOPPING:
                return _stopped(service, state, now, jitter)
            cause = Cause(event.why, event.quoted)
            if event.scarce:
                return postponed(service, state, cause, now, jitter)
            return failed(service, state, cause, None, now, jitter)
        case Exited():
            return _exited(service, state, event, now, jitter)
        case Passed():  # too late in any other phase, like the events below
            return (_ready(service, state, now) if state.phase is Phase.STARTING else state), []
        case Said():
            status = Cause(event.text, event.quoted, detail=event.detail)
            return (replace(state, said=status) if state.phase is Phase.STARTING else state), []
        case Notified():
            return _notified(service, state, event, now)
        case Tick():
            if state.deadline is None or now < state.deadline:
                return state, []
            return _overdue(service, replace(state, deadline=None), now, jitter)
        case Down():
            return _down(service, state, event.then, None, event.grace, now, jitter)
        case Lost():
            return _lost(state, now)
        case Hurry():
            if state.phase is Phase.STOPPING and state.deadline is not None:
                return replace(state, deadline=min(state.deadline, now + event.grace)), []
            return state, []
        case Up():
            return _up(state, now)


def _impossible(state: State, event: Event) -> Step:
    """Report an event that this phase cannot have, a bug of init; do nothing else."""
    return state, [Impossible(f"{type(event).__name__} while {state.phase.value}")]


def _go(service: Service, state: State, now: float) -> Step:
    fresh = replace(
        state, said=None, status="", standby=False, reloading=False, deadline=None, then=None, former=(), ready_at=None
    )
    if service.kind is Kind.GATE:
        within = now + service.ready.within if service.ready.within else None
        return replace(fresh, phase=Phase.STARTING, since=now, started_at=now, deadline=within), [StartProbe()]
    if service.prepare:
        return replace(fresh, phase=Phase.PREPARING, since=now, step=0, spawning=True), [Spawn(0)]
    return replace(fresh, phase=Phase.STARTING, since=now, step=MAIN, spawning=True), [Spawn(MAIN)]


def _spawned(service: Service, state: State, event: Spawned, now: float) -> Step:
    if event.step == STOPPER:
        return replace(state, helper=event.pid), []
    if not state.spawning:
        return _impossible(state, event)
    state = replace(state, spawning=False)
    if state.phase is Phase.STOPPING:  # stopped between the decision and the fork
        return replace(state, pid=event.pid), [Kill(event.pid, "TERM")]
    if event.step != MAIN:
        return replace(state, pid=event.pid), []
    state = replace(state, pid=event.pid, starts=state.starts + 1, started_at=now)
    if service.kind is not Kind.LONGRUN:
        limit = now + service.timeout if service.timeout else None
        state = replace(state, deadline=limit)
        return (replace(state, phase=Phase.READY) if service.kind is Kind.PERIODIC else state), []
    if service.ready.probe is Probe.NONE:
        # A started service is ready; after a failure only if it stays up: a crash loop must not look ready in between.
        if not state.streak:
            return _ready(service, state, now), []
        return replace(state, deadline=now + service.restart.delay), []
    state = replace(state, deadline=now + service.ready.within if service.ready.within else None)
    return state, [] if service.ready.probe is Probe.NOTIFY else [StartProbe()]


def _ready(service: Service, state: State, now: float) -> State:
    watchdog = now + service.watchdog if service.watchdog else None
    return replace(
        state, phase=Phase.READY, since=now, ready_at=now, deadline=watchdog, said=None, why=None, standby=False
    )


def _exited(service: Service, state: State, event: Exited, now: float, jitter: float) -> Step:
    if event.pid in state.former:
        return replace(state, former=tuple(pid for pid in state.former if pid != event.pid)), []
    if event.pid == state.helper:
        state = replace(state, helper=0)
        if state.phase is Phase.STOPPING and state.pid and event.text() != "exited 0":
            return state, [Kill(state.pid, service.stop.signal)]
        return (state, []) if state.pid else _stopped(service, state, now, jitter)
    if event.pid != state.pid or not event.pid:
        return state, []  # the exit of an earlier process
    after = replace(state, pid=0, ended=event.text())
    if not (event.well and state.phase is Phase.PREPARING):  # `last_exit` shows no successful prepare command
        after = replace(after, last_exit=event.text(), last_line=event.last_line)
    match state.phase:
        case Phase.PREPARING:
            return _prepared(service, after, event, now, jitter)
        case Phase.READY if service.kind is Kind.PERIODIC:
            cause = None if event.well else Cause(event.text(), event.last_line, service.command)
            after = replace(after, why=cause, failed=state.failed + (not event.well))
            return replace(after, deadline=now + service.every * (0.9 + 0.2 * jitter)), []
        case Phase.STARTING | Phase.READY:
            return _ended(service, after, event, now, jitter)
        case Phase.STOPPING:
            return (after, []) if state.helper else _stopped(service, after, now, jitter)
    return _impossible(state, event)


def _prepared(service: Service, state: State, event: Exited, now: float, jitter: float) -> Step:
    if not event.well:
        command = service.prepare[state.step]
        cause = Cause(f"{command[0]} (prepare) {event.text()}", event.last_line, command)
        return failed(service, state, cause, None, now, jitter)
    if state.step + 1 < len(service.prepare):
        return replace(state, step=state.step + 1, spawning=True), [Spawn(state.step + 1)]
    return replace(state, phase=Phase.STARTING, since=now, step=MAIN, spawning=True), [Spawn(MAIN)]


def _ended(service: Service, state: State, event: Exited, now: float, jitter: float) -> Step:
    """Handle an end of the main process that was not requested."""
    cause = Cause(event.text(), event.last_line, service.command)
    if event.well:
        if service.kind is Kind.ONESHOT:
            return replace(state, phase=Phase.DONE, since=now, ready_at=now, deadline=None, why=None, said=None), []
        if event.heirs and service.ready.probe is Probe.NOTIFY:
            return replace(state, phase=Phase.HANDOVER, since=now, deadline=now + HANDOVER_WAIT), []
        if service.restart.when is not RestartWhen.ALWAYS:
            return replace(state, phase=Phase.DONE, since=now, deadline=None), [Unwatch()]
        if event.heirs:
            heirs = ", ".join(str(pid) for pid in event.heirs[:4])
            text = f"exited 0 and left processes behind ({heirs}): it went to the background; run it in the foreground"
            cause = Cause(text)
    return failed(service, state, cause, event.code if not event.signal else None, now, jitter)


def _notified(service: Service, state: State, event: Notified, now: float) -> Step:
    if event.status is not None:
        state = replace(state, status=event.status)
    if event.standby and state.phase in (Phase.STARTING, Phase.READY):
        if state.phase is Phase.READY:  # it lost the lease: services bound to it stop too
            state = replace(state, phase=Phase.STARTING, since=now, ready_at=None, deadline=None)
        state = replace(state, standby=True)
    actions: list[Action] = []
    if event.main_pid and event.main_pid != state.pid and state.phase in _ALIVE:
        former = (*state.former, state.pid) if state.pid else state.former
        state = replace(state, pid=event.main_pid, former=former)
        if state.phase is Phase.STOPPING:
            actions.append(Kill(state.pid, service.stop.signal))
        elif state.phase is Phase.HANDOVER:
            if state.then is not None:
                state = replace(state, phase=Phase.STOPPING, since=now, deadline=now + service.stop.grace)
                return state, [Kill(state.pid, service.stop.signal)]
            back = Phase.READY if state.ready_at is not None else Phase.STARTING
            state = replace(state, phase=back, since=now, deadline=None)
            if back is Phase.READY:
                state = _ready(service, state, now)
    if event.reloading and state.phase is Phase.READY:
        state = replace(state, reloading=True)
    if event.ready:
        if state.phase is Phase.STARTING and service.ready.probe is Probe.NOTIFY and state.step == MAIN:
            state = _ready(service, state, now)
        state = replace(state, reloading=False)
    if event.watchdog and service.watchdog and state.phase is Phase.READY:
        state = replace(state, deadline=now + service.watchdog)
    return state, actions


_ALIVE = (Phase.STARTING, Phase.READY, Phase.HANDOVER, Phase.STOPPING)


def _overdue(service: Service, state: State, now: float, jitter: float) -> Step:
    """Act on a deadline that has passed; the phase says which one it was."""
    match state.phase:
        case Phase.BACKOFF:
            return replace(state, phase=Phase.WAITING, since=now), []
        case Phase.STOPPING:
            return state, [Kill(pid, "KILL") for pid in (state.pid, state.helper) if pid]
        case Phase.HANDOVER:
            if state.then is not None:
                return _stopped(service, state, now, jitter)
            cause = Cause("exited 0, and none of the processes it left took over")
            return failed(service, state, cause, None, now, jitter)
        case Phase.READY if service.kind is Kind.PERIODIC:
            return (state, [Kill(state.pid, "KILL")]) if state.pid else (replace(state, spawning=True), [Spawn(MAIN)])
        case Phase.READY if service.watchdog:
            cause = Cause(f"watchdog: no sign of life for {service.watchdog:g} s")
            return _down(service, state, Then.FAIL, cause, service.stop.grace, now, jitter, signal="ABRT")
        case Phase.STARTING if service.kind is Kind.LONGRUN and service.ready.probe is Probe.NONE:
            return _ready(service, state, now), []
        case Phase.STARTING if service.kind is Kind.ONESHOT:
            cause = Cause(f"did not finish within {service.timeout:g} s")
            return _down(service, state, Then.FAIL, cause, service.stop.grace, now, jitter)
        case Phase.STARTING:
            status, late = state.said or Cause(""), f"not ready within {service.ready.within:g} s"
            cause = replace(status, outcome=f"{late}: {status.outcome}" if status.outcome else late)
            return _down(service, state, Then.FAIL, cause, service.stop.grace, now, jitter)
    return _impossible(state, Tick())


def _down(
    service: Service, state: State, then: Then, why: Cause | None, grace: float, now: float, jitter: float,
    signal: str = "",
) -> Step:  # fmt: skip
    """Stop the service's process; `then` says what follows its end."""
    if state.phase is Phase.STOPPING:
        deadline = min(state.deadline, now + grace) if state.deadline is not None else None
        return replace(state, then=then if then is not Then.FAIL else state.then, deadline=deadline), []
    if state.phase is Phase.HANDOVER:
        return replace(state, then=then), []
    state = replace(state, then=then, why=why or state.why, reloading=False)
    if state.spawning:
        return replace(state, phase=Phase.STOPPING, since=now, deadline=now + grace), [Unwatch()]
    if not state.pid:
        rest, actions = _stopped(service, state, now, jitter)
        return rest, [Unwatch(), *actions]
    signal = signal or (service.stop.signal if state.phase is not Phase.PREPARING else "TERM")
    by_command = bool(service.stop.command) and then is not Then.FAIL and state.phase is not Phase.PREPARING
    act: Action = Spawn(STOPPER) if by_command else Kill(state.pid, signal)
    return replace(state, phase=Phase.STOPPING, since=now, deadline=now + grace), [Unwatch(), act]


def _lost(state: State, now: float) -> Step:
    """Kill the process before it writes anything more; restart it once the service that it is bound to is ready."""
    state = replace(state, ready_at=None, reloading=False)
    if state.phase is Phase.STOPPING:
        return replace(state, deadline=now + LOST_WAIT), [Kill(state.pid, "KILL")]
    if state.spawning:  # not forked yet: it gets TERM then, and KILL a moment later
        return replace(state, phase=Phase.STOPPING, since=now, then=Then.AGAIN, deadline=now + LOST_WAIT), [Unwatch()]
    if state.phase is Phase.HANDOVER:
        return replace(state, then=Then.AGAIN, deadline=now), []
    if not state.pid:
        again = replace(
            state, phase=Phase.WAITING, since=now, streak=0, failures=(), deadline=None, why=None, said=None
        )
        return again, [Unwatch()]
    state = replace(state, phase=Phase.STOPPING, since=now, then=Then.AGAIN, deadline=now + LOST_WAIT)
    return state, [Unwatch(), Kill(state.pid, "KILL")]


def _stopped(service: Service, state: State, now: float, jitter: float) -> Step:
    then = state.then
    state = replace(state, then=None, deadline=None, status="", ready_at=None)
    if then is Then.FAIL:
        return failed(service, state, state.why or Cause("failed"), None, now, jitter)
    phase = Phase.WAITING if then is Then.AGAIN else Phase.STOPPED
    return replace(state, phase=phase, since=now, streak=0, failures=(), why=None, said=None), []


def _up(state: State, now: float) -> Step:
    if state.phase is Phase.STOPPING:
        return replace(state, then=Then.AGAIN), []
    if state.phase in (Phase.STOPPED, Phase.FAILED, Phase.DONE, Phase.BACKOFF):
        return replace(state, phase=Phase.WAITING, since=now, streak=0, failures=(), deadline=None, ready_at=None), []
    return state, []


_STABLE = (Phase.READY, *OVER, Phase.BACKOFF)


class Services:
    def __init__(self, plan: Plan, jitter: Callable[[], float], trace: Trace) -> None:
        self.plan = plan
        self.trace = trace
        self.phase = PodPhase.BOOT
        self.specs: dict[str, Service] = {service.name: service for service in plan.services}
        self.errands: dict[str, Service] = {}  # the drain and the resume: oneshots of the role
        self.states: dict[str, State] = {name: State() for name in self.specs}
        self.leaving: dict[str, Then] = {}  # services to stop once their dependants have, and what follows
        self.next_specs: dict[str, Service | None] = {}  # from a new plan; None: removed
        self.impossible = 0  # events that a phase cannot have: each is a bug of init
        self._jitter = jitter

    def advance(self, name: str, event: Event, now: float) -> Todo:
        """Advance one service. The engine derives the consequences for the other services."""
        before = self.states.get(name)
        if before is None:
            return []
        after, actions = advance(self.spec(name), before, event, now, self._jitter())
        self.states[name] = after
        self.trace.change(now, name, before, after)
        todo: Todo = []
        for action in actions:
            if isinstance(action, Impossible):
                self.impossible += 1
                self.trace.impossible(now, name, action.what)
            else:
                todo.append((name, action))
        return todo

    def leave_all(self) -> None:
        """Stop everything for good."""
        self.leaving = dict.fromkeys(self.states, Then.STOP)
        self.next_specs = {}

    def stable(self, name: str) -> bool:
        """Tell if the service changes no further by itself for now."""
        state = self.states.get(name)
        if state is None:
            return True
        return name not in self.leaving and not state.reloading and state.phase in _STABLE

    def spec(self, name: str) -> Service:
        return self.specs.get(name) or self.errands[name]

    def known(self, name: str) -> Service | None:
        """Return a service, or the running drain or resume; None if the plan no longer has it."""
        return self.specs.get(name) or self.errands.get(name)

    def forget(self, name: str) -> None:
        self.states.pop(name, None)
        self.specs.pop(name, None)
