"""All services together: who starts, who stops, and when the pod ends. Decides only; the loop acts and reports back."""

from __future__ import annotations

from init import boot, graph, stop
from init.choices import Choice
from init.machine import advance
from init.plan import compare
from init.records import record, replace
from init.spec import parse_service
from init.states import STOPPER, Down, EndPod, Go, Hurry, Kill, Phase, State, Then, Tick, Up, idle, satisfied

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from init.plan import Change, Plan
    from init.service import Service
    from init.states import Action, Event
    from init.trace import Trace

    Todo = list[tuple[str, Action]]

DRAIN = "drain"
RESUME = "resume"
HURRIED = 1.0  # what a second TERM leaves of each grace
ENDED_WELL, EXHAUSTED, KILLED = 0, 69, 75  # docs/reference/exit-codes.md
_OVER = (Phase.DONE, Phase.FAILED, Phase.STOPPED)
_SETTLED = (Phase.READY, *_OVER, Phase.BACKOFF)


class PodPhase(Choice):
    BOOT = "boot"
    RUNNING = "running"
    DRAINING = "draining"
    STOPPING = "stopping"
    STOPPED = "stopped"


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
        self.grace = grace
        self.trace = trace
        self.phase = PodPhase.BOOT
        self.specs: dict[str, Service] = {service.name: service for service in plan.services}
        self.states: dict[str, State] = {name: State() for name in self.specs}
        self.conditions: dict[str, Condition] = {}
        self.began = 0.0
        self.ready_at: float | None = None
        self.deadline: float | None = None  # of the whole stop
        self.exit_code = ENDED_WELL
        self.killed_at: float | None = None
        self.why_ended = ""
        self._luck = luck
        self._leaving: dict[str, Then] = {}
        self._next_specs: dict[str, Service | None] = {}  # by a new plan; None: removed
        self._graces: dict[str, float] = {}
        self._errands: dict[str, Service] = {}

    # What happens.

    def begin(self, now: float) -> Todo:
        self.began = now
        self.states = {name: replace(state, since=now) for name, state in self.states.items()}
        return self._settle(now)

    def feed(self, name: str, event: Event, now: float) -> Todo:
        return [*self._advance(name, event, now), *self._settle(now)]

    def tick(self, now: float) -> Todo:
        todo: Todo = []
        for name, state in list(self.states.items()):
            if state.deadline is not None and now >= state.deadline:
                if self.phase is PodPhase.STOPPING and idle(state):  # its turn to stop comes; nothing starts any more
                    self.states[name] = replace(state, deadline=None)
                    continue
                todo += self._advance(name, Tick(), now)
        if self.phase in (PodPhase.DRAINING, PodPhase.STOPPING) and self.deadline is not None and now >= self.deadline:
            todo += self._overrun(now)
        for condition in list(self.conditions.values()):
            if condition.expires is not None and now >= condition.expires:
                del self.conditions[condition.name]
        return [*todo, *self._settle(now)]

    def next_wake(self) -> float | None:
        times = [state.deadline for state in self.states.values() if state.deadline is not None]
        if self.deadline is not None and self.phase is not PodPhase.STOPPED:
            times.append(self.deadline)
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
        self._leaving[name] = Then.STOP
        return self._settle(now)

    def again(self, name: str, now: float) -> Todo:
        if idle(self.states[name]) and self.states[name].phase is not Phase.READY:
            return self.up(name, now)
        self._leaving[name] = Then.AGAIN
        return self._settle(now)

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
        return replace(change, changed=tuple(restarted)), self._settle(now)

    # Drain and stop.

    def drain(self, now: float, *, budget: float | None = None) -> Todo:
        """Begin the role's drain, once; whoever asks later joins it."""
        if self.plan.drain is None or self.drain_state() in ("draining", "drained"):
            return []
        self._forget(RESUME)
        return self._call(DRAIN, self.plan.drain.command, self.plan.drain.budget if budget is None else budget, now)

    def resume(self, now: float) -> Todo:
        todo: Todo = []
        if self.plan.drain is None or self.phase not in (PodPhase.BOOT, PodPhase.RUNNING):
            return todo
        if DRAIN in self.states and not idle(self.states[DRAIN]):
            self._leaving[DRAIN] = Then.STOP
            todo += self._settle(now)
        else:
            self._forget(DRAIN)
        if self.plan.drain.resume:
            todo += self._call(RESUME, self.plan.drain.resume, self.plan.drain.budget, now)
        return todo

    def drain_state(self) -> str:
        """Empty, draining, drained, or "failed: why"."""
        state = self.states.get(DRAIN)
        if state is None or RESUME in self.states:
            return ""
        if state.phase is Phase.DONE:
            return "drained"
        return f"failed: {state.why}" if state.phase in (Phase.FAILED, Phase.STOPPED) else "draining"

    def drain_text(self) -> str:
        """The same for people: with what the drain says it is at."""
        state = self.drain_state()
        return f"{state}: {self.states[DRAIN].status}" if state == "draining" and self.states[DRAIN].status else state

    def terminate(self, now: float, code: int = 0, why: str = "", *, drain: bool = True) -> Todo:
        """Begin the orderly end; a second time, hurry."""
        if self.phase in (PodPhase.DRAINING, PodPhase.STOPPING):
            return self._hurry(now)
        if self.phase is PodPhase.STOPPED:
            return []
        self.exit_code, self.why_ended = code, why
        total = self.grace - stop.margin(self.grace)
        self.deadline = now + total
        self.trace.add(now, "", "stop", why or "asked to stop")
        if drain and self.plan.drain is not None and self.drain_state() != "drained":
            self.phase = PodPhase.DRAINING
            budget = stop.drain_budget(self.plan.drain, self.specs.values(), total)
            todo = self.drain(now, budget=budget)
            state = self.states[DRAIN]
            if state.deadline is not None and state.phase is Phase.STARTING:
                self.states[DRAIN] = replace(state, deadline=min(state.deadline, now + budget))
            return [*todo, *self._settle(now)]
        return self._stop_all(now)

    def _hurry(self, now: float) -> Todo:
        todo: Todo = []
        self.trace.add(now, "", "hurry", "asked to stop again")
        self.deadline = min(
            self.deadline or now, now + HURRIED * max(1, len(graph.waves(self._stop_edges()))) + HURRIED
        )
        if self.phase is PodPhase.DRAINING:
            state = self.states[DRAIN]
            if not idle(state):
                todo += self._advance(DRAIN, Down(Then.STOP, HURRIED), now)
            todo += self._stop_all(now)
        self._graces = {name: min(grace, HURRIED) for name, grace in self._graces.items()}
        for name in list(self.states):
            todo += self._advance(name, Hurry(HURRIED), now)
        return [*todo, *self._settle(now)]

    def _overrun(self, now: float) -> Todo:
        """The deadline is over: kill all that is left at once, and a second later end without them."""
        alive = [(name, pid) for name, state in self.states.items() for pid in (state.pid, state.helper) if pid]
        self.trace.add(now, "", "deadline", f"killing {', '.join(name for name, _ in alive)}")
        if self.killed_at is not None:
            self.phase = PodPhase.STOPPED
            return []
        self.killed_at = now
        self.deadline = now + stop.SWEEP
        todo = [] if self.phase is PodPhase.STOPPING else self._stop_all(now)
        return [*todo, *((name, Kill(pid, "KILL")) for name, pid in alive)]

    def _stop_all(self, now: float) -> Todo:
        self.phase = PodPhase.STOPPING
        left = (self.deadline or now) - now - stop.SWEEP
        self._graces = stop.graces(self.specs.values(), left)
        self._leaving = dict.fromkeys(self.states, Then.STOP)
        self._next_specs = {}
        return self._settle(now)

    # Within.

    def _advance(self, name: str, event: Event, now: float) -> Todo:
        before = self.states.get(name)
        if before is None:
            return []
        after, actions = advance(self.spec(name), before, event, now, self._luck())
        self.states[name] = after
        self.trace.change(now, name, before, after)
        todo: Todo = []
        for action in actions:
            if isinstance(action, EndPod):
                if self.phase in (PodPhase.BOOT, PodPhase.RUNNING):
                    todo += self.terminate(now, EXHAUSTED, f"{name} {action.why}", drain=False)
                continue
            if isinstance(action, Kill) and action.signal == "KILL" and self.phase is PodPhase.STOPPING:
                self.exit_code = self.exit_code or KILLED
            todo.append((name, action))
        return todo

    def _settle(self, now: float) -> Todo:
        """Let every consequence of the last event follow, until nothing changes."""
        todo: Todo = []
        moved = True
        while moved:
            moved = False
            if self.phase is PodPhase.DRAINING and self.states[DRAIN].phase in _OVER:
                todo += self._stop_all(now)
            if self._leaving:
                for name in stop.stoppable(self._leaving, self._stop_edges(), self.states):
                    then, state = self._leaving[name], self.states.get(name)
                    if state is None or _gone(state, then) or state.then is then:
                        continue
                    grace = self._graces.get(name, self.spec(name).stop.grace)
                    todo += self._advance(name, Down(then, grace), now)
                    moved = True
                moved |= self._let_go()
            if self.phase in (PodPhase.BOOT, PodPhase.RUNNING, PodPhase.DRAINING):
                for name in boot.startable(self.specs, self.states):
                    if name not in self._leaving:
                        todo += self._advance(name, Go(), now)
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
                    self._forget(name)
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
        return self.specs.get(name) or self._errands[name]

    def known(self, name: str) -> Service | None:
        """A service, or the drain or resume that runs; None for what the plan no longer has."""
        return self.specs.get(name) or self._errands.get(name)

    def _stop_edges(self) -> dict[str, frozenset[str]]:
        return graph.stop_edges(self.specs.values())

    def _forget(self, name: str) -> None:
        self.states.pop(name, None)
        self.specs.pop(name, None)

    def _call(self, name: str, command: tuple[str, ...], budget: float, now: float) -> Todo:
        """Run an errand: a oneshot of the role's own, followed by the same machine as every service."""
        mapping: dict[str, object] = {"kind": "oneshot", "command": list(command), "timeout": budget}
        mapping |= {"restart": {"when": "never"}, "stop": {"grace": 2.0}}
        self._errands[name] = parse_service(name, mapping, "the role")
        self.states[name] = State(since=now)
        return [*self._advance(name, Go(), now), *self._settle(now)]


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
