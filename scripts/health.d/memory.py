"""The node's memory: enough is free, none is broken."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from health.api import Check, Class, Context, Files, Finding, Inputs, Unreadable, UserMade, When, ok, problem

CHECK = Check(
    name="memory",
    about="memory is available, and the kernel has taken none out of use",
    class_=Class.NODE,
    period_s=60,
    when=frozenset({When.BACKGROUND}),
    sources=(Files("meminfo", ("/proc/meminfo",), evidence=True),),
    thresholds="host",
    user_made=UserMade.PARTLY,
)

_ROW = re.compile(r"^(\w+(?:\(\w+\))?):\s+(\d+)(?: kB)?$")


@dataclass(frozen=True, slots=True)
class MemoryUse:
    total: int
    available: int
    corrupted: int


def parse(inputs: Inputs) -> MemoryUse:
    values = {}
    for line in inputs["meminfo"].splitlines():
        match = _ROW.match(line)
        if match:
            values[match.group(1)] = int(match.group(2))
        elif line.strip() and line != "==> /proc/meminfo <==":
            raise Unreadable(f"/proc/meminfo: {line[:80]!r}")
    try:
        memory = MemoryUse(values["MemTotal"], values["MemAvailable"], values.get("HardwareCorrupted", 0))
    except KeyError as error:
        raise Unreadable(f"/proc/meminfo: no {error.args[0]}") from error
    if not 0 < memory.available <= memory.total:
        raise Unreadable(f"/proc/meminfo: {memory.available} of {memory.total} kB available")
    return memory


def judge(measured: MemoryUse, context: Context) -> Iterable[Finding]:
    limits = context.limits.default
    least = limits.number("memory_available_min_percent")
    percent = 100 * measured.available / measured.total
    if measured.corrupted > limits.number("memory_corrupted_max_kb"):
        message = f"the kernel has taken {measured.corrupted} kB of broken memory out of use"
        yield problem(message, class_=Class.MANUAL, measured=measured.corrupted, threshold=0, user_made=False)
    if percent < least:
        yield problem(f"{percent:.0f} % of memory is available", measured=f"{percent:.0f}", threshold=f"{least:g}")
    else:
        yield ok(f"{percent:.0f} % of memory is available", measured=f"{percent:.0f}", threshold=f"{least:g}")
