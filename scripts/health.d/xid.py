"""XID errors that the NVIDIA driver wrote to the kernel's log; what each means is data (lib/thresholds/xid.json)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from parsers import kernel_log
from parsers.kernel_log import KERNEL_LOG

from gitsync.health_api import Check, Class, Context, Finding, Hardware, Inputs, Limits, Unreadable, When, ok, problem

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

# "Xid (PCI:0000:3b:00): 79, pid=1234, name=python, GPU has fallen off the bus." and the same without pid and name.
_XID = re.compile(r"NVRM: (?:GPU at )?Xid \((?:PCI:)?([0-9a-fA-F:.]+)\): (\d+)(?:, (.*))?$")
# Some drivers tell a lost GPU without a number, over three lines.
_LOST = re.compile(r"NVRM: (?:The NVIDIA GPU|GPU) (?:PCI:)?([0-9a-fA-F:.]+)")
_OFF = "fallen off the bus and is not responding"
_PID = re.compile(r"(?:^|, )pid='?(\d+)'?")
_ACTION = re.compile(r"GPU recovery action changed from \S+ \(.*?\) to 0x[0-9a-fA-F]+ \((.*?)\)")


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
class Measured:
    now: float
    newest: float
    xids: tuple[Xid, ...]


def parse(inputs: Inputs) -> Measured:
    log = kernel_log.parse(inputs["kernel_log"])
    found: list[Xid] = []
    lost = ""
    for line in log.lines:
        match = _XID.search(line.text)
        if match:
            found.append(Xid(line.at, match.group(1).lower(), int(match.group(2)), (match.group(3) or "").strip()))
        elif "NVRM: Xid" in line.text:
            # A new form must be noticed, not passed over.
            raise Unreadable(f"an Xid line of an unknown form: {line.text[:120]!r}")
        elif gpu := _LOST.search(line.text):
            lost = gpu.group(1).lower()
        if _OFF in line.text and lost:
            found.append(Xid(line.at, lost, 79, "GPU has fallen off the bus"))
            lost = ""
    newest = log.lines[-1].at if log.lines else 0.0
    return Measured(log.now, newest, tuple(found))


def judge(measured: Measured, context: Context) -> Iterable[Finding]:
    limits = context.limits.default
    # At the first look after a start only what is recent counts: the log is older than this pod.
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
    context.state["cursor"] = max(cursor, measured.newest)
    context.state["held"] = held
    if not held:
        return [ok("no XID", measured=0, threshold=0)]
    return [
        problem(
            f"XID {item['code']} on {item['bus']}: {item['text']}"
            + (f" ({item['count']}x)" if item["count"] > 1 else ""),
            subject=str(item["bus"]),
            class_=Class(item["class"]),
            measured=f"XID {item['code']}",
            threshold="none",
        )
        for item in held.values()
    ]


def _policy(limits: Limits, xid: Xid) -> Mapping[str, Any]:
    codes = limits.mapping("codes")
    policy = {**limits.mapping("unlisted"), **codes.get(str(xid.code), {})}
    action = _ACTION.search(xid.text)
    if action:
        # 154 only names what the driver wants done.
        actions = limits.mapping("recovery_actions")
        policy["class"] = actions.get(action.group(1), actions["*"])
    return policy
