"""The boot as a waterfall: in the terminal, as Chrome's trace events, as SVG. Pure: events in, text out."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from init.engine.states import Phase
from init.lean import record
from init.plan import service
from init.view.status import BOLD, DIM, GREEN, RED, YELLOW, duration, paint

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from init.plan.compile import Plan
    from init.plan.service import Service, WhenCondition

# Events that start a span; all others only mark a moment.
STATES = tuple(phase.value for phase in Phase)
_GLYPHS = {"waiting": "·", "preparing": "▒", "starting": "█", "backoff": "x", "stopping": "▒", "handover": "█"}
_PAINTS = {"waiting": DIM, "preparing": YELLOW, "starting": YELLOW, "backoff": RED, "failed": RED, "ready": GREEN}
_FILLS = {
    "waiting": "#d8dee4",
    "preparing": "#e8c468",
    "starting": "#4c8dd6",
    "handover": "#4c8dd6",
    "ready": "#7cc47f",
    "done": "#7cc47f",
    "backoff": "#d9534f",
    "failed": "#d9534f",
    "stopping": "#b39ddb",
    "stopped": "#eeeeee",
}


@record(frozen=True, slots=True)
class Span:
    service: str
    state: str
    start: float
    end: float
    detail: str


def boot_end(events: Sequence[Mapping[str, Any]], now: float) -> float:
    """Return when the pod was first ready, or now if it never was."""
    for event in events:
        if not event["service"] and event["event"] == "ready":
            return float(event["t"])
    return now


def spans(events: Sequence[Mapping[str, Any]], until: float) -> list[Span]:
    """Return each service's states with start and end, up to a moment. A service waits from the very start."""
    open_: dict[str, tuple[str, float, str]] = {}
    listed: list[Span] = []
    for event in events:
        service, state, at = str(event["service"]), str(event["event"]), float(event["t"])
        if not service or state not in STATES or at > until:
            continue
        before, since, detail = open_.get(service, ("waiting", 0.0, ""))
        listed.append(Span(service, before, since, at, detail))
        open_[service] = (state, at, str(event.get("detail", "")))
    listed += [Span(service, state, since, until, detail) for service, (state, since, detail) in open_.items()]
    return [span for span in listed if span.end > span.start or span.state in ("ready", "done", "failed")]


def by_service(items: Sequence[Span]) -> dict[str, list[Span]]:
    grouped: dict[str, list[Span]] = {}
    for span in items:
        grouped.setdefault(span.service, []).append(span)
    return dict(sorted(grouped.items(), key=lambda item: (first_start(item[1]), item[0])))


def first_start(items: Sequence[Span]) -> float:
    return min((span.start for span in items if span.state != "waiting"), default=float("inf"))


def ready_at(items: Sequence[Span]) -> float | None:
    """Return when the service was first ready or done."""
    return min((span.start for span in items if span.state in ("ready", "done")), default=None)


def blocker(service: str, needs: Mapping[str, Sequence[str]], grouped: Mapping[str, list[Span]]) -> str:
    """Return the need that was ready last, the one that delayed the service."""
    ends = [(ready_at(grouped[name]) or float("inf"), name) for name in needs.get(service, ()) if name in grouped]
    return max(ends)[1] if ends else ""


def waterfall(
    items: Sequence[Span], until: float, needs: Mapping[str, Sequence[str]], *, colour: bool, width: int
) -> str:
    grouped = by_service(items)
    if not grouped or until <= 0:
        return "nothing has happened yet"
    names = max(len(name) for name in grouped)
    bar = max(20, width - names - 30)
    lines = [f"{'':{names}}  0{duration(until):>{bar - 1}}"]
    for name, own in grouped.items():
        cells = [" "] * bar
        shades = [""] * bar
        for span in own:
            if span.state in ("ready", "done", "stopped", "failed"):
                continue
            first = min(bar - 1, int(span.start / until * bar))
            last = min(bar, max(first + 1, round(span.end / until * bar)))
            for place in range(first, last):
                if cells[place] in (" ", "·"):
                    cells[place], shades[place] = _GLYPHS.get(span.state, "█"), _PAINTS.get(span.state, "")
        at = ready_at(own)
        took = f"{duration(at - first_start(own))}" if at is not None else own[-1].state
        end = f"{duration(at):>7}" if at is not None else "      -"
        waited = blocker(name, needs, grouped)
        text = "".join(paint(cell, shade, colour) for cell, shade in zip(cells, shades, strict=True))
        tail = f" {end} ({took})" + (paint(f" after {waited}", DIM, colour) if waited else "")
        lines.append(f"{name:{names}}  {text}{tail}".rstrip())
    lines.append(f"{'':{names}}  · waiting  ▒ preparing  █ starting  x backoff")
    return "\n".join(lines)


