"""`dcgmi diag -r 2`: PCIe and memory too, in two minutes."""

from __future__ import annotations

from collections.abc import Iterable

from parsers import dcgm
from parsers.dcgm import TestOutcome

from health.api import Check, Class, Context, Finding, Hardware, Inputs, When

CHECK = Check(
    name="dcgm_diag",
    about="DCGM's diagnostic, level 2: two minutes",
    class_=Class.MANUAL,
    period_s=86400,
    when=frozenset({When.DEEP}),
    hardware=Hardware.GPU,
    sources=(dcgm.diagnostic(2, 400.0),),
    thresholds="dcgm",
)


def parse(inputs: Inputs) -> list[TestOutcome]:
    return dcgm.parse(inputs["dcgmi_diag_2"])


def judge(measured: list[TestOutcome], context: Context) -> Iterable[Finding]:
    return dcgm.judge(measured, context)
