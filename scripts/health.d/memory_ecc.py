"""Memory controllers: uncorrected errors, and many corrected ones."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from parsers.blocks import blocks, integer

from health.api import Check, Class, Context, Files, Finding, Inputs, Unreadable, When, ok, problem

CHECK = Check(
    name="memory_ecc",
    about="the memory controllers count no uncorrected error",
    class_=Class.MANUAL,
    period_s=300,
    when=frozenset({When.BACKGROUND, When.BOOT}),
    sources=(Files("edac", tuple(f"/sys/devices/system/edac/mc/mc*/{name}_count" for name in ("ce", "ue"))),),
    thresholds="host",
)

_PATH = re.compile(r"/sys/devices/system/edac/mc/(mc\d+)/(ce|ue)_count")


@dataclass(frozen=True, slots=True)
class Controller:
    name: str
    corrected: int
    uncorrected: int


def parse(inputs: Inputs) -> list[Controller]:
    controllers: dict[str, dict[str, int]] = {}
    for path, text in blocks(inputs["edac"]).items():
        match = _PATH.fullmatch(path)
        if match is None:
            raise Unreadable(f"no counter of a memory controller: {path}")
        controllers.setdefault(match.group(1), {})[match.group(2)] = integer(text, path)
    for name, counts in controllers.items():
        if len(counts) != 2:
            raise Unreadable(f"{name}: a counter is missing")
    return [Controller(name, counts["ce"], counts["ue"]) for name, counts in controllers.items()]


def judge(measured: list[Controller], context: Context) -> Iterable[Finding]:
    limits = context.limits.default
    for controller in measured:
        most = limits.number("memory_corrected_max")
        if controller.uncorrected > limits.number("memory_uncorrected_max"):
            message = f"{controller.name}: {controller.uncorrected} uncorrected memory errors since boot"
            yield problem(message, subject=controller.name, measured=controller.uncorrected, threshold=0)
        elif controller.corrected > most:
            message = f"{controller.name}: {controller.corrected} corrected memory errors since boot"
            yield problem(message, subject=controller.name, measured=controller.corrected, threshold=f"{most:g}")
        else:
            yield ok(f"{controller.name}: {controller.corrected} corrected", subject=controller.name)
