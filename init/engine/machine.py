r"""State machine of one service, as a pure function, and the states of all services of the pod.

`advance` takes a service's state and an event, and returns the new state and the actions that PID 1 performs. A service
goes this way:

    waiting -> preparing -> starting -> ready -> stopping -> stopped
                    \__________\_________\-> backoff -> waiting, or failed

A oneshot ends in `done` instead of `ready`. `handover` waits for a forking daemon's new main process.

`Services` holds all states. The engine (`init.engine.engine`) and the pod's end (`init.engine.ending`) advance them and
derive the consequences for other services; this module knows neither. No clock, no processes.

`Trace` records the newest changes on the monotonic clock and words their log lines.
"""

from __future__ import annotations

from init.engine.states import (  # fmt: skip
    HANDOVER_WAIT,
    LOST_WAIT,
    MAIN,
    OVER,
    STOPPER,
    AfterStop,
    BindingLost,
    Cause,
    EndPod,
    Exited,
    ImpossibleEvent,
    Kill,
    NeedsMet,
    Notified,
    Phase,
    PodPhase,
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
)
from init.lean import record, replace
from init.plan.service import Exhausted, Kind, Late, Probe, RestartWhen

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from init.engine.states import Action, Event, Step
    from init.plan.compile import Plan
    from init.plan.service import Service

    Todo = list[tuple[str, Action]]

KEPT = 4096


@record(frozen=True, slots=True)
class Happening:
    at: float  # monotonic
    service: str  # empty: the pod
    event: str
    detail: str


class Trace:
    """The newest happenings; old ones are dropped, except those of the boot."""

    def __init__(self, kept: int = KEPT) -> None:
        self._boot: list[Happening] = []
        self._later: list[Happening] = []
        self._kept = kept
        self._boot_room = kept // 4
        # The loop logs and empties this list of (text, whether it also goes to the pod's log).
        self.news: list[tuple[str, bool]] = []

    def add(self, now: float, service: str, event: str, detail: str = "") -> None:
        item = Happening(now, service, event, detail)
        if len(self._boot) < self._boot_room:
            self._boot.append(item)
        else:
            self._later.append(item)
            del self._later[: -self._kept]
        if not service and event != "stopped":
            self.news.append((f"{event}: {detail}", False))

    def change(self, now: float, name: str, before: State, after: State) -> None:
        """Record the differences between two states of a service."""
        if after.pid and after.pid != before.pid:
            handed_over = before.pid and before.pid in after.former_pids
            detail = f"pid {after.pid}" + (f", taking over from {before.pid}" if handed_over else "")
            self.add(now, name, "main-pid" if handed_over else "spawned", detail)
        if before.pid and not after.pid and after.last_end:
            line = f": {after.last_line}" if after.last_line and after.last_end != "exited 0" else ""
            self.add(now, name, "exited", f"{after.last_end}{line}")
        if after.reloading is not before.reloading:
            self.add(now, name, "reloading" if after.reloading else "reloaded")
        if after.phase is not before.phase:
            failed = after.phase in (Phase.BACKOFF, Phase.FAILED, Phase.WAITING)
            self.add(
                now,
                name,
                after.phase.value,
                str(after.last_failure) if failed and after.last_failure is not None else "",
            )
        if text := _news(now, before, after):
            self.news.append((f"{name}: {text}", True))

    def impossible(self, now: float, name: str, what: str) -> None:
        self.add(now, name, "impossible", what)
        self.news.append((f"{name}: a bug of init itself: {what}", True))

    def happenings(self) -> list[Happening]:
        return [*self._boot, *self._later]


def _news(now: float, before: State, after: State) -> str:
    """Return the log line for a failure or its end: a service that dies logs nothing itself."""
    last, failure = before.last_failure, after.last_failure
    if after.failure_count > before.failure_count:
        if after.phase is Phase.WAITING:
            return f"{failure}; starts again"
        if after.phase is Phase.BACKOFF:
            next_start = (after.deadline or now) - now
            return f"{failure}; failed {times(after.failure_count)}, next start in {next_start:.1f} s"
        if after.phase is Phase.READY:  # a periodic service: a repeated failure is reported once
            is_repeated = last is not None and failure is not None and last.outcome == failure.outcome
            return "" if is_repeated else f"last run {failure}"
        return str(failure)
    if last is not None and failure is None and after.phase in (Phase.READY, Phase.DONE):
        return "works again" if before.phase is Phase.READY else f"{after.phase.value} again"
    return ""


