"""InfiniBand and RoCE ports: up, at the fabric's rate."""

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
        yield problem(f"{seen} of {promised} adapters are there", measured=seen, threshold=promised)
    for port in ports:
        limits = context.limits.model(port.kind)
        least = limits.number("rate_min_gbs")
        if port.physical != "LinkUp":
            yield problem(f"{port.label}: no link ({port.physical})", subject=port.label, measured=port.physical)
        elif port.state != "Active":
            # The cable is good and the subnet manager has not spoken: not this node's fault.
            said = f"{port.label}: {port.state}: does the subnet manager run?"
            yield problem(said, subject=port.label, class_=Class.NODE, measured=port.state, threshold="Active")
        elif port.rate < least:
            said = f"{port.label}: {port.rate} Gb/s"
            yield problem(said, subject=port.label, measured=port.rate, threshold=f"{least:g}")
        else:
            said = f"{port.label}: {port.state} at {port.rate} Gb/s"
            yield ok(said, subject=port.label, measured=port.rate, threshold=f"{least:g}")


def _judged(ports: tuple[Port, ...], context: Context) -> list[Port]:
    """Storage or management ports that are cabled on purpose otherwise are named in the thresholds."""
    skipped = context.limits.default.strings("ports_ignored")
    layers = context.limits.default.strings("link_layers")
    return [port for port in ports if port.label not in skipped and port.layer in layers]
