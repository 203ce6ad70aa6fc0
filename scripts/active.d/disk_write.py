"""Writing through to the local disk is as fast as before."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from parsers import rates

from health.api import Check, Class, Context, Finding, Inputs, When

NEEDS = {"nodes": 1, "minutes": 2, "period_s": 86400}
CHECK = Check(
    name="disk_write",
    about="the local disk is written as fast as before",
    class_=Class.MANUAL,
    period_s=86400,
    when=frozenset({When.ACTIVE}),
    sources=(rates.command("disk", deadline_s=90.0),),
    thresholds="active",
)


def parse(inputs: Inputs) -> Mapping[str, float]:
    return rates.parse(inputs, "disk_rates")


def judge(measured: Mapping[str, float], context: Context) -> Iterable[Finding]:
    least = context.limits.default.number("disk_write_min_mbs")
    yield rates.judge("writing to the disk", measured["write"], least, context)
