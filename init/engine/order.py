"""Order among services: which may start, which must stop or be killed now, and how long each may take. Pure functions.

- Start: a service waits for its needs until they are ready, and for `after` until those have had their turn.
- Stop: a service waits until nothing that depends on it runs.
- Time: all grace periods are scaled alike, so that the longest way through the stop order fits into the pod's deadline.
"""

from __future__ import annotations

from init.engine.states import LOST_WAIT, Phase, is_idle, is_satisfied
from init.plan import service

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from init.engine.states import State
    from init.plan.service import DrainCommand, Edges, Service

SWEEP = 1.0  # part of the deadline kept for processes that belong to no service
REQUEUE = 5.0  # part of a worker's drain after the wait for jobs: requeue what is left, remove the node
ENDING = 0.5  # part of a drain kept to report its result before PID 1 ends it
LEAST = 5.0  # part of the deadline that the services keep, SWEEP included, even against MINIVM_DRAIN_SECONDS


def waits_for(
    service: Service, states: Mapping[str, State], standing_by: frozenset[str] = frozenset()
) -> tuple[str, ...]:
    """Return the services that this one waits for: needs that are not ready, then `after` without an outcome yet."""
    needs = (*service.needs, *service.bound_to)
    unmet_needs = [name for name in needs if name in states and not is_satisfied(states[name])]
    pending = [
        name
        for name in service.after
        if name in states
        and name not in unmet_needs
        and name not in standing_by
        and not is_satisfied(states[name])
        and not has_had_its_turn(states[name])
    ]
    return (*unmet_needs, *pending)


def on_standby(specs: Mapping[str, Service], states: Mapping[str, State]) -> frozenset[str]:
    """Return the services that stand by, and those that wait for them: the pod is ready without all of these."""
    unready = {name for name, state in states.items() if not is_satisfied(state)}
    result = {name for name in unready if states[name].standby}
    while result and (dependants := _find_dependants(result, specs) & unready - result):
        result |= dependants
    return frozenset(result)


def _find_dependants(names: set[str], specs: Mapping[str, Service]) -> set[str]:
    return {name for name, spec in specs.items() if not names.isdisjoint((*spec.needs, *spec.bound_to))}


def bound_to(specs: Mapping[str, Service], name: str) -> frozenset[str]:
    """Return the services that are bound to this one, directly or through other services."""
    bound: set[str] = set()
    while new := {other for other, spec in specs.items() if not {name, *bound}.isdisjoint(spec.bound_to)} - bound:
        bound |= new
    return frozenset(bound)


# Phases in which a bound service is killed. A service that a person stopped stays stopped.
_BOUND = (Phase.PREPARING, Phase.STARTING, Phase.READY, Phase.HANDOVER, Phase.DONE, Phase.FAILED)


def services_to_kill(specs: Mapping[str, Service], states: Mapping[str, State], now: float) -> list[str]:
    """Return the services that are bound to one that is no longer ready, and that run or still stop gently."""
    return [
        name
        for name, spec in specs.items()
        if name in states
        and (_is_up(states[name]) or _stops_gently(states[name], now))
        and any(other in states and not is_satisfied(states[other]) for other in spec.bound_to)
    ]


def _is_up(state: State) -> bool:
    return state.phase in _BOUND and state.after_stop is None


def _stops_gently(state: State, now: float) -> bool:
    """Tell if the service has more time to stop than a lost lease allows."""
    has_time = state.deadline is not None and state.deadline > now + LOST_WAIT
    return state.phase is Phase.STOPPING and state.pid != 0 and has_time


def has_had_its_turn(state: State) -> bool:
    """Tell if a soft need has failed, been stopped or is late: services after it must not wait for ever."""
    return state.failures_in_row > 0 or state.late or state.phase in (Phase.FAILED, Phase.STOPPED, Phase.STOPPING)


def startable(specs: Mapping[str, Service], states: Mapping[str, State]) -> list[str]:
    """Return the waiting services that wait for no other."""
    standing_by = on_standby(specs, states)
    return [
        name
        for name, state in states.items()
        if state.phase is Phase.WAITING and name in specs and not waits_for(specs[name], states, standing_by)
    ]


def kill_margin(grace: float) -> float:
    """Return the time that PID 1 keeps for itself before the end of the grace period, when Kubernetes kills the pod."""
    return min(5.0, grace / 10)


def stoppable(leaving: Iterable[str], edges: Edges, states: Mapping[str, State]) -> list[str]:
    """Return the leaving services of whose dependants, as far as these leave too, nothing runs any more."""
    stopping = set(leaving)
    return [
        name
        for name in stopping
        if all(is_idle(states[other]) for other in edges.get(name, ()) if other in stopping and other in states)
    ]


def longest_stop(services: Iterable[Service]) -> float:
    """Return the longest time through the stop order if every service uses up its grace period."""
    by_name = {service.name: service for service in services}
    edges = service.stop_edges(by_name.values())
    ends: dict[str, float] = {}
    for wave in service.waves(edges):
        for name in wave:
            ends[name] = by_name[name].stop.grace + max((ends[other] for other in edges[name]), default=0.0)
    return max(ends.values(), default=0.0)


def scale_graces(services: Iterable[Service], budget: float) -> dict[str, float]:
    """Return each service's grace period, all scaled alike if the longest path would exceed the budget.

    So a service that ignores TERM at the start of a long chain costs its own grace period, not those of its successors.
    """
    listed = list(services)
    needed = longest_stop(listed)
    share = min(1.0, budget / needed) if needed > 0 else 1.0
    return {service.name: service.stop.grace * max(share, 0.0) for service in listed}


def read_wished_drain_time(env: Mapping[str, str]) -> float | None:
    """Return how long a drain takes that gives jobs MINIVM_DRAIN_SECONDS; None if the operator set none."""
    try:
        return max(0.0, float(env["MINIVM_DRAIN_SECONDS"])) + REQUEUE + ENDING
    except (KeyError, ValueError):
        return None


def drain_budget(drain: DrainCommand, services: Iterable[Service], total: float, wished: float | None = None) -> float:
    """Return the drain's time before a stop: its budget, less the services' time, but at least half of `total`.

    What the operator wishes takes time from the services, down to LEAST.
    """
    return min(drain.budget, max(total - SWEEP - longest_stop(services), total / 2, min(wished or 0.0, total - LEAST)))
