"""Errors and flaps of the fabric's ports since the last check."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from parsers.blocks import blocks, integer

from health.api import Check, Class, Context, Files, Finding, Hardware, Inputs, Unreadable, When, ok, problem

NAMES = (
    "link_downed",
    "link_error_recovery",
    "symbol_error",
    "local_link_integrity_errors",
    "port_rcv_errors",
    "excessive_buffer_overrun_errors",
)

CHECK = Check(
    name="ib_counters",
    about="no link flaps and few errors on the fabric's ports",
    class_=Class.MANUAL,
    period_s=120,
    when=frozenset({When.BACKGROUND, When.EPILOG}),
    hardware=Hardware.IB,
    sources=(
        Files(
            "ib_counters", tuple(f"/sys/class/infiniband/*/ports/*/counters/{name}" for name in NAMES), evidence=True
        ),
    ),
    thresholds="ib",
)

_PATH = re.compile(r"/sys/class/infiniband/([^/]+)/ports/(\d+)/counters/(\w+)")


@dataclass(frozen=True, slots=True)
class Counters:
    port: str
    values: dict[str, int]


def parse(inputs: Inputs) -> list[Counters]:
    ports: dict[str, dict[str, int]] = {}
    for path, text in blocks(inputs["ib_counters"]).items():
        match = _PATH.fullmatch(path)
        if match is None:
            raise Unreadable(f"not a counter of a port: {path}")
        ports.setdefault(f"{match.group(1)}/{match.group(2)}", {})[match.group(3)] = integer(text, path)
    for port, values in ports.items():
        if missing := [name for name in NAMES if name not in values]:
            raise Unreadable(f"{port} has no counter {missing[0]}")
    return [Counters(port, values) for port, values in ports.items()]


def judge(measured: list[Counters], context: Context) -> Iterable[Finding]:
    before = context.previous.get("counters", {})
    since = float(context.previous.get("at", context.now))
    context.state["counters"] = {counters.port: counters.values for counters in measured}
    context.state["at"] = context.now
    hours = max((context.now - since) / 3600, 1 / 60)
    limits = context.limits.default.mapping("counters_per_hour")
    flaps = dict(context.previous.get("flaps", {}))
    for counters in measured:
        old = before.get(counters.port)
        if old is None:
            yield ok(f"{counters.port}: first check", subject=counters.port)
            continue
        # A counter that shrank was reset with its port: its whole value is new.
        grown = {
            name: count - old.get(name, 0) if count >= old.get(name, 0) else count
            for name, count in counters.values.items()
        }
        if grown["link_downed"]:
            flaps[counters.port] = [*flaps.get(counters.port, []), context.now][-50:]
        window = float(context.limits.default.number("flap_window_s"))
        recent = [at for at in flaps.get(counters.port, []) if at > context.now - window]
        flaps[counters.port] = recent
        worst = next((name for name in NAMES[1:] if grown[name] / hours > float(limits[name])), None)
        if len(recent) > context.limits.default.number("flaps_max"):
            message = f"{counters.port}: {len(recent)} link flaps in {window / 3600:g} h"
            yield problem(message, subject=counters.port, measured=len(recent))
        elif worst:
            message = f"{counters.port}: {grown[worst]} new {worst} ({grown[worst] / hours:.0f} an hour)"
            yield problem(message, subject=counters.port, measured=grown[worst], threshold=f"{limits[worst]}/h")
        else:
            yield ok(f"{counters.port}: quiet", subject=counters.port)
    context.state["flaps"] = flaps