def times(number: int) -> str:
    return {1: "once", 2: "twice"}.get(number, f"{number} times")


def advance(service: Service, state: State, event: Event, now: float, jitter: float = 0.5) -> Step:
    """Handle every event in every phase. `jitter` in [0, 1) is an argument, so that tests can fix it."""
    match event:
        case NeedsMet():
            return _start(service, state, now) if state.phase is Phase.WAITING else (state, [])
        case Spawned():
            return _handle_spawn(service, state, event, now)
        case SpawnFailed():
            return _handle_spawn_failure(service, state, event, now, jitter)
        case Exited():
            return _handle_exit(service, state, event, now, jitter)
        case ProbePassed():  # too late in any other phase, like the events below
            return (_become_ready(service, state, now) if state.phase is Phase.STARTING else state), []
        case ProbeFailed():
            status = Cause(event.text, event.quoted, detail=event.detail)
            return (replace(state, probe_status=status) if state.phase is Phase.STARTING else state), []
        case Notified():
            return _handle_notification(service, state, event, now)
        case Tick():
            if state.deadline is None or now < state.deadline:
                return state, []
            return _handle_deadline(service, replace(state, deadline=None), now, jitter)
        case StopRequested():
            return _stop(service, state, event.after_stop, None, event.grace, now, jitter)
        case BindingLost():
            return _kill(state, now)
        case ShortenGrace():
            if state.phase is Phase.STOPPING and state.deadline is not None:
                return replace(state, deadline=min(state.deadline, now + event.grace)), []
            return state, []
        case StartRequested():
            return _start_again(state, now)


def _report_impossible(state: State, event: Event) -> Step:
    """Report an event that this phase cannot have, a bug of init; do nothing else."""
    return state, [ImpossibleEvent(f"{type(event).__name__} while {state.phase.value}")]


def _start(service: Service, state: State, now: float) -> Step:
    """Begin with the probe of a gate, the first prepare command, or the main process."""
    fresh = replace(
        state, probe_status=None, status="", late=False, standby=False, reloading=False, deadline=None, after_stop=None,
        former_pids=(), ready_at=None,
    )  # fmt: skip
    if service.kind is Kind.GATE:
        deadline = now + service.ready.within if service.ready.within else None
        return replace(fresh, phase=Phase.STARTING, since=now, started_at=now, deadline=deadline), [StartProbe()]
    if service.prepare:
        return replace(fresh, phase=Phase.PREPARING, since=now, step=0, spawning=True), [Spawn(0)]
    return replace(fresh, phase=Phase.STARTING, since=now, step=MAIN, spawning=True), [Spawn(MAIN)]


def _handle_spawn_failure(service: Service, state: State, event: SpawnFailed, now: float, jitter: float) -> Step:
    if not state.spawning:
        return _report_impossible(state, event)
    state = replace(state, spawning=False)
    if state.phase is Phase.STOPPING:
        return _finish_stop(service, state, now, jitter)
    cause = Cause(event.why, event.quoted)
    if event.scarce:
        return retry_later(service, state, cause, now, jitter)
    return fail(service, state, cause, None, now, jitter)


