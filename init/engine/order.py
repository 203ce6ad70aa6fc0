"""Which services may start or stop now, and how long each may take so that all end in time. Pure functions."""

from __future__ import annotations

from init.engine.states import LOST_WAIT, Phase, idle, satisfied
from init.plan import graph

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from init.engine.states import State
    from init.plan.graph import Edges
    from init.plan.service import DrainCommand, Service

SWEEP = 1.0  # part of the deadline kept for processes that belong to no service
REQUEUE = 5.0  # part of a worker's drain after the wait for jobs: requeue what is left, remove the node
ENDING = 0.5  # part of a drain kept to report its result before PID 1 ends it
LEAST = 5.0  # part of the deadline that the services keep, SWEEP included, even against MINIVM_DRAIN_SECONDS


def waits_for(
    service: Service, states: Mapping[str, State], standing_by: frozenset[str] = frozenset()
) -> tuple[str, ...]:
    """Return the services that this one waits for: needs that are not ready, then `after` without an outcome yet."""
    needs = (*service.needs, *service.bound_to)
    hard = [name for name in needs if name in states and not satisfied(states[name])]
    soft = [
        name
        for name in service.after
        if name in states
        and name not in hard
        and name not in standing_by
        and not satisfied(states[name])
        and not had_its_turn(states[name])
    ]
    return (*hard, *soft)


def on_standby(specs: Mapping[str, Service], states: Mapping[str, State]) -> frozenset[str]:
    """Return the services that stand by, and those that wait for them: the pod is ready without all of these."""
    waiting = {name for name, state in states.items() if state.standby and not satisfied(state)}
    added = bool(waiting)
    while added:
        more = {
            name
            for name, spec in specs.items()
            if name not in waiting and not waiting.isdisjoint((*spec.needs, *spec.bound_to))
            if name in states and not satisfied(states[name])
        }
        waiting |= more
        added = bool(more)
    return frozenset(waiting)


def bound_to(specs: Mapping[str, Service], name: str) -> frozenset[str]:
    """Return the services that are bound to this one, directly or through others."""
    bound: set[str] = set()
    while more := {other for other, spec in specs.items() if not {name, *bound}.isdisjoint(spec.bound_to)} - bound:
        bound |= more
    return frozenset(bound)


def unbound(specs: Mapping[str, Service], states: Mapping[str, State], now: float) -> list[str]:
    """Return the services to kill: bound to one that is no longer ready, and started or still stopping gently."""
    return [
        name
        for name, spec in specs.items()
        if name in states
        and ((states[name].phase in _BOUND and states[name].then is None) or _stops_gently(states[name], now))
        and any(other in states and not satisfied(states[other]) for other in spec.bound_to)
    ]


def _stops_gently(state: State, now: float) -> bool:
    late = state.deadline is not None and state.deadline > now + LOST_WAIT
    return state.phase is Phase.STOPPING and state.pid != 0 and late


# Phases in which a bound service is killed. A service that a person stopped stays stopped.
_BOUND = (Phase.PREPARING, Phase.STARTING, Phase.READY, Phase.HANDOVER, Phase.DONE, Phase.FAILED)


def had_its_turn(state: State) -> bool:
    """Tell if a soft need has failed or been stopped: services after it must not wait for ever."""
    return state.streak > 0 or state.phase in (Phase.FAILED, Phase.STOPPED, Phase.STOPPING)


def startable(specs: Mapping[str, Service], states: Mapping[str, State]) -> list[str]:
    standing_by = on_standby(specs, states)
    return [
        name
        for name, state in states.items()
        if state.phase is Phase.WAITING and name in specs and not waits_for(specs[name], states, standing_by)
    ]


def margin(grace: float) -> float:
    """Return the time left before the end of the grace period, at which Kubernetes kills."""
    return min(5.0, grace / 10)


def stoppable(leaving: Iterable[str], edges: Edges, states: Mapping[str, State]) -> list[str]:
    """Return those of the leaving services whose dependants, if they leave too, have nothing left that runs."""
    going = set(leaving)
    return [
        name
        for name in going
        if all(other not in going or other not in states or idle(states[other]) for other in edges.get(name, ()))
    ]


def longest(services: Iterable[Service]) -> float:
    """Return the longest time through the stop order if every service uses up its grace period."""
    by_name = {service.name: service for service in services}
    edges = graph.stop_edges(by_name.values())
    ends: dict[str, float] = {}
    for wave in graph.waves(edges):
        for name in wave:
            ends[name] = by_name[name].stop.grace + max((ends[other] for other in edges[name]), default=0.0)
    return max(ends.values(), default=0.0)


def graces(services: Iterable[Service], budget: float) -> dict[str, float]:
    """Return each service's grace period, all scaled alike if the longest path would exceed the budget.

    So a service that ignores TERM at the start of a long chain costs its own grace period, not those of its successors.
    """
    listed = list(services)
    needed = longest(listed)
    share = min(1.0, budget / needed) if needed > 0 else 1.0
    return {service.name: service.stop.grace * max(share, 0.0) for service in listed}


def wish(env: Mapping[str, str]) -> float | None:
    """Return how long a drain takes that gives jobs MINIVM_DRAIN_SECONDS; None if the operator set none."""
    try:
        return max(0.0, float(env["MINIVM_DRAIN_SECONDS"])) + REQUEUE + ENDING
    except (KeyError, ValueError):
        return None


def drain_budget(drain: DrainCommand, services: Iterable[Service], total: float, wished: float | None = None) -> float:
    """Return the drain's time before a stop: its budget, less the services' time, but at least half of `total`.

    What the operator wishes takes time from the services, down to LEAST.
    """
    return min(drain.budget, max(total - SWEEP - longest(services), total / 2, min(wished or 0.0, total - LEAST)))
