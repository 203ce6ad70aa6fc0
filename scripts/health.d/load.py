"""Load relative to the number of processors."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from health.api import Check, Class, Context, Files, Finding, Inputs, Unreadable, UserMade, When, ok, problem

CHECK = Check(
    name="load",
    about="the load is not far above the processors",
    class_=Class.USER,
    period_s=60,
    when=frozenset({When.BACKGROUND}),
    sources=(Files("loadavg", ("/proc/loadavg",)), Files("cpus_online", ("/sys/devices/system/cpu/online",))),
    thresholds="host",
    user_made=UserMade.YES,
)


@dataclass(frozen=True, slots=True)
class Load:
    fifteen: float
    cpus: int


def parse(inputs: Inputs) -> Load:
    text = inputs["loadavg"]
    match = re.search(r"^\d+\.\d\d \d+\.\d\d (\d+\.\d\d) \d+/\d+ \d+$", text, re.MULTILINE)
    if match is None:
        raise Unreadable(f"/proc/loadavg: {text[-60:]!r}")
    ranges = [line for line in inputs["cpus_online"].splitlines() if re.fullmatch(r"\d+(-\d+)?(,\d+(-\d+)?)*", line)]
    if len(ranges) != 1:
        raise Unreadable("/sys/devices/system/cpu/online is not a list of processors")
    cpus = 0
    for part in ranges[0].split(","):
        first, _, last = part.partition("-")
        cpus += int(last or first) - int(first) + 1
    if cpus < 1:
        raise Unreadable(f"processors {ranges[0]}")
    return Load(float(match.group(1)), cpus)


def judge(measured: Load, context: Context) -> Iterable[Finding]:
    most = context.limits.default.number("load_per_cpu_max")
    per = measured.fifteen / measured.cpus
    message = f"load {measured.fifteen:.1f} on {measured.cpus} processors over 15 minutes"
    if per > most:
        return [problem(message, measured=f"{per:.1f}", threshold=f"{most:g}")]
    return [ok(message, measured=f"{per:.1f}", threshold=f"{most:g}")]