def _handle_spawn(service: Service, state: State, event: Spawned, now: float) -> Step:
    """Record the new process, and say what makes the service ready."""
    if event.step == STOPPER:
        return replace(state, stop_pid=event.pid), []
    if not state.spawning:
        return _report_impossible(state, event)
    state = replace(state, spawning=False)
    if state.phase is Phase.STOPPING:  # stopped between the decision and the fork
        return replace(state, pid=event.pid), [Kill(event.pid, "TERM")]
    if event.step != MAIN:
        return replace(state, pid=event.pid), []
    state = replace(state, pid=event.pid, starts=state.starts + 1, started_at=now)
    if service.kind is not Kind.LONGRUN:
        state = replace(state, deadline=now + service.timeout if service.timeout else None)
        return (replace(state, phase=Phase.READY) if service.kind is Kind.PERIODIC else state), []
    if service.ready.probe is Probe.NONE:
        # A started service is ready; after a failure only if it stays up: a crash loop must not look ready in between.
        if not state.failures_in_row:
            return _become_ready(service, state, now), []
        return replace(state, deadline=now + service.restart.delay), []
    state = replace(state, deadline=now + service.ready.within if service.ready.within else None)
    return state, [] if service.ready.probe is Probe.NOTIFY else [StartProbe()]


def _become_ready(service: Service, state: State, now: float) -> State:
    watchdog_deadline = now + service.watchdog if service.watchdog else None
    return replace(
        state, phase=Phase.READY, since=now, ready_at=now, deadline=watchdog_deadline, probe_status=None,
        last_failure=None, late=False, standby=False,
    )  # fmt: skip


def _handle_exit(service: Service, state: State, event: Exited, now: float, jitter: float) -> Step:
    """Handle the end of a former main process, of the stop command, or of the current process."""
    if event.pid in state.former_pids:
        return replace(state, former_pids=tuple(pid for pid in state.former_pids if pid != event.pid)), []
    if event.pid == state.stop_pid:
        state = replace(state, stop_pid=0)
        stop_command_failed = event.text() != "exited 0"
        if state.phase is Phase.STOPPING and state.pid and stop_command_failed:
            return state, [Kill(state.pid, service.stop.signal)]
        return (state, []) if state.pid else _finish_stop(service, state, now, jitter)
    if event.pid != state.pid or not event.pid:
        return state, []  # the exit of an earlier process
    after = replace(state, pid=0, last_end=event.text())
    if not (event.well and state.phase is Phase.PREPARING):  # `last_exit` shows no successful prepare command
        after = replace(after, last_exit=event.text(), last_line=event.last_line)
    match state.phase:
        case Phase.PREPARING:
            return _end_prepare_command(service, after, event, now, jitter)
        case Phase.READY if service.kind is Kind.PERIODIC:
            cause = None if event.well else Cause(event.text(), event.last_line, service.command)
            after = replace(after, last_failure=cause, failure_count=state.failure_count + (not event.well))
            return replace(after, deadline=now + service.every * (0.9 + 0.2 * jitter)), []
        case Phase.STARTING | Phase.READY:
            return _end_main_process(service, after, event, now, jitter)
        case Phase.STOPPING:
            return (after, []) if state.stop_pid else _finish_stop(service, after, now, jitter)
    return _report_impossible(state, event)


def _end_prepare_command(service: Service, state: State, event: Exited, now: float, jitter: float) -> Step:
    """Start the next prepare command, or the main process after the last one."""
    if not event.well:
        command = service.prepare[state.step]
        cause = Cause(f"{command[0]} (prepare) {event.text()}", event.last_line, command)
        return fail(service, state, cause, None, now, jitter)
    if state.step + 1 < len(service.prepare):
        return replace(state, step=state.step + 1, spawning=True), [Spawn(state.step + 1)]
    return replace(state, phase=Phase.STARTING, since=now, step=MAIN, spawning=True), [Spawn(MAIN)]


def _end_main_process(service: Service, state: State, event: Exited, now: float, jitter: float) -> Step:
    """Handle an end of the main process that was not requested."""
    cause = Cause(event.text(), event.last_line, service.command)
    if event.well:
        if service.kind is Kind.ONESHOT:
            state = replace(state, phase=Phase.DONE, since=now, ready_at=now, deadline=None)
            return replace(state, last_failure=None, probe_status=None), []
        if event.heirs and service.ready.probe is Probe.NOTIFY:
            return replace(state, phase=Phase.HANDOVER, since=now, deadline=now + HANDOVER_WAIT), []
        if service.restart.when is not RestartWhen.ALWAYS:
            return replace(state, phase=Phase.DONE, since=now, deadline=None), [StopProbe()]
        if event.heirs:
            heirs = ", ".join(str(pid) for pid in event.heirs[:4])
            text = f"exited 0 and left processes behind ({heirs}): it went to the background; run it in the foreground"
            cause = Cause(text)
    return fail(service, state, cause, event.code if not event.signal else None, now, jitter)


