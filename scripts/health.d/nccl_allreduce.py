"""NCCL's all-reduce over this node's GPUs completes with the right sum, at the model's bandwidth."""

from __future__ import annotations

from collections.abc import Iterable

from parsers import allreduce
from parsers.allreduce import Measured
from parsers.nvidia_smi import NVIDIA_SMI

from health.api import Check, Class, Command, Context, Finding, Hardware, Inputs, When

CHECK = Check(
    name="nccl_allreduce",
    about="all-reduce bandwidth over all GPUs of the node",
    class_=Class.MANUAL,
    period_s=86400,
    when=frozenset({When.DEEP}),
    hardware=Hardware.GPU,
    # Wrong sums and a hang exit non-zero, with output that names them.
    sources=(Command("allreduce", allreduce.ARGUMENTS, deadline_s=120.0, accept=()), NVIDIA_SMI),
    thresholds="gpu",
)


def parse(inputs: Inputs) -> Measured:
    return allreduce.parse(inputs, "allreduce")


def judge(measured: Measured, context: Context) -> Iterable[Finding]:
    return allreduce.judge(measured, context, "allreduce_busbw_min_gbs", "")
