"""NVMe drives' own reports: warnings, wear, spare, media errors."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from parsers.blocks import blocks

from health.api import Check, Class, Command, Context, Finding, Hardware, Inputs, Unreadable, When, ok, problem

CHECK = Check(
    name="nvme",
    about="the NVMe drives report no failure",
    class_=Class.MANUAL,
    period_s=600,
    when=frozenset({When.BACKGROUND, When.BOOT}),
    hardware=Hardware.NVME,
    sources=(Command("nvme_smart_log", ("nvme", "smart-log"), deadline_s=10.0, each="/dev/nvme[0-9]"),),
    thresholds="disk",
)

_ROW = re.compile(r"^([a-z_ ]+?)\s*:\s*(.+)$", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Drive:
    path: str
    warning: int
    spare: int
    spare_threshold: int
    used: int
    temperature: int
    media_errors: int


def parse(inputs: Inputs) -> list[Drive]:
    return [_one(path, text) for path, text in blocks(inputs["nvme_smart_log"]).items()]


def _one(path: str, text: str) -> Drive:
    values = {}
    for line in text.splitlines():
        match = _ROW.match(line.strip())
        if match:
            values[match.group(1).strip().lower().replace(" ", "_")] = match.group(2)

    def number(key: str) -> int:
        # "38 C (311 Kelvin)", "100%", "1,234", "0x4"
        match = re.match(r"(0x[0-9a-fA-F]+|[\d,]+)(?:\s*(?:%|°?C\b|\()|$)", values.get(key, "").strip())
        if match is None:
            raise Unreadable(f"nvme smart-log {path}: {key}: {values.get(key)!r}")
        return int(match.group(1).replace(",", ""), 0)

    return Drive(
        path,
        number("critical_warning"),
        number("available_spare"),
        number("available_spare_threshold"),
        number("percentage_used"),
        number("temperature"),
        number("media_errors"),
    )


def judge(measured: list[Drive], context: Context) -> Iterable[Finding]:
    limits = context.limits.default
    for drive in measured:
        worn, hot = limits.number("nvme_percentage_used_max"), limits.number("nvme_temperature_max_c")
        if drive.warning:
            message, shown = f"critical warning 0x{drive.warning:x}", f"0x{drive.warning:x}"
        elif drive.spare < drive.spare_threshold + limits.number("nvme_spare_margin"):
            message, shown = f"{drive.spare} % spare left, {drive.spare_threshold} % wanted", str(drive.spare)
        elif drive.media_errors > limits.number("nvme_media_errors_max"):
            message, shown = f"{drive.media_errors} media errors", str(drive.media_errors)
        elif drive.used > worn:
            message, shown = f"{drive.used} % of its life is used", str(drive.used)
        elif drive.temperature > hot:
            message, shown = f"{drive.temperature} C", str(drive.temperature)
        else:
            yield ok(
                f"{drive.path}: {drive.used} % worn", subject=drive.path, measured=drive.used, threshold=f"{worn:g}"
            )
            continue
        yield problem(f"{drive.path}: {message}", subject=drive.path, measured=shown)
