"""All services of the pod: specs, states, and those on the way out.

The engine (`init.engine.engine`) and the pod's end (`init.engine.ending`) advance them; this module knows neither.
"""

from __future__ import annotations

from init.engine import machine
from init.engine.states import OVER, Impossible, Phase, PodPhase, State, Then

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from init.engine.states import Action, Event
    from init.engine.trace import Trace
    from init.plan.compile import Plan
    from init.plan.service import Service

    Todo = list[tuple[str, Action]]

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
        after, actions = machine.advance(self.spec(name), before, event, now, self._jitter())
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
