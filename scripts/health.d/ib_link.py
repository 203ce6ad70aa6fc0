"""InfiniBand and RoCE ports are up, at the fabric's rate."""

from __future__ import annotations

from collections.abc import Iterable

from parsers import ibstat
from parsers.ibstat import IBSTAT, Port

from health.api import Check, Class, Context, Finding, Hardware, Inputs, Unreadable, When, ok, problem

CHECK = Check(
    name="ib_link",
    about="every port of the fabric is active, at its rate",
    class_=Class.MANUAL,
    period_s=60,
    when=frozenset({When.PROLOG, When.BACKGROUND, When.BOOT}),
    hardware=Hardware.IB,
    sources=(IBSTAT,),
    thresholds="ib",
)


def parse(inputs: Inputs) -> tuple[Port, ...]:
    return ibstat.parse(inputs["ibstat"])


def judge(measured: tuple[Port, ...], context: Context) -> Iterable[Finding]:
    ports = _judged(measured, context)
    if not ports:
        raise Unreadable("no port of a fabric that is judged")
    promised = context.expect.get("ib", "")
    if promised.isdigit() and len({port.adapter for port in ports}) < int(promised):
        seen = len({port.adapter for port in ports})
        yield problem(f"{seen} of {promised} adapters are present", measured=seen, threshold=promised)
    for port in ports:
        limits = context.limits.model(port.kind)
        least = limits.number("rate_min_gbs")
        if port.physical != "LinkUp":
            yield problem(f"{port.label}: no link ({port.physical})", subject=port.label, measured=port.physical)
        elif port.state != "Active":
            # The cable is good, but the subnet manager has not configured the port: not this node's fault.
            message = f"{port.label}: {port.state}: does the subnet manager run?"
            yield problem(message, subject=port.label, class_=Class.NODE, measured=port.state, threshold="Active")
        elif port.rate < least:
            message = f"{port.label}: {port.rate} Gb/s"
            yield problem(message, subject=port.label, measured=port.rate, threshold=f"{least:g}")
        else:
            message = f"{port.label}: {port.state} at {port.rate} Gb/s"
            yield ok(message, subject=port.label, measured=port.rate, threshold=f"{least:g}")


def _judged(ports: tuple[Port, ...], context: Context) -> list[Port]:
    """Drop the ports that the thresholds name, such as storage or management ports with other cabling."""
    skipped = context.limits.default.strings("ports_ignored")
    layers = context.limits.default.strings("link_layers")
    return [port for port in ports if port.label not in skipped and port.layer in layers]
