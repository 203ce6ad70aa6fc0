"""All services together: which one starts, which one stops. It decides only; the loop of PID 1 acts and reports back.

Each event advances one service (`init.engine.machine`). Then `converge` applies the consequences for the others until
nothing changes: services whose turn it is stop, services bound to a lost one are killed, services whose needs are met
start. `init.engine.ending` ends the pod.
"""

from __future__ import annotations

from init.engine import order
from init.engine.ending import ENDED_WELL, Ending
from init.engine.machine import Services
from init.engine.states import (
    STOPPER,
    AfterStop,
    BindingLost,
    EndPod,
    Kill,
    NeedsMet,
    Phase,
    PodPhase,
    StartRequested,
    State,
    StopRequested,
    Tick,
    is_failing,
    is_idle,
    is_satisfied,
)
from init.lean import record, replace
from init.plan import service
from init.plan.compile import compare
from init.plan.service import Kind

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from init.engine.machine import Todo, Trace
    from init.engine.states import Cause, Event
    from init.plan.compile import Change, Plan
    from init.plan.service import Service

EXHAUSTED = 69  # docs/reference/exit-codes.md


@record(frozen=True, slots=True)
class Condition:
    name: str
    text: str
    blocking: bool
    expires: float | None


class Engine(Services):
    """All services of the pod and their conditions. Every method takes the time and returns the actions, by service."""

    def __init__(
        self, plan: Plan, grace: float, jitter: Callable[[], float], trace: Trace, wished: float | None = None
    ) -> None:
        super().__init__(plan, jitter, trace)
        self.conditions: dict[str, Condition] = {}
        self.began = 0.0
        self.ready_at: float | None = None
        self.ending = Ending(self, grace, wished)

    # Events.

    def begin(self, now: float) -> Todo:
        self.began = now
        self.states = {name: replace(state, since=now) for name, state in self.states.items()}
        return self.converge(now)

    def handle(self, name: str, event: Event, now: float) -> Todo:
        return [*self._advance(name, event, now), *self.converge(now)]

    def tick(self, now: float) -> Todo:
        todo: Todo = []
        for name, state in list(self.states.items()):
            if state.deadline is not None and now >= state.deadline:
                # its turn to stop comes later, and nothing starts any more
                if self.phase is PodPhase.STOPPING and is_idle(state):
                    self.states[name] = replace(state, deadline=None)
                    continue
                todo += self._advance(name, Tick(), now)
        last = self.ending.tick(now)
        for condition in list(self.conditions.values()):
            if condition.expires is not None and now >= condition.expires:
                del self.conditions[condition.name]
        return [*todo, *self.converge(now), *last]

    def next_wake(self) -> float | None:
        times = [state.deadline for state in self.states.values() if state.deadline is not None]
        if self.ending.deadline is not None and self.phase is not PodPhase.STOPPED:
            times.append(self.ending.deadline)
        times += [item.expires for item in self.conditions.values() if item.expires is not None]
        return min(times, default=None)

    def still_wanted(self, name: str, step: int) -> bool:
        """Tell if a decided start must still happen: an earlier action may have stopped everything."""
        if step == STOPPER:
            return True
        return self.phase is not PodPhase.STOPPING and self.states[name].phase is not Phase.STOPPING

    # Requests.

    def up(self, name: str, now: float) -> Todo:
        self.leaving.pop(name, None)
        return self.handle(name, StartRequested(), now)

    def down(self, name: str, now: float) -> Todo:
        return self.leave(name, AfterStop.STOP, now)

    def again(self, name: str, now: float, *, bound: bool = False) -> Todo:
        """Restart a service; with `bound` also what is bound to it, which stops gently before it."""
        for other in order.bound_to(self.specs, name) if bound else ():
            if self.states[other].phase is not Phase.STOPPED:
                self.leaving.setdefault(other, AfterStop.RESTART)
        if is_idle(self.states[name]) and self.states[name].phase is not Phase.READY:
            return self.up(name, now)
        return self.leave(name, AfterStop.RESTART, now)

    def leave(self, name: str, after_stop: AfterStop, now: float) -> Todo:
        self.leaving[name] = after_stop
        return self.converge(now)

    def drain(self, now: float) -> Todo:
        return [*self.ending.drain(now), *self.converge(now)]

    def resume(self, now: float) -> Todo:
        return [*self.ending.resume(now), *self.converge(now)]

    def end(self, now: float, code: int = ENDED_WELL, why: Cause | None = None, *, drain: bool = True) -> Todo:
        return [*self.ending.begin(now, code, why, drain=drain), *self.converge(now)]

    def set_condition(self, condition: Condition) -> None:
        if condition.text:
            self.conditions[condition.name] = condition
        else:
            self.conditions.pop(condition.name, None)

    def apply(self, plan: Plan, now: float) -> tuple[Change, Todo]:
        """Bring the running services to another plan; restart only those whose processes see a change."""
        change = compare(self.plan, plan)
        fresh = {service.name: service for service in plan.services}
        restarted = []
        for name in change.changed:
            if _visible_fields(self.specs.get(name)) == _visible_fields(fresh[name]):
                self.specs[name] = fresh[name]
                continue
            restarted.append(name)
            self.next_specs[name] = fresh[name]
            self.leaving[name] = AfterStop.RESTART
        for name in change.removed:
            self.next_specs[name] = None
            self.leaving[name] = AfterStop.STOP
        for name in change.added:
            self.next_specs.pop(name, None)
            self.leaving.pop(name, None)
            self.specs[name] = fresh[name]
            self.states.setdefault(name, State(since=now))
        self.plan = plan
        return replace(change, changed=tuple(restarted)), self.converge(now)

    # Consequences.

    def _advance(self, name: str, event: Event, now: float) -> Todo:
        """Advance one service, and handle what concerns the pod's end and the checks of this service."""
        todo: Todo = []
        was_satisfied = name in self.states and is_satisfied(self.states[name])
        actions = self.advance(name, event, now)
        if not was_satisfied and name in self.states and is_satisfied(self.states[name]):
            self._run_failing_checks(name, now)
        for source, action in actions:
            if isinstance(action, EndPod):
                if self.phase in (PodPhase.BOOT, PodPhase.RUNNING):
                    cause = replace(action.why, outcome=f"{source} {action.why.outcome}")
                    todo += self.ending.begin(now, EXHAUSTED, cause, drain=False)
                continue
            if isinstance(action, Kill) and action.signal == "KILL":
                self.ending.record_kill()
            todo.append((source, action))
        return todo

    def _run_failing_checks(self, name: str, now: float) -> None:
        """Run failing periodic services that come after this one at once: its start may have ended their reason."""
        for other, spec in self.specs.items():
            state = self.states[other]
            is_scheduled = spec.kind is Kind.PERIODIC and state.phase is Phase.READY and is_idle(state)
            if is_scheduled and state.last_failure is not None and name in (*spec.needs, *spec.after):
                self.states[other] = replace(state, deadline=now)

    def converge(self, now: float) -> Todo:
        """Apply all consequences of the last event, until nothing changes."""
        todo: Todo = []
        has_changed = True
        while has_changed:
            has_changed = False
            todo += self.ending.follow(now)
            if self.leaving:
                for name in order.stoppable(self.leaving, service.stop_edges(self.specs.values()), self.states):
                    after_stop, state = self.leaving[name], self.states.get(name)
                    if state is None or _has_stopped(state, after_stop) or state.after_stop is after_stop:
                        continue
                    todo += self._advance(name, StopRequested(after_stop, self.ending.grace(self.spec(name))), now)
                    has_changed = True
                has_changed |= self._complete_stops()
            for name in order.services_to_kill(self.specs, self.states, now):
                todo += self._advance(name, BindingLost(), now)
                has_changed = True
            if self.phase in (PodPhase.BOOT, PodPhase.RUNNING, PodPhase.DRAINING):
                for name in order.startable(self.specs, self.states):
                    if self.leaving.keys().isdisjoint((name, *self.specs[name].bound_to)):
                        todo += self._advance(name, NeedsMet(), now)
                        has_changed = True
        self._update_pod_phase(now)
        return todo

    def _complete_stops(self) -> bool:
        """Forget removed services that have stopped, and give changed ones their new spec."""
        finished = [
            name
            for name, after_stop in self.leaving.items()
            if name not in self.states or _has_stopped(self.states[name], after_stop)
        ]
        for name in finished:
            del self.leaving[name]
            if name in self.next_specs:
                spec = self.next_specs.pop(name)
                if spec is None:
                    self.forget(name)
                else:
                    self.specs[name] = spec
        return bool(finished)

    def _update_pod_phase(self, now: float) -> None:
        """Note that the pod has stopped, or that it is ready for the first time."""
        if self.phase is PodPhase.STOPPING and all(is_idle(state) for state in self.states.values()):
            self.phase = PodPhase.STOPPED
            self.trace.add(now, "", "stopped", "every service has stopped")
        if self.phase is PodPhase.BOOT and self.all_ready():
            self.phase = PodPhase.RUNNING
            self.ready_at = now
            self.trace.add(now, "", "ready", f"{now - self.began:.3f} s after the start")

    def all_ready(self) -> bool:
        standing_by = order.on_standby(self.specs, self.states)
        return all(
            is_satisfied(self.states[name]) and not is_failing(spec, self.states[name])
            for name, spec in self.specs.items()
            if spec.required and name not in standing_by
        )


def _has_stopped(state: State, after_stop: AfterStop) -> bool:
    """Tell if a stop is complete: nothing runs, and the service stays stopped or waits for its next start."""
    return is_idle(state) and state.phase is (Phase.STOPPED if after_stop is AfterStop.STOP else Phase.WAITING)


def _visible_fields(service: Service | None) -> object:
    """Return the fields that a service's processes can see; other changes need no restart."""
    if service is None:
        return None
    return [
        getattr(service, name)
        for name in ("kind", "command", "prepare", "ready", "timeout", "watchdog", "user", "group", "groups", "umask",
                     "cwd", "environment", "environment_files", "limits", "capabilities", "no_new_privileges",
                     "oom_score", "every")
    ]  # fmt: skip
