"""The driver answers, and no GPU has fallen off the bus."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from parsers import nvidia_smi
from parsers.nvidia_smi import NVIDIA_SMI

from health.api import (
    Check,
    Class,
    Context,
    Failure,
    Finding,
    Hardware,
    Inputs,
    Unreadable,
    UserMade,
    When,
    ok,
    problem,
)

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
    user_made=UserMade.PARTLY,
)

_INFOROM = re.compile(r"WARNING: infoROM is corrupted at gpu (\S+)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Complaint:
    subject: str
    message: str
    # True if the text may be the name of a process, which nvidia-smi prints.
    user_made: bool = False


def parse(inputs: Inputs) -> tuple[list[Complaint], int]:
    """Return the complaints and the number of GPUs that answered."""
    failure = inputs.failure("nvidia_smi_q")
    if failure is Failure.TIMEOUT:
        # A driver that does not answer is the sign of a hung GPU.
        return [Complaint("host", f"the driver hangs: {inputs.why('nvidia_smi_q')}")], 0
    if failure is not None:
        raise Unreadable(inputs.why("nvidia_smi_q"))
    text = inputs["nvidia_smi_q"]
    own, after = nvidia_smi.complaints(text)
    list_of_complaints = [
        Complaint(match.group(1), f"infoROM is corrupted at {match.group(1)}", user_made)
        for rows, user_made in ((own, False), (after, True))
        for match in map(_INFOROM.match, rows)
        if match
    ]
    for pattern in nvidia_smi.COMPLAINTS:
        if match := next(filter(None, map(pattern.search, own)), None):
            list_of_complaints.append(
                Complaint(match.groupdict().get("gpu") or "host", f"nvidia-smi: {match.string[:200]}")
            )
            return list_of_complaints, 0
    return list_of_complaints, len(nvidia_smi.parse(text))


def judge(measured: tuple[list[Complaint], int], context: Context) -> Iterable[Finding]:
    complaints, answering = measured
    if complaints:
        return [
            problem(
                item.message,
                subject=item.subject,
                class_=Class.RMA if "infoROM" in item.message else None,
                user_made=item.user_made,
            )
            for item in complaints
        ]
    if not answering:
        raise Unreadable("nvidia-smi describes no GPU")
    return [ok(f"the driver answers for {answering} GPUs", measured=answering)]
