"""Retired pages (Volta and older): pending ones need a reset, too many need another GPU."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from parsers import nvidia_smi
from parsers.nvidia_smi import NVIDIA_SMI, GpuReport

from health.api import Check, Class, Context, Finding, Hardware, Inputs, Unreadable, When, ok, problem, unknown

CHECK = Check(
    name="gpu_retired_pages",
    about="few pages are retired and none waits for a reset",
    class_=Class.REBOOT,
    period_s=300,
    when=frozenset({When.BACKGROUND, When.BOOT}),
    hardware=Hardware.GPU,
    sources=(NVIDIA_SMI,),
    thresholds="gpu",
)


@dataclass(frozen=True, slots=True)
class Retired:
    uuid: str
    label: str
    model: str
    single: int | None
    double: int | None
    pending: bool | None


def parse(inputs: Inputs) -> list[Retired]:
    return [_one(gpu) for gpu in nvidia_smi.parse(inputs["nvidia_smi_q"])]


def _one(gpu: GpuReport) -> Retired:
    name = "Retired Pages"
    section = gpu.section(name)
    word = "Pending Page Blacklist" if section and "Pending Page Blacklist" in section.values else "Pending"
    return Retired(
        gpu.uuid,
        gpu.label,
        gpu.model,
        gpu.count(name, "Single Bit ECC"),
        gpu.count(name, "Double Bit ECC"),
        gpu.yes(name, word),
    )


def judge(measured: list[Retired], context: Context) -> Iterable[Finding]:
    if not measured:
        raise Unreadable("no GPU to judge")
    for page in measured:
        limits = context.limits.model(page.model)
        if page.single is None or page.double is None or page.pending is None:
            if not limits.number("retired_pages_expected"):
                yield ok(f"{page.label}: {page.model} retires no pages", subject=page.uuid)
            else:
                yield unknown(f"{page.label}: the driver does not report its retired pages", subject=page.uuid)
            continue
        total, most = page.single + page.double, limits.number("retired_pages_max")
        if total > most:
            message = f"{page.label}: {total} pages are retired"
            yield problem(message, subject=page.uuid, class_=Class.RMA, measured=total, threshold=f"{most:g}")
        elif page.pending:
            yield problem(f"{page.label}: a page waits for a reset to be retired", subject=page.uuid, measured=total)
        else:
            yield ok(f"{page.label}: {total} pages retired", subject=page.uuid, measured=total, threshold=f"{most:g}")
