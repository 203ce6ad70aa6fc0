"""Other complaints in the kernel's log: machine checks, file systems, lock-ups, network storage."""

from __future__ import annotations

import re
from collections.abc import Iterable

from parsers import kernel_log
from parsers.kernel_log import KERNEL_LOG, KernelLog

from health.api import Check, Class, Context, Finding, Inputs, UserMade, When, ok, problem

CHECK = Check(
    name="kernel_log",
    about="no machine check, lock-up, broken file system or dead storage in the kernel's log",
    class_=Class.MANUAL,
    period_s=60,
    when=frozenset({When.BACKGROUND, When.EPILOG}),
    sources=(KERNEL_LOG,),
    thresholds="kernel_log",
    user_made=UserMade.PARTLY,
)


def parse(inputs: Inputs) -> KernelLog:
    return kernel_log.parse(inputs["kernel_log"])


def judge(measured: KernelLog, context: Context) -> Iterable[Finding]:
    limits = context.limits.default
    cursor = float(context.previous.get("cursor", measured.now - limits.number("look_back_s")))
    held = {key: value for key, value in context.previous.get("held", {}).items() if value["until"] > measured.now}
    patterns = {name: (re.compile(rule["pattern"]), rule) for name, rule in limits.mapping("patterns").items()}
    for line in measured.since(cursor):
        for name, (pattern, rule) in patterns.items():
            # Match from the record's start: text further on may be the name of a process or a file.
            if line.from_kernel(int(rule.get("level", kernel_log.WARNING))) and pattern.match(line.text):
                held[name] = {
                    "text": line.text[:160],
                    "class": rule["class"],
                    "until": line.at + float(rule["hold_s"]),
                    "count": held.get(name, {}).get("count", 0) + 1,
                }
    context.state["cursor"] = max([cursor, *(line.at for line in measured.lines[-1:])])
    context.state["held"] = held
    # A commit may have dropped a pattern whose lines are still held.
    counted = {
        name: held[name] for name in held if name in patterns and held[name]["count"] >= patterns[name][1]["count"]
    }
    if not counted:
        return [ok("nothing in the kernel's log", measured=0)]
    return [
        # The thresholds define each pattern, and so if a user can cause it.
        problem(f"{name}: {item['text']}", class_=Class(item["class"]), measured=item["count"], user_made=False)
        for name, item in counted.items()
    ]
