"""The fabric manager has registered each GPU; a GPU behind NVSwitch works only after that."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from parsers import nvidia_smi
from parsers.nvidia_smi import NVIDIA_SMI, GpuReport

from health.api import Check, Class, Context, Finding, Hardware, Inputs, Unreadable, When, ok, problem, unknown

CHECK = Check(
    name="gpu_fabric",
    about="the NVSwitch fabric has registered every GPU",
    class_=Class.NODE,
    period_s=120,
    when=frozenset({When.PROLOG, When.BACKGROUND, When.BOOT}),
    hardware=Hardware.GPU,
    sources=(NVIDIA_SMI,),
    thresholds="gpu",
)


@dataclass(frozen=True, slots=True)
class Fabric:
    uuid: str
    label: str
    model: str
    # None if the driver does not know the feature.
    state: str | None
    status: str


def parse(inputs: Inputs) -> list[Fabric]:
    return [_one(gpu) for gpu in nvidia_smi.parse(inputs["nvidia_smi_q"])]


def _one(gpu: GpuReport) -> Fabric:
    if gpu.section("Fabric") is None:
        return Fabric(gpu.uuid, gpu.label, gpu.model, None, "N/A")
    state = gpu.text("Fabric", "State")
    return Fabric(gpu.uuid, gpu.label, gpu.model, None if state == "N/A" else state, gpu.text("Fabric", "Status"))


def judge(measured: list[Fabric], context: Context) -> Iterable[Finding]:
    if not measured:
        raise Unreadable("no GPU to judge")
    for fabric in measured:
        expected = bool(context.limits.model(fabric.model).number("fabric_expected"))
        if fabric.state is None:
            if expected:
                yield unknown(f"{fabric.label}: the driver does not report the fabric's state", subject=fabric.uuid)
            else:
                yield ok(f"{fabric.label}: not behind a fabric", subject=fabric.uuid)
        elif (fabric.state, fabric.status) != ("Completed", "Success"):
            message = f"{fabric.label}: fabric {fabric.state}, {fabric.status}: is the fabric manager running?"
            yield problem(message, subject=fabric.uuid, measured=fabric.state, threshold="Completed")
        else:
            yield ok(f"{fabric.label}: registered", subject=fabric.uuid, measured=fabric.state)
