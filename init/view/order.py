"""Format a plan for people: start order in waves, stop order, and each service's dependencies. Pure."""

from __future__ import annotations

from init.plan import graph
from init.view.status import BOLD, DIM, paint

TYPE_CHECKING = False
if TYPE_CHECKING:
    from init.plan.compile import Plan
    from init.plan.spec import Service, WhenCondition


def order(plan: Plan, *, colour: bool) -> str:
    edges = graph.start_edges(plan.services)
    by_name = {service.name: service for service in plan.services}
    width = max((len(name) for name in by_name), default=0)
    lines = [paint(f"{plan.role or 'plan'}: {len(by_name)} services", BOLD, colour), "", "start:"]
    for number, wave in enumerate(graph.waves(edges), start=1):
        for place, name in enumerate(wave):
            head = f"{number:3}" if place == 0 else "   "
            lines.append(f"{head}  {name:{width}}  {describe(by_name[name], colour)}".rstrip())
    lines += ["", "stop:"]
    for number, wave in enumerate(graph.waves(graph.stop_edges(plan.services)), start=1):
        lines.append(f"{number:3}  {', '.join(f'{name} ({by_name[name].stop.grace:g}s)' for name in wave)}")
    if plan.drain is not None:
        lines += ["", f"drain: {' '.join(plan.drain.command)} (at most {plan.drain.budget:g}s)"]
    return "\n".join(lines)


def describe(service: Service, colour: bool) -> str:
    parts = [service.kind.value, f"ready: {ready(service)}"]
    if service.needs:
        parts.append(f"needs {', '.join(service.needs)}")
    if service.after:
        parts.append(f"after {', '.join(service.after)}")
    if service.bound_to:
        parts.append(f"bound to {', '.join(service.bound_to)}")
    if service.when:
        parts.append(f"when {' and '.join(condition(item) for item in service.when)}")
    if not service.required:
        parts.append("optional")
    return paint("; ".join(parts), DIM, colour)


def ready(service: Service) -> str:
    if service.kind.value == "oneshot":
        return "exit 0"
    target = " ".join(service.ready.command) or service.ready.target
    return f"{service.ready.probe.value} {target}".strip()


def condition(item: WhenCondition) -> str:
    if item.path:
        return f"{item.path} {'exists' if item.wanted else 'is missing'}"
    if item.one_of:
        return f"{item.value} is {' or '.join(item.one_of)}"
    if item.none_of:
        return f"{item.value} is not {' or '.join(item.none_of)}"
    return f"{item.value} is {'set' if item.wanted else 'empty'}"
