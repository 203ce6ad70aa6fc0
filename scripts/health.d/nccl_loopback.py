"""NCCL's all-reduce without NVLink, PCIe peers and shared memory: all data leaves by the adapters and returns."""

from __future__ import annotations

from collections.abc import Iterable

from parsers import allreduce
from parsers.allreduce import Measured
from parsers.nvidia_smi import NVIDIA_SMI

from health.api import Check, Class, Command, Context, Finding, Hardware, Inputs, When

CHECK = Check(
    name="nccl_loopback",
    about="all-reduce bandwidth through the node's own fabric adapters",
    class_=Class.MANUAL,
    period_s=86400,
    when=frozenset({When.DEEP}),
    hardware=Hardware.IB,
    sources=(
        Command(
            "allreduce_loopback",
            ("env", "NCCL_P2P_DISABLE=1", "NCCL_SHM_DISABLE=1", *allreduce.ARGUMENTS),
            deadline_s=120.0,
            accept=(),
        ),
        NVIDIA_SMI,
    ),
    thresholds="gpu",
)


def parse(inputs: Inputs) -> Measured:
    return allreduce.parse(inputs, "allreduce_loopback")


def judge(measured: Measured, context: Context) -> Iterable[Finding]:
    return allreduce.judge(measured, context, "loopback_busbw_min_gbs", " through the fabric")
