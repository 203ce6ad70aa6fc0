"""Each GPU has all its PCIe lanes, and under load its generation."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from parsers import nvidia_smi
from parsers.nvidia_smi import NVIDIA_SMI, GpuReport

from health.api import Check, Class, Context, Finding, Hardware, Inputs, Unreadable, When, ok, problem

CHECK = Check(
    name="gpu_pcie",
    about="PCIe width, and the generation where the GPU is not idle",
    class_=Class.MANUAL,
    period_s=120,
    when=frozenset({When.PROLOG, When.BACKGROUND, When.BOOT}),
    hardware=Hardware.GPU,
    sources=(NVIDIA_SMI,),
    thresholds="gpu",
)


@dataclass(frozen=True, slots=True)
class Link:
    uuid: str
    label: str
    model: str
    width: int
    generation: int
    state: str


def parse(inputs: Inputs) -> list[Link]:
    return [_one(gpu) for gpu in nvidia_smi.parse(inputs["nvidia_smi_q"])]


def _one(gpu: GpuReport) -> Link:
    width = gpu.count("PCI", "GPU Link Info", "Link Width", "Current")
    generation = gpu.count("PCI", "GPU Link Info", "PCIe Generation", "Current")
    state = gpu.text("Performance State")
    if width is None or generation is None:
        raise Unreadable(f"{gpu.label}: the driver does not report the PCIe link")
    if not (state.startswith("P") and state[1:].isdigit()):
        raise Unreadable(f"{gpu.label}: performance state {state!r}")
    return Link(gpu.uuid, gpu.label, gpu.model, width, generation, state)


def judge(measured: list[Link], context: Context) -> Iterable[Finding]:
    if not measured:
        raise Unreadable("no GPU to judge")
    for link in measured:
        limits = context.limits.model(link.model)
        width, generation = limits.number("pcie_width_min"), limits.number("pcie_generation_min")
        shown, wanted = f"gen{link.generation} x{link.width}", f"gen{generation:g} x{width:g}"
        # An idle GPU lowers its link's speed to save power, but not its width.
        idle = link.state not in {"P0", "P1", "P2"}
        if link.width < width or (link.generation < generation and not idle):
            message = f"{link.label}: PCIe {shown} in {link.state}"
            yield problem(message, subject=link.uuid, measured=shown, threshold=wanted)
        else:
            yield ok(f"{link.label}: PCIe {shown}", subject=link.uuid, measured=shown, threshold=wanted)
