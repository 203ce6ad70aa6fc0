"""Adapters of one kind run the same firmware, and none that is known to be bad."""

from __future__ import annotations

import re
from collections.abc import Iterable

from parsers import ibstat
from parsers.ibstat import IBSTAT, Port

from health.api import Check, Class, Context, Finding, Hardware, Inputs, Unreadable, When, ok, problem

CHECK = Check(
    name="ib_firmware",
    about="firmware of the fabric's adapters",
    class_=Class.MANUAL,
    period_s=3600,
    when=frozenset({When.BACKGROUND, When.BOOT}),
    hardware=Hardware.IB,
    sources=(IBSTAT,),
    thresholds="ib",
)


def parse(inputs: Inputs) -> tuple[Port, ...]:
    ports = ibstat.parse(inputs["ibstat"])
    for port in ports:
        if not re.fullmatch(r"\d+\.\d+\.\d+", port.firmware):
            raise Unreadable(f"ibstat: {port.adapter}: firmware {port.firmware!r}")
    return ports


def judge(measured: tuple[Port, ...], context: Context) -> Iterable[Finding]:
    kinds: dict[str, dict[str, list[str]]] = {}
    for port in measured:
        kinds.setdefault(port.kind, {}).setdefault(port.firmware, []).append(port.adapter)
    for kind, versions in kinds.items():
        limits = context.limits.model(kind)
        least = limits.text("firmware_min")
        for version, adapters in versions.items():
            if _number(version) < _number(least):
                message = f"{', '.join(adapters)}: firmware {version}"
                yield problem(message, subject=adapters[0], measured=version, threshold=least)
        if len(versions) > 1:
            message = "; ".join(f"{version} on {', '.join(adapters)}" for version, adapters in sorted(versions.items()))
            yield problem(f"adapters of one kind differ: {message}", measured=len(versions), threshold=1)
        else:
            yield ok(f"{kind}: firmware {next(iter(versions))}", measured=next(iter(versions)), threshold=least)


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))