def to_chrome(events: Sequence[Mapping[str, Any]], now: float) -> str:
    """Format as trace events: complete events by service, instants for the rest; times in microseconds."""
    drawn = spans(events, now)
    rows = {name: place for place, name in enumerate(["", *by_service(drawn)])}
    out: list[dict[str, Any]] = [
        {"ph": "M", "pid": 1, "tid": place, "name": "thread_name", "args": {"name": name or "pod"}}
        for name, place in rows.items()
    ]
    for span in drawn:
        item: dict[str, Any] = {"ph": "X", "pid": 1, "tid": rows[span.service], "name": span.state, "cat": "state"}
        item |= {"ts": round(span.start * 1e6), "dur": round((span.end - span.start) * 1e6)}
        out.append(item | ({"args": {"detail": span.detail}} if span.detail else {}))
    for event in events:
        if event["service"] and event["event"] in STATES:
            continue
        place = rows.get(str(event["service"]), 0)
        item = {"ph": "i", "s": "t", "pid": 1, "tid": place, "name": event["event"], "ts": round(event["t"] * 1e6)}
        out.append(item | ({"args": {"detail": event["detail"]}} if event.get("detail") else {}))
    return json.dumps({"traceEvents": out, "displayTimeUnit": "ms"}, indent=1) + "\n"


def to_svg(items: Sequence[Span], until: float) -> str:
    from xml.sax.saxutils import escape

    grouped = by_service(items)
    margin, wide, high = 130, 700, 22
    total = high * (len(grouped) + 2)
    scale = wide / until if until > 0 else 0.0
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{margin + wide + 90}" height="{total}" '
        'font-family="monospace" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for step in range(6):
        x = margin + wide * step / 5
        out.append(f'<line x1="{x:.1f}" y1="{high - 6}" x2="{x:.1f}" y2="{total - high}" stroke="#eee"/>')
        out.append(f'<text x="{x:.1f}" y="{high - 9}" fill="#666">{duration(until * step / 5)}</text>')
    for row, (name, own) in enumerate(grouped.items(), start=1):
        y = row * high
        out.append(f'<text x="4" y="{y + 15}">{escape(name)}</text>')
        for span in own:
            x, width = margin + span.start * scale, max(1.0, (span.end - span.start) * scale)
            title = escape(f"{name} {span.state} {duration(span.end - span.start)} {span.detail}".strip())
            out.append(
                f'<rect x="{x:.1f}" y="{y + 3}" width="{width:.1f}" height="{high - 6}" '
                f'fill="{_FILLS.get(span.state, "#999")}"><title>{title}</title></rect>'
            )
        at = ready_at(own)
        if at is not None:
            out.append(f'<text x="{margin + wide + 6}" y="{y + 15}" fill="#333">{duration(at)}</text>')
    out.append("</svg>")
    return "\n".join(out) + "\n"


# Format a plan for people: start order in waves, stop order, and each service's dependencies.


def order(plan: Plan, *, colour: bool) -> str:
    edges = service.start_edges(plan.services)
    by_name = {service.name: service for service in plan.services}
    width = max((len(name) for name in by_name), default=0)
    lines = [paint(f"{plan.role or 'plan'}: {len(by_name)} services", BOLD, colour), "", "start:"]
    for number, wave in enumerate(service.waves(edges), start=1):
        for place, name in enumerate(wave):
            head = f"{number:3}" if place == 0 else "   "
            lines.append(f"{head}  {name:{width}}  {describe(by_name[name], colour)}".rstrip())
    lines += ["", "stop:"]
    for number, wave in enumerate(service.waves(service.stop_edges(plan.services)), start=1):
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
