"""`dcgmi diag -r 1`: deployment and software, in seconds."""

from __future__ import annotations

from collections.abc import Iterable

from parsers import dcgm
from parsers.dcgm import TestOutcome

from health.api import Check, Class, Context, Finding, Hardware, Inputs, When

CHECK = Check(
    name="dcgm_quick",
    about="DCGM's diagnostic, level 1: seconds",
    class_=Class.MANUAL,
    period_s=86400,
    when=frozenset({When.BOOT, When.DEEP}),
    hardware=Hardware.GPU,
    sources=(dcgm.diagnostic(1, 60.0),),
    thresholds="dcgm",
)


def parse(inputs: Inputs) -> list[TestOutcome]:
    return dcgm.parse(inputs["dcgmi_diag_1"])


def judge(measured: list[TestOutcome], context: Context) -> Iterable[Finding]:
    return dcgm.judge(measured, context)
