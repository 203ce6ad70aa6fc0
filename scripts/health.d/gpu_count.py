"""The number of GPUs that answer equals those on the bus, and those promised to the pod."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from parsers import nvidia_smi
from parsers.nvidia_smi import NVIDIA_SMI

from health.api import Check, Class, Command, Context, Finding, Hardware, Inputs, Unreadable, When, ok, problem

LSPCI = Command("lspci", ("lspci", "-D", "-nn", "-d", "10de:"), deadline_s=10.0, evidence=True)

CHECK = Check(
    name="gpu_count",
    about="every GPU that is on the bus, or was promised, answers",
    class_=Class.REBOOT,
    period_s=60,
    when=frozenset({When.PROLOG, When.BACKGROUND, When.EPILOG, When.BOOT}),
    hardware=Hardware.GPU,
    sources=(NVIDIA_SMI, LSPCI),
    thresholds="gpu",
    judges_failures=True,
)

_NONE = "No devices were found"
_DEVICE = re.compile(r"^([0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f]) .*\[(\w{4})\].*\[10de:\w{4}\]")


@dataclass(frozen=True, slots=True)
class Counted:
    answering: int
    # None without lspci: then only a promise can be compared with the count.
    on_bus: int | None
    # Identities of the GPUs, for the broker's ledger and for binding verdicts to a GPU.
    gpus: tuple[dict[str, str], ...] = ()


def parse(inputs: Inputs) -> Counted:
    text = inputs.text("nvidia_smi_q")
    gpus = (
        () if any(_NONE in row for row in nvidia_smi.complaints(text)[0]) else nvidia_smi.parse(inputs["nvidia_smi_q"])
    )
    listed = tuple({"uuid": gpu.uuid, "serial": gpu.serial, "bus": gpu.bus, "model": gpu.model} for gpu in gpus)
    return Counted(len(gpus), None if inputs.failure("lspci") else _on_bus(inputs["lspci"]), listed)


def _on_bus(text: str) -> int:
    count = 0
    for line in text.splitlines():
        match = _DEVICE.match(line)
        if match is None:
            raise Unreadable(f"lspci: {line[:80]!r}")
        # 0300 VGA and 0302 3D controllers; 0680 is an NVSwitch, 0403 a card's sound.
        count += match.group(2) in {"0300", "0302"}
    return count


def judge(measured: Counted, context: Context) -> Iterable[Finding]:
    context.state["gpus"] = list(measured.gpus)
    promised = context.expect.get("gpu", "")
    wanted = int(promised) if promised.isdigit() else measured.on_bus
    if wanted is None:
        raise Unreadable("lspci is not installed and MINIVM_EXPECT_GPUS is not set: nothing to count against")
    message = f"{measured.answering} of {wanted} GPUs answer"
    if measured.answering < wanted:
        return [problem(message, measured=measured.answering, threshold=wanted)]
    if measured.answering == 0:
        raise Unreadable("no GPU answers and none is on the bus")
    return [ok(message, measured=measured.answering, threshold=wanted)]
