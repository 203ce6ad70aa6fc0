"""Row remapping (Ampere and newer): pending needs a reset, failed needs another GPU."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from parsers import nvidia_smi
from parsers.nvidia_smi import NVIDIA_SMI, GpuReport

from health.api import Check, Class, Context, Finding, Hardware, Inputs, Unreadable, When, ok, problem, unknown

CHECK = Check(
    name="gpu_row_remap",
    about="no row remap is pending or has failed, and spare rows are left",
    class_=Class.REBOOT,
    period_s=60,
    when=frozenset({When.PROLOG, When.BACKGROUND, When.EPILOG, When.BOOT}),
    hardware=Hardware.GPU,
    sources=(NVIDIA_SMI,),
    thresholds="gpu",
)


@dataclass(frozen=True, slots=True)
class Remap:
    uuid: str
    label: str
    model: str
    # False on GPUs without the feature (V100): they retire pages instead.
    supported: bool
    pending: bool = False
    failed: bool = False
    uncorrectable: int = 0
    exhausted_banks: int = 0


def parse(inputs: Inputs) -> list[Remap]:
    return [_one(gpu) for gpu in nvidia_smi.parse(inputs["nvidia_smi_q"])]


def _one(gpu: GpuReport) -> Remap:
    name, uuid, label = "Remapped Rows", gpu.uuid, gpu.label
    if gpu.section(name) is None:
        # "Remapped Rows : N/A" on one line; anything else is not this tool's output.
        if gpu.text(name) != "N/A":
            raise Unreadable(f"{label}: Remapped Rows: {gpu.text(name)!r}")
        return Remap(uuid, label, gpu.model, False)
    pending, failed = gpu.yes(name, "Pending"), gpu.yes(name, "Remapping Failure Occurred")
    if pending is None or failed is None:
        raise Unreadable(f"{label}: the driver does not report remapped rows")
    banks = gpu.section(name, "Bank Remap Availability Histogram")
    exhausted = gpu.count(name, "Bank Remap Availability Histogram", "None") if banks else None
    errors = gpu.count(name, "Uncorrectable Error")
    return Remap(uuid, label, gpu.model, True, pending, failed, errors or 0, exhausted or 0)


def judge(measured: list[Remap], context: Context) -> Iterable[Finding]:
    if not measured:
        raise Unreadable("no GPU to judge")
    for row in measured:
        limits = context.limits.model(row.model)
        most = limits.number("remapped_uncorrectable_max")
        if not row.supported:
            if limits.number("row_remap_expected"):
                yield unknown(f"{row.label}: {row.model} has row remapping, and the driver says N/A", subject=row.uuid)
            else:
                yield ok(f"{row.label}: {row.model} has no row remapping", subject=row.uuid)
        elif row.failed:
            yield problem(f"{row.label}: a row remap has failed", subject=row.uuid, class_=Class.RMA, measured="failed")
        elif row.uncorrectable > most:
            message = f"{row.label}: {row.uncorrectable} rows remapped after uncorrectable errors"
            yield problem(
                message, subject=row.uuid, class_=Class.RMA, measured=row.uncorrectable, threshold=f"{most:g}"
            )
        elif row.pending:
            yield problem(f"{row.label}: a row remap waits for a reset", subject=row.uuid, measured="pending")
        elif row.exhausted_banks > limits.number("exhausted_banks_max"):
            message = f"{row.label}: {row.exhausted_banks} banks have no spare row left"
            yield problem(message, subject=row.uuid, class_=Class.RMA, measured=row.exhausted_banks)
        else:
            yield ok(f"{row.label}: no remap pending or failed", subject=row.uuid, threshold=f"{most:g}")