def _handle_notification(service: Service, state: State, event: Notified, now: float) -> Step:
    """Apply the fields of one notification in this order: STATUS, STANDBY, MAINPID, RELOADING, READY, WATCHDOG."""
    if event.status is not None:
        state = replace(state, status=event.status)
    if event.standby and state.phase in (Phase.STARTING, Phase.READY):
        if state.phase is Phase.READY:  # the service lost the lease: services bound to it stop too
            state = replace(state, phase=Phase.STARTING, since=now, ready_at=None, deadline=None)
        state = replace(state, standby=True)
    actions: list[Action] = []
    if event.main_pid and event.main_pid != state.pid and state.phase in _WITH_PROCESSES:
        ends_handover = state.phase is Phase.HANDOVER
        state, actions = _take_main_pid(service, state, event.main_pid, now)
        if ends_handover and state.phase is Phase.STOPPING:
            return state, actions
    if event.reloading and state.phase is Phase.READY:
        state = replace(state, reloading=True)
    if event.ready:
        if state.phase is Phase.STARTING and service.ready.probe is Probe.NOTIFY and state.step == MAIN:
            state = _become_ready(service, state, now)
        state = replace(state, reloading=False)
    if event.watchdog and service.watchdog and state.phase is Phase.READY:
        state = replace(state, deadline=now + service.watchdog)
    return state, actions


_WITH_PROCESSES = (Phase.STARTING, Phase.READY, Phase.HANDOVER, Phase.STOPPING)


def _take_main_pid(service: Service, state: State, pid: int, now: float) -> Step:
    """Take over the main process that the service reports. It ends a handover, and a pending stop signals it."""
    former = (*state.former_pids, state.pid) if state.pid else state.former_pids
    state = replace(state, pid=pid, former_pids=former)
    if state.phase is Phase.STOPPING:
        return state, [Kill(pid, service.stop.signal)]
    if state.phase is not Phase.HANDOVER:
        return state, []
    if state.after_stop is not None:
        state = replace(state, phase=Phase.STOPPING, since=now, deadline=now + service.stop.grace)
        return state, [Kill(pid, service.stop.signal)]
    if state.ready_at is not None:
        return _become_ready(service, state, now), []
    return replace(state, phase=Phase.STARTING, since=now, deadline=None), []


def _handle_deadline(service: Service, state: State, now: float, jitter: float) -> Step:
    """Act on a deadline that has passed; the phase says which one it was."""
    match state.phase:
        case Phase.BACKOFF:
            return replace(state, phase=Phase.WAITING, since=now), []
        case Phase.STOPPING:
            return state, [Kill(pid, "KILL") for pid in (state.pid, state.stop_pid) if pid]
        case Phase.HANDOVER:
            if state.after_stop is not None:
                return _finish_stop(service, state, now, jitter)
            cause = Cause("exited 0, and none of the processes it left took over")
            return fail(service, state, cause, None, now, jitter)
        case Phase.READY if service.kind is Kind.PERIODIC:
            return (state, [Kill(state.pid, "KILL")]) if state.pid else (replace(state, spawning=True), [Spawn(MAIN)])
        case Phase.READY if service.watchdog:
            cause = Cause(f"watchdog: no sign of life for {service.watchdog:g} s")
            return _stop(service, state, AfterStop.FAIL, cause, service.stop.grace, now, jitter, signal="ABRT")
        case Phase.STARTING if service.kind is Kind.LONGRUN and service.ready.probe is Probe.NONE:
            return _become_ready(service, state, now), []
        case Phase.STARTING if service.kind is Kind.ONESHOT:
            cause = Cause(f"did not finish within {service.timeout:g} s")
            return _stop(service, state, AfterStop.FAIL, cause, service.stop.grace, now, jitter)
        case Phase.STARTING if service.ready.late is Late.WAIT:
            return replace(state, late=True), []
        case Phase.STARTING:
            cause, late = state.probe_status or Cause(""), f"not ready within {service.ready.within:g} s"
            cause = replace(cause, outcome=f"{late}: {cause.outcome}" if cause.outcome else late)
            return _stop(service, state, AfterStop.FAIL, cause, service.stop.grace, now, jitter)
    return _report_impossible(state, Tick())


