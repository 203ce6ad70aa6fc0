"""Who may start now, who may be stopped now, and how long each may take so that all of it ends in time. Pure."""

from __future__ import annotations

from init.engine.states import Phase, idle, satisfied
from init.plan import graph

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from init.engine.states import State
    from init.plan.graph import Edges
    from init.plan.service import Drain, Service

SWEEP = 1.0  # what is kept of the deadline for processes that belong to no service


def waits_for(service: Service, states: Mapping[str, State]) -> tuple[str, ...]:
    """What still keeps it from starting: unready needs, then soft ones without any outcome yet."""
    hard = [name for name in service.needs if name in states and not satisfied(states[name])]
    soft = [
        name
        for name in service.after
        if name in states and name not in hard and not satisfied(states[name]) and not had_its_turn(states[name])
    ]
    return (*hard, *soft)


def had_its_turn(state: State) -> bool:
    """A soft need is over once it has failed or been stopped: whoever comes after it does not wait for ever."""
    return state.streak > 0 or state.phase in (Phase.FAILED, Phase.STOPPED, Phase.STOPPING)


def startable(specs: Mapping[str, Service], states: Mapping[str, State]) -> list[str]:
    return [
        name
        for name, state in states.items()
        if state.phase is Phase.WAITING and name in specs and not waits_for(specs[name], states)
    ]


def margin(grace: float) -> float:
    """Kubernetes kills at the end of the grace period; we end before that."""
    return min(5.0, grace / 10)


def stoppable(leaving: Iterable[str], edges: Edges, states: Mapping[str, State]) -> list[str]:
    """Of those to be stopped, the ones whose dependants among them have nothing left that runs."""
    going = set(leaving)
    return [
        name
        for name in going
        if all(other not in going or other not in states or idle(states[other]) for other in edges.get(name, ()))
    ]


def longest(services: Iterable[Service]) -> float:
    """The slowest way through the stop order, if everyone uses up its grace."""
    found = {service.name: service for service in services}
    edges = graph.stop_edges(found.values())
    ends: dict[str, float] = {}
    for wave in graph.waves(edges):
        for name in wave:
            ends[name] = found[name].stop.grace + max((ends[other] for other in edges[name]), default=0.0)
    return max(ends.values(), default=0.0)


def graces(services: Iterable[Service], budget: float) -> dict[str, float]:
    """Each service's grace, all shortened alike if the slowest way through would not fit the budget.

    So one that ignores TERM at the start of a long chain costs its own grace and not that of those after it.
    """
    found = list(services)
    needed = longest(found)
    share = min(1.0, budget / needed) if needed > 0 else 1.0
    return {service.name: service.stop.grace * max(share, 0.0) for service in found}


def drain_budget(drain: Drain, services: Iterable[Service], total: float) -> float:
    """The drain's time before a stop: its own budget, less what the services need to stop, but at least half."""
    return min(drain.budget, max(total - SWEEP - longest(services), total / 2))
