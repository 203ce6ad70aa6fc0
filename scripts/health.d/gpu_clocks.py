"""No GPU is slowed by its hardware: heat, power brake, or a fault."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from parsers import nvidia_smi
from parsers.nvidia_smi import NVIDIA_SMI, GpuReport

from health.api import Check, Class, Context, Finding, Hardware, Inputs, Unreadable, When, ok, problem

CHECK = Check(
    name="gpu_clocks",
    about="no hardware slowdown",
    class_=Class.MANUAL,
    period_s=60,
    when=frozenset({When.PROLOG, When.BACKGROUND}),
    hardware=Hardware.GPU,
    sources=(NVIDIA_SMI,),
    thresholds="gpu",
)

# Older drivers print "Throttle", newer ones "Event".
NAMES = ("Clocks Event Reasons", "Clocks Throttle Reasons")
REASONS = ("HW Slowdown", "HW Thermal Slowdown", "HW Power Brake Slowdown", "SW Thermal Slowdown")


@dataclass(frozen=True, slots=True)
class Clocks:
    uuid: str
    label: str
    model: str
    active: tuple[str, ...]


def parse(inputs: Inputs) -> list[Clocks]:
    return [_one(gpu) for gpu in nvidia_smi.parse(inputs["nvidia_smi_q"])]


def _one(gpu: GpuReport) -> Clocks:
    name = next((name for name in NAMES if gpu.section(name)), None)
    if name is None:
        raise Unreadable(f"{gpu.label} does not report its clock event reasons")
    states = {reason: gpu.yes(name, reason) for reason in REASONS}
    if unsure := [reason for reason, state in states.items() if state is None]:
        raise Unreadable(f"{gpu.label}: {unsure[0]}: N/A")
    return Clocks(gpu.uuid, gpu.label, gpu.model, tuple(reason for reason, state in states.items() if state))


def judge(measured: list[Clocks], context: Context) -> Iterable[Finding]:
    if not measured:
        raise Unreadable("no GPU to judge")
    for clocks in measured:
        bad = context.limits.model(clocks.model).strings("slowdowns")
        active = [reason for reason in clocks.active if reason in bad]
        if active:
            # The general "HW Slowdown" is active with each of its causes: name the cause.
            named = [reason for reason in active if reason != "HW Slowdown"] or active
            message = f"{clocks.label}: {', '.join(named)}"
            yield problem(message, subject=clocks.uuid, measured=", ".join(named), threshold="not active")
        else:
            yield ok(f"{clocks.label}: not slowed down", subject=clocks.uuid)
