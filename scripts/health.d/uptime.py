"""Time since boot: neither a node that has just rebooted, again, nor one that never does is trustworthy."""

from __future__ import annotations

import re
from collections.abc import Iterable

from health.api import Check, Class, Context, Files, Finding, Inputs, Unreadable, When, ok, problem

CHECK = Check(
    name="uptime",
    about="the node has been up long enough, and not too long",
    class_=Class.REBOOT,
    period_s=600,
    when=frozenset({When.BACKGROUND}),
    sources=(Files("uptime", ("/proc/uptime",)),),
    thresholds="host",
)


def parse(inputs: Inputs) -> float:
    rows = [line for line in inputs["uptime"].splitlines() if re.fullmatch(r"\d+\.\d\d \d+\.\d\d", line)]
    if len(rows) != 1:
        raise Unreadable("/proc/uptime: not its text")
    return float(rows[0].split()[0])


def judge(measured: float, context: Context) -> Iterable[Finding]:
    least, most = context.limits.default.number("uptime_min_s"), context.limits.default.number("uptime_max_days")
    days = measured / 86400
    if measured < least:
        message = f"up for {measured:.0f} s only"
        return [problem(message, class_=Class.NODE, measured=f"{measured:.0f}", threshold=f"{least:g}")]
    if most and days > most:
        return [problem(f"up for {days:.0f} days", measured=f"{days:.0f}", threshold=f"{most:g}")]
    return [ok(f"up for {days:.1f} days", measured=f"{days:.1f}", threshold=f"{most:g}" if most else "")]
