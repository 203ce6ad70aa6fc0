"""Uncorrected memory errors since the last reset, and over the GPU's life."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from parsers import nvidia_smi
from parsers.nvidia_smi import NVIDIA_SMI, GpuReport

from health.api import Check, Class, Context, Finding, Hardware, Inputs, Unreadable, When, ok, problem

CHECK = Check(
    name="gpu_ecc",
    about="ECC is on and counts no uncorrected error",
    class_=Class.REBOOT,
    period_s=60,
    when=frozenset({When.PROLOG, When.BACKGROUND, When.EPILOG, When.BOOT}),
    hardware=Hardware.GPU,
    sources=(NVIDIA_SMI,),
    thresholds="gpu",
)


@dataclass(frozen=True, slots=True)
class Ecc:
    uuid: str
    label: str
    model: str
    enabled: bool
    volatile: int
    aggregate_sram: int | None
    threshold_exceeded: bool
    # "Channel Repair Pending", "TPC Repair Pending", "Unrepairable Memory": in drivers from 560 on.
    repairs: tuple[str, ...] = ()


def parse(inputs: Inputs) -> list[Ecc]:
    return [_one(gpu) for gpu in nvidia_smi.parse(inputs["nvidia_smi_q"])]


def _one(gpu: GpuReport) -> Ecc:
    mode = next((name for name in ("ECC Mode", "Ecc Mode") if gpu.section(name)), "ECC Mode")
    current = gpu.text(mode, "Current")
    if current not in {"Enabled", "Disabled", "N/A"}:
        raise Unreadable(f"{gpu.label}: ECC mode {current!r}")
    if current != "Enabled":
        return Ecc(gpu.uuid, gpu.label, gpu.model, False, 0, None, False)
    exceeded = gpu.section("ECC Errors", "Aggregate")
    return Ecc(
        gpu.uuid,
        gpu.label,
        gpu.model,
        True,
        _uncorrected(gpu, "Volatile"),
        None if gpu.section("ECC Errors", "Aggregate", "Double Bit") else _sram(gpu, "Aggregate"),
        bool(exceeded and "SRAM Threshold Exceeded" in exceeded.values)
        and gpu.yes("ECC Errors", "Aggregate", "SRAM Threshold Exceeded") is True,
        tuple(_repairs(gpu)),
    )


def _repairs(gpu: GpuReport) -> Iterable[str]:
    section = gpu.section("ECC Errors")
    for name in ("Unrepairable Memory", "Channel Repair Pending", "TPC Repair Pending"):
        # Beside the counters or among them; values other than yes and no occur.
        for place in (section, *(section.sections.values() if section else ())):
            if place and place.values.get(name, "No") not in {"No", "N/A"}:
                yield name
                break


def _uncorrected(gpu: GpuReport, since: str) -> int:
    if gpu.section("ECC Errors", since, "Double Bit"):
        # Volta and older.
        return _known(gpu, since, "Double Bit", "Total")
    return _sram(gpu, since) + _known(gpu, since, "DRAM Uncorrectable")


def _sram(gpu: GpuReport, since: str) -> int:
    section = gpu.section("ECC Errors", since)
    if section and "SRAM Uncorrectable Parity" in section.values:
        # Drivers from 535 on separate parity from SEC-DED.
        return _known(gpu, since, "SRAM Uncorrectable Parity") + _known(gpu, since, "SRAM Uncorrectable SEC-DED")
    return _known(gpu, since, "SRAM Uncorrectable")


def _known(gpu: GpuReport, *path: str) -> int:
    value = gpu.count("ECC Errors", *path)
    if value is None:
        raise Unreadable(f"{gpu.label}: ECC is on and counts nothing at {' / '.join(path)}")
    return value


def judge(measured: list[Ecc], context: Context) -> Iterable[Finding]:
    if not measured:
        raise Unreadable("no GPU to judge")
    for ecc in measured:
        limits = context.limits.model(ecc.model)
        most = limits.number("ecc_uncorrected_max")
        if not ecc.enabled:
            if limits.number("ecc_required"):
                yield problem(f"{ecc.label}: ECC is off", subject=ecc.uuid, class_=Class.MANUAL, measured="off")
            else:
                yield ok(f"{ecc.label}: ECC is off, as it may be on {ecc.model}", subject=ecc.uuid)
        elif ecc.repairs:
            class_ = Class.RMA if "Unrepairable Memory" in ecc.repairs else Class.REBOOT
            message = f"{ecc.label}: {', '.join(ecc.repairs).lower()}"
            yield problem(message, subject=ecc.uuid, class_=class_, measured="yes", threshold="no")
        elif ecc.threshold_exceeded:
            yield problem(f"{ecc.label}: SRAM error threshold exceeded", subject=ecc.uuid, class_=Class.RMA)
        elif ecc.volatile > most:
            message = f"{ecc.label}: {ecc.volatile} uncorrected ECC errors since the last reset"
            yield problem(message, subject=ecc.uuid, measured=ecc.volatile, threshold=f"{most:g}")
        elif (ecc.aggregate_sram or 0) > limits.number("ecc_sram_lifetime_max"):
            message = f"{ecc.label}: {ecc.aggregate_sram} uncorrected SRAM errors in its life"
            limit = limits.number("ecc_sram_lifetime_max")
            yield problem(
                message, subject=ecc.uuid, class_=Class.RMA, measured=ecc.aggregate_sram, threshold=f"{limit:g}"
            )
        else:
            yield ok(f"{ecc.label}: no uncorrected error", subject=ecc.uuid, measured=0, threshold=f"{most:g}")
