"""GPU and memory temperature against the model's limits."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from parsers import nvidia_smi
from parsers.nvidia_smi import NVIDIA_SMI, GpuReport

from health.api import Check, Class, Context, Finding, Hardware, Inputs, Unreadable, When, ok, problem

CHECK = Check(
    name="gpu_temperature",
    about="the GPU and its memory are not too hot",
    class_=Class.MANUAL,
    period_s=60,
    when=frozenset({When.PROLOG, When.BACKGROUND}),
    hardware=Hardware.GPU,
    sources=(NVIDIA_SMI,),
    thresholds="gpu",
)


@dataclass(frozen=True, slots=True)
class Heat:
    uuid: str
    label: str
    model: str
    gpu: int
    memory: int | None


def parse(inputs: Inputs) -> list[Heat]:
    return [_one(gpu) for gpu in nvidia_smi.parse(inputs["nvidia_smi_q"])]


def _one(gpu: GpuReport) -> Heat:
    now = gpu.count("Temperature", "GPU Current Temp")
    if now is None:
        raise Unreadable(f"{gpu.label} reports no temperature")
    return Heat(gpu.uuid, gpu.label, gpu.model, now, gpu.count("Temperature", "Memory Current Temp"))


def judge(measured: list[Heat], context: Context) -> Iterable[Finding]:
    if not measured:
        raise Unreadable("no GPU to judge")
    for heat in measured:
        limits = context.limits.model(heat.model)
        most, memory = limits.number("temperature_max_c"), limits.number("memory_temperature_max_c")
        if heat.gpu > most:
            yield problem(f"{heat.label}: {heat.gpu} C", subject=heat.uuid, measured=heat.gpu, threshold=f"{most:g}")
        elif heat.memory is not None and heat.memory > memory:
            message = f"{heat.label}: memory at {heat.memory} C"
            yield problem(message, subject=heat.uuid, measured=heat.memory, threshold=f"{memory:g}")
        else:
            yield ok(f"{heat.label}: {heat.gpu} C", subject=heat.uuid, measured=heat.gpu, threshold=f"{most:g}")
