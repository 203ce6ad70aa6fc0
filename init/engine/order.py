"""Who may be stopped now, and how long each may take so that all of it ends in time. Pure."""

from __future__ import annotations

from init.engine.states import idle
from init.plan import graph

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from init.engine.states import State
    from init.plan.graph import Edges
    from init.plan.service import Drain, Service

SWEEP = 1.0  # what is kept of the deadline for processes that belong to no service


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
