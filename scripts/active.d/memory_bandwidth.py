"""Copying memory is as fast as before."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from parsers import rates

from health.api import Check, Class, Context, Finding, Inputs, When

NEEDS = {"nodes": 1, "minutes": 2, "period_s": 86400}
CHECK = Check(
    name="memory_bandwidth",
    about="memory is copied as fast as before",
    class_=Class.MANUAL,
    period_s=86400,
    when=frozenset({When.ACTIVE}),
    sources=(rates.command("memory"),),
    thresholds="active",
)


def parse(inputs: Inputs) -> Mapping[str, float]:
    return rates.parse(inputs, "memory_rates")


def judge(measured: Mapping[str, float], context: Context) -> Iterable[Finding]:
    least = context.limits.default.number("memory_copy_min_mbs")
    yield rates.judge("copying memory", measured["copy"], least, context)
