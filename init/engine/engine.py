"""All services together: which one starts, which one stops. Decides only; the loop acts and reports back.

`init.engine.ending` ends the pod, `init.engine.machine` has one service's life and the states of all.
"""

from __future__ import annotations

from init.engine import order
from init.engine.ending import ENDED_WELL, Ending
from init.engine.machine import Services
from init.engine.states import (
    STOPPER,
    Down,
    EndPod,
    Go,
    Kill,
    Lost,
    Phase,
    PodPhase,
    State,
    Then,
    Tick,
    Up,
    idle,
    is_failing,
    satisfied,
)
from init.lean import record, replace
from init.plan import graph
from init.plan.compile import compare

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from init.engine.machine import Todo
    from init.engine.states import Cause, Event
    from init.engine.trace import Trace
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
    """The mutable whole. Every method takes the time and returns the actions, by service."""

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
                if self.phase is PodPhase.STOPPING and idle(state):
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
        return self.handle(name, Up(), now)

    def down(self, name: str, now: float) -> Todo:
        return self.leave(name, Then.STOP, now)

    def again(self, name: str, now: float, *, bound: bool = False) -> Todo:
        """Restart a service; with `bound` also what is bound to it, which stops gently before it."""
        for other in order.bound_to(self.specs, name) if bound else ():
            if self.states[other].phase is not Phase.STOPPED:
                self.leaving.setdefault(other, Then.AGAIN)
        if idle(self.states[name]) and self.states[name].phase is not Phase.READY:
            return self.up(name, now)
        return self.leave(name, Then.AGAIN, now)

    def leave(self, name: str, then: Then, now: float) -> Todo:
        self.leaving[name] = then
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
            if _process(self.specs.get(name)) == _process(fresh[name]):
                self.specs[name] = fresh[name]
                continue
            restarted.append(name)
            self.next_specs[name] = fresh[name]
            self.leaving[name] = Then.AGAIN
        for name in change.removed:
            self.next_specs[name] = None
            self.leaving[name] = Then.STOP
        for name in change.added:
            self.next_specs.pop(name, None)
            self.leaving.pop(name, None)
            self.specs[name] = fresh[name]
            self.states.setdefault(name, State(since=now))
        self.plan = plan
        return replace(change, changed=tuple(restarted)), self.converge(now)

    # Consequences.

    def _advance(self, name: str, event: Event, now: float) -> Todo:
        """Advance one service, and handle what concerns the pod's end."""
        todo: Todo = []
        for source, action in self.advance(name, event, now):
            if isinstance(action, EndPod):
                if self.phase in (PodPhase.BOOT, PodPhase.RUNNING):
                    cause = replace(action.why, outcome=f"{source} {action.why.outcome}")
                    todo += self.ending.begin(now, EXHAUSTED, cause, drain=False)
                continue
            if isinstance(action, Kill) and action.signal == "KILL":
                self.ending.killed()
            todo.append((source, action))
        return todo

    def converge(self, now: float) -> Todo:
        """Apply all consequences of the last event, until nothing changes."""
        todo: Todo = []
        moved = True
        while moved:
            moved = False
            todo += self.ending.follow(now)
            if self.leaving:
                for name in order.stoppable(self.leaving, graph.stop_edges(self.specs.values()), self.states):
                    then, state = self.leaving[name], self.states.get(name)
                    if state is None or _gone(state, then) or state.then is then:
                        continue
                    todo += self._advance(name, Down(then, self.ending.grace(self.spec(name))), now)
                    moved = True
                moved |= self._let_go()
            for name in order.unbound(self.specs, self.states, now):
                todo += self._advance(name, Lost(), now)
                moved = True
            if self.phase in (PodPhase.BOOT, PodPhase.RUNNING, PodPhase.DRAINING):
                for name in order.startable(self.specs, self.states):
                    if self.leaving.keys().isdisjoint((name, *self.specs[name].bound_to)):
                        todo += self._advance(name, Go(), now)
                        moved = True
        self._conclude(now)
        return todo

    def _let_go(self) -> bool:
        """Forget removed services that have stopped, and give changed ones their new spec."""
        finished = [
            name for name, then in self.leaving.items() if name not in self.states or _gone(self.states[name], then)
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

    def _conclude(self, now: float) -> None:
        if self.phase is PodPhase.STOPPING and all(idle(state) for state in self.states.values()):
            self.phase = PodPhase.STOPPED
            self.trace.add(now, "", "stopped", "every service has stopped")
        if self.phase is PodPhase.BOOT and self.all_ready():
            self.phase = PodPhase.RUNNING
            self.ready_at = now
            self.trace.add(now, "", "ready", f"{now - self.began:.3f} s after the start")

    def all_ready(self) -> bool:
        standing_by = order.on_standby(self.specs, self.states)
        return all(
            satisfied(self.states[name]) and not is_failing(spec, self.states[name])
            for name, spec in self.specs.items()
            if spec.required and name not in standing_by
        )


def _gone(state: State, then: Then) -> bool:
    return idle(state) and state.phase is (Phase.STOPPED if then is Then.STOP else Phase.WAITING)


def _process(service: Service | None) -> object:
    """Return the fields that a service's processes can see; other changes need no restart."""
    if service is None:
        return None
    return [
        getattr(service, name)
        for name in ("kind", "command", "prepare", "ready", "timeout", "watchdog", "user", "group", "groups", "umask",
                     "cwd", "environment", "environment_files", "limits", "capabilities", "no_new_privileges",
                     "oom_score", "every")
    ]  # fmt: skip
