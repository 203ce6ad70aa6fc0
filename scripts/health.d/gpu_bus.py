"""The driver answers, and no GPU has fallen off the bus."""

from __future__ import annotations

import re
from collections.abc import Iterable

from parsers import nvidia_smi
from parsers.nvidia_smi import NVIDIA_SMI

from gitsync.health_api import Check, Class, Context, Failure, Finding, Hardware, Inputs, Unreadable, When, ok, problem

CHECK = Check(
    name="gpu_bus",
    about="the driver answers and no GPU is lost",
    class_=Class.REBOOT,
    period_s=60,
    when=frozenset({When.PROLOG, When.BACKGROUND, When.EPILOG, When.BOOT}),
    hardware=Hardware.GPU,
    sources=(NVIDIA_SMI,),
    thresholds="gpu",
    judges_failures=True,
)

_INFOROM = re.compile(r"WARNING: infoROM is corrupted at gpu (\S+)", re.IGNORECASE)


def parse(inputs: Inputs) -> tuple[list[tuple[str, str]], int]:
    """((subject, complaint) pairs, GPUs that answered)."""
    failure = inputs.failure("nvidia_smi_q")
    if failure is Failure.TIMEOUT:
        # A driver that does not answer is what a hung GPU looks like.
        return [("host", f"the driver hangs: {inputs.why('nvidia_smi_q')}")], 0
    if failure is not None:
        raise Unreadable(inputs.why("nvidia_smi_q"))
    text = inputs["nvidia_smi_q"]
    found = [(match.group(1), f"infoROM is corrupted at {match.group(1)}") for match in _INFOROM.finditer(text)]
    for pattern in nvidia_smi.COMPLAINTS:
        match = pattern.search(text)
        if match:
            line = next(row.strip() for row in text.splitlines() if pattern.search(row))
            found.append((match.groupdict().get("gpu") or "host", f"nvidia-smi: {line[:200]}"))
            return found, 0
    return found, len(nvidia_smi.parse(text))


def judge(measured: tuple[list[tuple[str, str]], int], context: Context) -> Iterable[Finding]:
    complaints, answering = measured
    if complaints:
        return [
            problem(said, subject=subject, class_=Class.RMA if "infoROM" in said else None)
            for subject, said in complaints
        ]
    if not answering:
        raise Unreadable("nvidia-smi describes no GPU")
    return [ok(f"the driver answers for {answering} GPUs", measured=answering)]
