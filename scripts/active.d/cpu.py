"""Hashing on all CPUs at once is as fast as before, and no CPU is much slower than the others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import median

from parsers import rates

from health.api import Check, Class, Context, Finding, Inputs, When

NEEDS = {"nodes": 1, "minutes": 2, "period_s": 86400}
CHECK = Check(
    name="cpu",
    about="every CPU computes as fast as the others and as before",
    class_=Class.MANUAL,
    period_s=86400,
    when=frozenset({When.ACTIVE}),
    sources=(rates.command("cpu"),),
    thresholds="active",
)


def parse(inputs: Inputs) -> Mapping[str, float]:
    return rates.parse(inputs, "cpu_rates")


def judge(measured: Mapping[str, float], context: Context) -> Iterable[Finding]:
    limits = context.limits.default
    yield from rates.outliers("CPU", measured, limits.number("cpu_outlier_min_percent"))
    yield rates.judge("hashing on the median CPU", median(measured.values()), limits.number("cpu_min_mbs"), context)
