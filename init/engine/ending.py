"""The end of a pod: the role's drain, then all services in stop order, under one deadline. Decides only.

The caller lets the consequences follow (`Engine.converge`).
"""

from __future__ import annotations

from init.engine import order
from init.engine.states import (
    OVER,
    AfterStop,
    Kill,
    NeedsMet,
    Phase,
    PodPhase,
    ShortenGrace,
    State,
    StopRequested,
    is_idle,
)
from init.lean import replace
from init.plan import service
from init.plan.spec import parse_service

TYPE_CHECKING = False
if TYPE_CHECKING:
    from init.engine.machine import Services, Todo
    from init.engine.states import Cause
    from init.plan.service import Service

DRAIN = "drain"
RESUME = "resume"
HURRIED = 1.0  # seconds of each grace period that a second TERM leaves
ENDED_WELL, KILLED = 0, 75  # docs/reference/exit-codes.md


class Ending:
    """The part of the engine that is idle until a drain or the end is requested."""

    def __init__(self, services: Services, grace: float, wished: float | None = None) -> None:
        self.exit_code = ENDED_WELL
        self.why: Cause | None = None
        self.deadline: float | None = None  # for the whole stop
        self.killed_at: float | None = None
        self.requested = ""  # drain or resume, whichever was requested last
        self._held: tuple[str, tuple[str, ...], float] | None = None  # that request, until the other command has ended
        self._services = services
        self._grace = grace  # the whole pod's grace period
        self._wished = wished  # of which the operator gives the drain so many seconds
        self._graces: dict[str, float] = {}  # of each service, once the stop has begun

    # The drain.

    def drain(self, now: float, *, budget: float | None = None) -> Todo:
        """Begin the role's drain once; later requests join it."""
        drain = self._services.plan.drain
        if drain is None or self.drain_state() in ("draining", "drained"):
            return []
        return self._ask(DRAIN, drain.command, drain.budget if budget is None else budget, now)

    def resume(self, now: float) -> Todo:
        """Take the drain back: end it if it still runs, then run the role's resume command."""
        services, drain = self._services, self._services.plan.drain
        if drain is None or services.phase not in (PodPhase.BOOT, PodPhase.RUNNING) or self.is_resuming():
            return []
        return self._ask(RESUME, drain.resume, drain.budget, now)

    def drain_state(self) -> str:
        """Return "", "draining", "drained" or "failed"; `init.view.reasons.drain_text` has the text for people."""
        if self.requested != DRAIN:
            return ""
        state = self._services.states.get(DRAIN)
        if self._held is not None or state is None:
            return "draining"
        if state.phase is Phase.DONE:
            return "drained"
        return "failed" if state.phase in (Phase.FAILED, Phase.STOPPED) else "draining"

    def is_resuming(self) -> bool:
        return self.requested == RESUME and (self._held is not None or not self._services.stable(RESUME))

    def may_wait(self, now: float) -> bool:
        """Tell if a drain that cannot start now may start later: not once the services need the remaining time."""
        needed = order.longest_stop(self._services.specs.values()) + order.SWEEP
        return self.deadline is None or now + needed < self.deadline

    def _ask(self, name: str, command: tuple[str, ...], budget: float, now: float) -> Todo:
        """Run one errand at a time: of two that update Slurm at once, the slower one would decide the node's state."""
        self.requested, self._held = name, (name, command, budget)
        services = self._services
        for other in (DRAIN, RESUME):
            if other in services.states and not is_idle(services.states[other]):
                services.leaving[other] = AfterStop.STOP
        return self._run_held(now)

    def _run_held(self, now: float) -> Todo:
        """Start the last request once nothing of the previous errand runs."""
        services = self._services
        if self._held is None or not (services.stable(DRAIN) and services.stable(RESUME)):
            return []
        (name, command, budget), self._held = self._held, None
        services.forget(DRAIN)
        services.forget(RESUME)
        return self._run(name, command, budget, now) if command else []

    def _run(self, name: str, command: tuple[str, ...], budget: float, now: float) -> Todo:
        """Run an errand with the same state machine as a service."""
        mapping: dict[str, object] = {"kind": "oneshot", "command": list(command), "timeout": budget}
        mapping |= {"restart": {"when": "never"}, "stop": {"grace": 2.0}}
        self._services.errands[name] = parse_service(name, mapping, "the role")
        self._services.states[name] = State(since=now)
        return self._services.advance(name, NeedsMet(), now)

    # The end.

    def begin(self, now: float, code: int = ENDED_WELL, why: Cause | None = None, *, drain: bool = True) -> Todo:
        """Begin the orderly end; a second request shortens all grace periods."""
        services = self._services
        if services.phase in (PodPhase.DRAINING, PodPhase.STOPPING):
            return self._hurry(now)
        if services.phase is PodPhase.STOPPED:
            return []
        self.exit_code, self.why = code, why
        total = self._grace - order.kill_margin(self._grace)
        self.deadline = now + total
        services.trace.add(now, "", "stop", str(why or "asked to stop"))
        if drain and services.plan.drain is not None and self.drain_state() != "drained":
            services.phase = PodPhase.DRAINING
            budget = order.drain_budget(services.plan.drain, services.specs.values(), total, self._wished)
            todo = self.drain(now, budget=budget)
            state = services.states.get(DRAIN)
            if self._held is not None:  # the drain waits for the end of a resume
                self._held = (*self._held[:2], min(self._held[2], budget))
            elif state is not None and state.deadline is not None and state.phase is Phase.STARTING:
                # a drain that runs already, with more time
                services.states[DRAIN] = replace(state, deadline=min(state.deadline, now + budget))
            return todo
        self._stop_all(now)
        return []

    def follow(self, now: float) -> Todo:
        """Run an errand that waited for another one; stop the services when the drain is over."""
        if self._held is not None:
            return self._run_held(now)
        if self._services.phase is PodPhase.DRAINING and self._services.states[DRAIN].phase in OVER:
            self._stop_all(now)
        return []

    def tick(self, now: float) -> Todo:
        """At the deadline kill all that is left; a second later end without it."""
        services = self._services
        ending = services.phase in (PodPhase.DRAINING, PodPhase.STOPPING)
        if not ending or self.deadline is None or now < self.deadline:
            return []
        alive = [(name, pid) for name, state in services.states.items() for pid in (state.pid, state.stop_pid) if pid]
        services.trace.add(now, "", "deadline", f"killing {', '.join(name for name, _ in alive)}")
        if self.killed_at is not None:
            services.phase = PodPhase.STOPPED
            return []
        self.killed_at = now
        self.deadline = now + order.SWEEP
        if services.phase is not PodPhase.STOPPING:
            self._stop_all(now)
        return [(name, Kill(pid, "KILL")) for name, pid in alive]

    def grace(self, service: Service) -> float:
        """Return the service's grace period, or the part of it that the pod's deadline leaves."""
        return self._graces.get(service.name, service.stop.grace)

    def record_kill(self) -> None:
        """Record in the exit code that a service had to be killed during the stop, unless the code is a worse one."""
        if self._services.phase is PodPhase.STOPPING:
            self.exit_code = self.exit_code or KILLED

    def _stop_all(self, now: float) -> None:
        services = self._services
        services.phase = PodPhase.STOPPING
        self._held = None
        remaining = (self.deadline or now) - now - order.SWEEP
        self._graces = order.scale_graces(services.specs.values(), remaining)
        services.leave_all()

    def _hurry(self, now: float) -> Todo:
        services = self._services
        todo: Todo = []
        services.trace.add(now, "", "hurry", "asked to stop again")
        waves = len(service.waves(service.stop_edges(services.specs.values())))
        self.deadline = min(self.deadline or now, now + HURRIED * max(1, waves) + HURRIED)
        if services.phase is PodPhase.DRAINING:
            if DRAIN in services.states and not is_idle(services.states[DRAIN]):
                todo += services.advance(DRAIN, StopRequested(AfterStop.STOP, HURRIED), now)
            self._stop_all(now)
        self._graces = {name: min(grace, HURRIED) for name, grace in self._graces.items()}
        for name in list(services.states):
            todo += services.advance(name, ShortenGrace(HURRIED), now)
        return todo
