"""`dcgmi diag -r 3`: stress, in a quarter of an hour. Runs by name only, on an idle node."""

from __future__ import annotations

from collections.abc import Iterable

from parsers import dcgm
from parsers.dcgm import TestOutcome

from health.api import Check, Class, Context, Finding, Hardware, Inputs

CHECK = Check(
    name="dcgm_long",
    about="DCGM's diagnostic, level 3: a quarter of an hour, only by name",
    class_=Class.MANUAL,
    period_s=604800,
    when=frozenset(),
    hardware=Hardware.GPU,
    sources=(dcgm.diagnostic(3, 1800.0),),
    thresholds="dcgm",
)


def parse(inputs: Inputs) -> list[TestOutcome]:
    return dcgm.parse(inputs["dcgmi_diag_3"])


def judge(measured: list[TestOutcome], context: Context) -> Iterable[Finding]:
    return dcgm.judge(measured, context)