def _stop(
    service: Service, state: State, after_stop: AfterStop, cause: Cause | None, grace: float, now: float,
    jitter: float, signal: str = "",
) -> Step:  # fmt: skip
    """Stop the service's process; `after_stop` says what follows its end."""
    if state.phase is Phase.STOPPING:
        deadline = min(state.deadline, now + grace) if state.deadline is not None else None
        requested = state.after_stop if after_stop is AfterStop.FAIL else after_stop
        return replace(state, after_stop=requested, deadline=deadline), []
    if state.phase is Phase.HANDOVER:
        return replace(state, after_stop=after_stop), []
    state = replace(state, after_stop=after_stop, last_failure=cause or state.last_failure, reloading=False)
    if not state.spawning and not state.pid:
        stopped, actions = _finish_stop(service, state, now, jitter)
        return stopped, [StopProbe(), *actions]
    is_preparing = state.phase is Phase.PREPARING
    state = replace(state, phase=Phase.STOPPING, since=now, deadline=now + grace)
    if state.spawning:  # not forked yet: the process gets its signal then
        return state, [StopProbe()]
    if service.stop.command and after_stop is not AfterStop.FAIL and not is_preparing:
        return state, [StopProbe(), Spawn(STOPPER)]
    signal = signal or ("TERM" if is_preparing else service.stop.signal)
    return state, [StopProbe(), Kill(state.pid, signal)]


def _kill(state: State, now: float) -> Step:
    """Kill the process before it writes anything more; restart it once the service that it is bound to is ready."""
    state = replace(state, ready_at=None, reloading=False)
    if state.phase is Phase.STOPPING:
        return replace(state, deadline=now + LOST_WAIT), [Kill(state.pid, "KILL")]
    if state.spawning:  # not forked yet: it gets TERM then, and KILL a moment later
        return replace(
            state, phase=Phase.STOPPING, since=now, after_stop=AfterStop.RESTART, deadline=now + LOST_WAIT
        ), [StopProbe()]
    if state.phase is Phase.HANDOVER:
        return replace(state, after_stop=AfterStop.RESTART, deadline=now), []
    if not state.pid:
        state = replace(_without_failures(state), phase=Phase.WAITING, since=now, deadline=None)
        return state, [StopProbe()]
    state = replace(state, phase=Phase.STOPPING, since=now, after_stop=AfterStop.RESTART, deadline=now + LOST_WAIT)
    return state, [StopProbe(), Kill(state.pid, "KILL")]


def _finish_stop(service: Service, state: State, now: float, jitter: float) -> Step:
    """Continue after the end of a stopped process as the request said: fail, wait for the next start, or stay."""
    after_stop = state.after_stop
    state = replace(state, after_stop=None, deadline=None, status="", ready_at=None)
    if after_stop is AfterStop.FAIL:
        return fail(service, state, state.last_failure or Cause("failed"), None, now, jitter)
    phase = Phase.WAITING if after_stop is AfterStop.RESTART else Phase.STOPPED
    return replace(_without_failures(state), phase=phase, since=now), []


def _without_failures(state: State) -> State:
    return replace(state, failures_in_row=0, recent_failures=(), last_failure=None, probe_status=None)


def _start_again(state: State, now: float) -> Step:
    """Start on request, whatever happened before; the count of failures in a row begins anew."""
    if state.phase is Phase.STOPPING:
        return replace(state, after_stop=AfterStop.RESTART), []
    if state.phase in (Phase.STOPPED, Phase.FAILED, Phase.DONE, Phase.BACKOFF):
        state = replace(state, failures_in_row=0, recent_failures=())
        return replace(state, phase=Phase.WAITING, since=now, deadline=None, ready_at=None), []
    return state, []


# After a failure: an immediate start, a later start, or none.


