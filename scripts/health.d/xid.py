"""XID errors of the NVIDIA driver in the kernel's log; lib/thresholds/xid.json defines their meaning."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from parsers import kernel_log
from parsers.kernel_log import KERNEL_LOG

from health.api import Check, Class, Context, Finding, Hardware, Inputs, Limits, When, ok, problem, unknown

CHECK = Check(
    name="xid",
    about="no XID since the last look, and none that still holds",
    class_=Class.REBOOT,
    period_s=30,
    when=frozenset({When.PROLOG, When.BACKGROUND, When.EPILOG}),
    hardware=Hardware.GPU,
    sources=(KERNEL_LOG,),
    thresholds="xid",
)

_BUS = r"[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}(?:\.[0-9a-fA-F])?"
# "Xid (PCI:0000:3b:00): 79, pid=1234, name=python, GPU has fallen off the bus." or without pid and name; for a part of
# a GPU "(PCI:0000:3b:00 GPU-I:05)". Matched from the record's start; parsers/kernel_log.py says which users can write
# there.
_XID = re.compile(rf"NVRM: (?:GPU at )?Xid \((?:PCI:)?({_BUS})(?: GPU-I:[0-9]+)?\): ([0-9]{{1,4}})(?:, (.*))?$")
# Some drivers report a lost GPU without a number: in two or three records, or in one with escaped line breaks.
_LOST = re.compile(rf"NVRM: (?:The NVIDIA GPU|GPU) (?:PCI:)?({_BUS})(?![0-9a-fA-F])(.*)")
_OFF = re.compile(
    r"(?:NVRM:)?(?: \(PCI ID: [0-9a-fA-F:]+\))?(?: installed in this)?(?: system has)?"
    r" fallen off the bus and is not responding"
)
_PID = re.compile(r"(?:^|, )pid='?(\d+)'?")
# From the start of the text: further on it contains a process name that a user chose.
_ACTION = re.compile(
    r"(?:pid=\S+, name=.{0,15}, )?GPU recovery action changed from \S+ \([^()]*\) to 0x[0-9a-fA-F]+ \(([^()]*)\)"
)


@dataclass(frozen=True, slots=True)
class Xid:
    at: float
    bus: str
    code: int
    text: str

    @property
    def pid(self) -> str:
        match = _PID.search(self.text)
        return match.group(1) if match else ""


@dataclass(frozen=True, slots=True)
class XidEvents:
    now: float
    newest: float
    xids: tuple[Xid, ...]
    # Lines in an unknown form, which must be reported.
    strange: tuple[Xid, ...] = ()


def parse(inputs: Inputs) -> XidEvents:
    log = kernel_log.parse(inputs["kernel_log"])
    xids: list[Xid] = []
    strange: list[Xid] = []
    lost = ""
    for line in log.lines:
        if not line.text.startswith("NVRM: ") or not line.from_kernel():
            continue
        if match := _XID.match(line.text):
            xids.append(Xid(line.at, match.group(1).lower(), int(match.group(2)), (match.group(3) or "").strip()))
        elif line.text.startswith("NVRM: Xid") and not line.starts_with_a_process:
            strange.append(Xid(line.at, "", 0, line.text))
        elif gpu := _LOST.match(line.text):
            lost = gpu.group(1).lower()
            if _OFF.match(gpu.group(2).replace(r"\x0aNVRM:", "")):
                xids.append(Xid(line.at, lost, 79, "GPU has fallen off the bus"))
                lost = ""
        elif _OFF.match(line.text) and lost:
            xids.append(Xid(line.at, lost, 79, "GPU has fallen off the bus"))
            lost = ""
    newest = log.lines[-1].at if log.lines else 0.0
    return XidEvents(log.now, newest, tuple(xids), tuple(strange))


def judge(measured: XidEvents, context: Context) -> Iterable[Finding]:
    limits = context.limits.default
    # At the first check after a start only recent lines count: the log is older than this pod.
    cursor = float(context.previous.get("cursor", measured.now - limits.number("look_back_s")))
    held = {key: value for key, value in context.previous.get("held", {}).items() if value["until"] > measured.now}
    for xid in measured.xids:
        if xid.at <= cursor:
            continue
        policy = _policy(limits, xid)
        if policy["class"] == "ignore":
            continue
        held[f"{xid.bus}/{xid.code}"] = {
            "bus": xid.bus,
            "code": xid.code,
            "class": policy["class"],
            "text": (xid.text or str(policy["about"]))[:160],
            "until": xid.at + float(policy["hold_s"]),
            "count": held.get(f"{xid.bus}/{xid.code}", {}).get("count", 0) + 1,
        }
    # A strange line means that something is unknown; it hides nothing that is known.
    odd = context.previous.get("odd", {})
    for line in measured.strange:
        if line.at > cursor:
            odd = {"text": line.text[:120], "until": line.at + limits.number("look_back_s")}
    if odd and odd["until"] <= measured.now:
        odd = {}
    context.state["cursor"] = max(cursor, measured.newest)
    context.state["held"] = held
    context.state["odd"] = odd
    if odd:
        yield unknown(f"an Xid line of an unknown form: {odd['text']!r}")
    if not held and not odd:
        yield ok("no XID", measured=0, threshold=0)
    for item in held.values():
        yield problem(
            f"XID {item['code']} on {item['bus']}: {item['text']}"
            + (f" ({item['count']}x)" if item["count"] > 1 else ""),
            subject=str(item["bus"]),
            class_=Class(item["class"]),
            measured=f"XID {item['code']}",
            threshold="none",
        )


def _policy(limits: Limits, xid: Xid) -> Mapping[str, Any]:
    codes = limits.mapping("codes")
    policy = {**limits.mapping("unlisted"), **codes.get(str(xid.code), {})}
    action = _ACTION.match(xid.text)
    if action:
        # 154 only names the action that the driver requests.
        actions = limits.mapping("recovery_actions")
        policy["class"] = actions.get(action.group(1), actions["*"])
    return policy
