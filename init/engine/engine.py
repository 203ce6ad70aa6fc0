"""All services together: who starts, who stops. Decides only; the loop acts and reports back.

How the pod ends is in `init.engine.ending`; one service's life in `init.engine.machine`.
"""

from __future__ import annotations

from init.engine import boot, machine
from init.engine import order as stop
from init.engine.ending import Ending
from init.engine.states import (
    OVER,
    STOPPER,
    Down,
    EndPod,
    Go,
    Kill,
    Phase,
    PodPhase,
    State,
    Then,
    Tick,
    Up,
    idle,
    satisfied,
)
from init.plan import graph
from init.plan.compile import compare
from init.records import record, replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from init.engine.states import Action, Event
    from init.engine.trace import Trace
    from init.plan.compile import Change, Plan
    from init.plan.service import Service

    Todo = list[tuple[str, Action]]

EXHAUSTED = 69  # docs/reference/exit-codes.md
_SETTLED = (Phase.READY, *OVER, Phase.BACKOFF)


@record(frozen=True, slots=True)
class Condition:
    name: str
    text: str
    blocking: bool
    expires: float | None


class Engine:
    """The mutable whole. Every method takes the time and returns what is to be done, by service."""

    def __init__(self, plan: Plan, grace: float, luck: Callable[[], float], trace: Trace) -> None:
        self.plan = plan
        self.trace = trace
        self.phase = PodPhase.BOOT
        self.specs: dict[str, Service] = {service.name: service for service in plan.services}
        self.states: dict[str, State] = {name: State() for name in self.specs}
        self.conditions: dict[str, Condition] = {}
        self.began = 0.0
        self.ready_at: float | None = None
        self.ending = Ending(self, grace)
        self._luck = luck
        self._leaving: dict[str, Then] = {}  # told to stop when its dependants have, and what comes after
        self._next_specs: dict[str, Service | None] = {}  # by a new plan; None: removed

    # What happens.

    def begin(self, now: float) -> Todo:
        self.began = now
        self.states = {name: replace(state, since=now) for name, state in self.states.items()}
        return self.settle(now)

    def feed(self, name: str, event: Event, now: float) -> Todo:
        return [*self.advance(name, event, now), *self.settle(now)]

    def tick(self, now: float) -> Todo:
        todo: Todo = []
        for name, state in list(self.states.items()):
            if state.deadline is not None and now >= state.deadline:
                if self.phase is PodPhase.STOPPING and idle(state):  # its turn to stop comes; nothing starts any more
                    self.states[name] = replace(state, deadline=None)
                    continue
                todo += self.advance(name, Tick(), now)
        todo += self.ending.tick(now)
        for condition in list(self.conditions.values()):
            if condition.expires is not None and now >= condition.expires:
                del self.conditions[condition.name]
        return [*todo, *self.settle(now)]

    def next_wake(self) -> float | None:
        times = [state.deadline for state in self.states.values() if state.deadline is not None]
        if self.ending.deadline is not None and self.phase is not PodPhase.STOPPED:
            times.append(self.ending.deadline)
        times += [item.expires for item in self.conditions.values() if item.expires is not None]
        return min(times, default=None)

    def still_wanted(self, name: str, step: int) -> bool:
        """Whether a start that was decided should still be made: an action before it may have stopped everything."""
        if step == STOPPER:
            return True
        return self.phase is not PodPhase.STOPPING and self.states[name].phase is not Phase.STOPPING

    # What is asked.

    def up(self, name: str, now: float) -> Todo:
        self._leaving.pop(name, None)
        return self.feed(name, Up(), now)

    def down(self, name: str, now: float) -> Todo:
        return self.leave(name, Then.STOP, now)

    def again(self, name: str, now: float) -> Todo:
        if idle(self.states[name]) and self.states[name].phase is not Phase.READY:
            return self.up(name, now)
        return self.leave(name, Then.AGAIN, now)

    def leave(self, name: str, then: Then, now: float) -> Todo:
        self._leaving[name] = then
        return self.settle(now)

    def leave_all(self, now: float) -> Todo:
        """Everything stops, and nothing comes back."""
        self._leaving = dict.fromkeys(self.states, Then.STOP)
        self._next_specs = {}
        return self.settle(now)

    def set_condition(self, condition: Condition) -> None:
        if condition.text:
            self.conditions[condition.name] = condition
        else:
            self.conditions.pop(condition.name, None)

    def apply(self, plan: Plan, now: float) -> tuple[Change, Todo]:
        """Bring the running services to another plan: only what changed in what a process sees is restarted."""
        change = compare(self.plan, plan)
        fresh = {service.name: service for service in plan.services}
        restarted = []
        for name in change.changed:
            if _process(self.specs.get(name)) == _process(fresh[name]):
                self.specs[name] = fresh[name]
                continue
            restarted.append(name)
            self._next_specs[name] = fresh[name]
            self._leaving[name] = Then.AGAIN
        for name in change.removed:
            self._next_specs[name] = None
            self._leaving[name] = Then.STOP
        for name in change.added:
            self._next_specs.pop(name, None)
            self._leaving.pop(name, None)
            self.specs[name] = fresh[name]
            self.states.setdefault(name, State(since=now))
        self.plan = plan
        return replace(change, changed=tuple(restarted)), self.settle(now)

    # What follows.

    def advance(self, name: str, event: Event, now: float) -> Todo:
        before = self.states.get(name)
        if before is None:
            return []
        after, actions = machine.advance(self.spec(name), before, event, now, self._luck())
        self.states[name] = after
        self.trace.change(now, name, before, after)
        todo: Todo = []
        for action in actions:
            if isinstance(action, EndPod):
                if self.phase in (PodPhase.BOOT, PodPhase.RUNNING):
                    why = replace(action.why, outcome=f"{name} {action.why.outcome}")
                    todo += self.ending.begin(now, EXHAUSTED, why, drain=False)
                continue
            if isinstance(action, Kill) and action.signal == "KILL":
                self.ending.killed()
            todo.append((name, action))
        return todo

    def settle(self, now: float) -> Todo:
        """Let every consequence of the last event follow, until nothing changes."""
        todo: Todo = []
        moved = True
        while moved:
            moved = False
            todo += self.ending.follow(now)
            if self._leaving:
                for name in stop.stoppable(self._leaving, graph.stop_edges(self.specs.values()), self.states):
                    then, state = self._leaving[name], self.states.get(name)
                    if state is None or _gone(state, then) or state.then is then:
                        continue
                    todo += self.advance(name, Down(then, self.ending.grace(self.spec(name))), now)
                    moved = True
                moved |= self._let_go()
            if self.phase in (PodPhase.BOOT, PodPhase.RUNNING, PodPhase.DRAINING):
                for name in boot.startable(self.specs, self.states):
                    if name not in self._leaving:
                        todo += self.advance(name, Go(), now)
                        moved = True
        self._conclude(now)
        return todo

    def _let_go(self) -> bool:
        """Those that left are gone: forget the removed, bring back the changed under their new spec."""
        gone = [
            name for name, then in self._leaving.items() if name not in self.states or _gone(self.states[name], then)
        ]
        for name in gone:
            del self._leaving[name]
            if name in self._next_specs:
                spec = self._next_specs.pop(name)
                if spec is None:
                    self.forget(name)
                else:
                    self.specs[name] = spec
        return bool(gone)

    def _conclude(self, now: float) -> None:
        if self.phase is PodPhase.STOPPING and all(idle(state) for state in self.states.values()):
            self.phase = PodPhase.STOPPED
            self.trace.add(now, "", "stopped", "every service has stopped")
        if self.phase is PodPhase.BOOT and self.all_ready():
            self.phase = PodPhase.RUNNING
            self.ready_at = now
            self.trace.add(now, "", "ready", f"{now - self.began:.3f} s after the start")

    def all_ready(self) -> bool:
        return all(satisfied(self.states[name]) for name, spec in self.specs.items() if spec.required)

    def settled(self, name: str) -> bool:
        """Nothing more will happen to it by itself, for now."""
        state = self.states.get(name)
        if state is None:
            return True
        return name not in self._leaving and not state.reloading and state.phase in _SETTLED

    def spec(self, name: str) -> Service:
        return self.specs.get(name) or self.ending.errands[name]

    def known(self, name: str) -> Service | None:
        """A service, or the drain or resume that runs; None for what the plan no longer has."""
        return self.specs.get(name) or self.ending.errands.get(name)

    def forget(self, name: str) -> None:
        self.states.pop(name, None)
        self.specs.pop(name, None)


def _gone(state: State, then: Then) -> bool:
    return idle(state) and state.phase is (Phase.STOPPED if then is Then.STOP else Phase.WAITING)


def _process(service: Service | None) -> object:
    """What of a service its processes can see; a change of anything else needs no restart."""
    if service is None:
        return None
    return [
        getattr(service, name)
        for name in ("kind", "command", "prepare", "ready", "timeout", "watchdog", "user", "group", "groups", "umask",
                     "cwd", "environment", "environment_files", "limits", "capabilities", "no_new_privileges",
                     "oom_score", "every")
    ]  # fmt: skip