def retry_later(service: Service, state: State, cause: Cause, now: float, jitter: float) -> Step:
    """Retry without limit: the machine, not the service, caused the failure."""
    if service.kind is Kind.PERIODIC and state.phase is Phase.READY:
        next_run = now + service.restart.delay
        return replace(state, failure_count=state.failure_count + 1, last_failure=cause, deadline=next_run), []
    state = replace(
        state, since=now, ready_at=None, last_failure=cause,
        failure_count=state.failure_count + 1, failures_in_row=state.failures_in_row + 1,
    )  # fmt: skip
    return _restart(service, state, now, jitter)


def fail(service: Service, state: State, cause: Cause, code: int | None, now: float, jitter: float) -> Step:
    """Count a failure; restart the service, or give up as its restart rule says."""
    rule = service.restart
    recent = (*(at for at in state.recent_failures if now - at < rule.window), now)
    was_stable = state.ready_at is not None and now - state.ready_at > rule.window
    state = replace(
        state, pid=0, since=now, ready_at=None, deadline=None, after_stop=None, reloading=False,
        recent_failures=recent, failure_count=state.failure_count + 1,
        failures_in_row=1 if was_stable else state.failures_in_row + 1, last_failure=cause,
    )  # fmt: skip
    final: Cause | None = None
    if code is not None and code in rule.fatal_codes:
        final = replace(cause, verdict=f"no retry can mend exit code {code}")
    elif rule.when is RestartWhen.NEVER:
        final = cause
    elif rule.limit and len(recent) > rule.limit:
        final = replace(cause, verdict=f"gave up after {len(recent)} failures within {rule.window:g} s")
    if final is None:
        return _restart(service, state, now, jitter)
    state = replace(state, phase=Phase.FAILED, last_failure=final)
    return state, [StopProbe(), *([EndPod(final)] if rule.exhausted is Exhausted.END_POD else [])]


def _restart(service: Service, state: State, now: float, jitter: float) -> Step:
    """Restart at once after the first failure in a row, then after growing delays."""
    rule = service.restart
    if state.failures_in_row == 1:
        return replace(state, phase=Phase.WAITING, deadline=None), [StopProbe()]
    delay = min(rule.max_delay, rule.delay * 2.0 ** min(state.failures_in_row - 2, 20))
    delay *= 1 + rule.jitter * (2 * jitter - 1)
    return replace(state, phase=Phase.BACKOFF, deadline=now + delay), [StopProbe()]


# All services.

_STABLE = (Phase.READY, *OVER, Phase.BACKOFF)


class Services:
    """The states of all services, and what the engine wants of each."""

    def __init__(self, plan: Plan, jitter: Callable[[], float], trace: Trace) -> None:
        self.plan = plan
        self.trace = trace
        self.phase = PodPhase.BOOT
        self.specs: dict[str, Service] = {service.name: service for service in plan.services}
        self.errands: dict[str, Service] = {}  # the drain and the resume: oneshots of the role
        self.states: dict[str, State] = {name: State() for name in self.specs}
        self.leaving: dict[str, AfterStop] = {}  # services to stop once their dependants have, and what follows
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
            if isinstance(action, ImpossibleEvent):
                self.impossible += 1
                self.trace.impossible(now, name, action.what)
            else:
                todo.append((name, action))
        return todo

    def leave_all(self) -> None:
        """Stop everything for good."""
        self.leaving = dict.fromkeys(self.states, AfterStop.STOP)
        self.next_specs = {}

    def stable(self, name: str) -> bool:
        """Tell if the service changes no further by itself for now, or is late and may take hours."""
        state = self.states.get(name)
        if state is None:
            return True
        return name not in self.leaving and not state.reloading and (state.phase in _STABLE or state.late)

    def spec(self, name: str) -> Service:
        return self.specs.get(name) or self.errands[name]

    def find(self, name: str) -> Service | None:
        """Return a service, or the running drain or resume; None if the plan no longer has it."""
        return self.specs.get(name) or self.errands.get(name)

    def forget(self, name: str) -> None:
        self.states.pop(name, None)
        self.specs.pop(name, None)
