"""The recovery action that the driver requests for a GPU: nothing, a reset, a reboot."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from parsers import nvidia_smi
from parsers.nvidia_smi import NVIDIA_SMI, GpuReport

from health.api import Check, Class, Context, Finding, Hardware, Inputs, Unreadable, When, ok, problem, unknown

CHECK = Check(
    name="gpu_recovery",
    about="the driver asks for no reset and no reboot",
    class_=Class.REBOOT,
    period_s=60,
    when=frozenset({When.PROLOG, When.BACKGROUND, When.EPILOG, When.BOOT}),
    hardware=Hardware.GPU,
    sources=(NVIDIA_SMI,),
    thresholds="gpu",
)


@dataclass(frozen=True, slots=True)
class RecoveryAction:
    uuid: str
    label: str
    # None if the driver is too old to report it.
    action: str | None


def parse(inputs: Inputs) -> list[RecoveryAction]:
    return [RecoveryAction(gpu.uuid, gpu.label, _action(gpu)) for gpu in nvidia_smi.parse(inputs["nvidia_smi_q"])]


def _action(gpu: GpuReport) -> str | None:
    if "GPU Recovery Action" in gpu.root.values:
        action = gpu.text("GPU Recovery Action")
        if action not in {"None", "Reset", "Reboot", "Drain P2P", "Drain and Reset"}:
            raise Unreadable(f"{gpu.label}: recovery action {action!r}")
        return action
    if gpu.section("GPU Reset Status") is None:
        return None
    # Drivers 525 to 560 report it as two fields.
    if gpu.yes("GPU Reset Status", "Reset Required"):
        return "Reset"
    return "Drain and Reset" if gpu.yes("GPU Reset Status", "Drain and Reset Recommended") else "None"


def judge(measured: list[RecoveryAction], context: Context) -> Iterable[Finding]:
    if not measured:
        raise Unreadable("no GPU to judge")
    for wanted in measured:
        if wanted.action is None:
            yield unknown(f"{wanted.label}: this driver does not report a recovery action", subject=wanted.uuid)
        elif wanted.action != "None":
            message = f"{wanted.label}: the driver asks for: {wanted.action}"
            yield problem(message, subject=wanted.uuid, measured=wanted.action, threshold="None")
        else:
            yield ok(f"{wanted.label}: no action requested", subject=wanted.uuid, measured="None", threshold="None")
