"""slurmd is registered; checked with the local daemon, so that a thousand nodes cost the controller nothing."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from health.api import Check, Class, Command, Context, Finding, Inputs, Unreadable, UserMade, When, ok, problem, unknown

CHECK = Check(
    name="slurmd",
    about="the controller has spoken to slurmd lately",
    class_=Class.NODE,
    period_s=60,
    # Never in a prolog: Slurm's documentation forbids its commands there.
    when=frozenset({When.BACKGROUND}),
    sources=(Command("scontrol_slurmd", ("scontrol", "show", "slurmd"), deadline_s=10.0, accept=()),),
    thresholds="host",
    user_made=UserMade.PARTLY,
)

_ROW = re.compile(r"^(\S[^=]*?)\s*= (.*)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Slurmd:
    answers: bool
    last: float
    message: str = ""
    started: float = 0.0


def parse(inputs: Inputs) -> Slurmd:
    text = inputs["scontrol_slurmd"]
    if "slurm_load_slurmd_status: Unable to contact" in text or "Connection refused" in text:
        return Slurmd(False, 0.0, text.strip().splitlines()[-1][:160])
    values = dict(_ROW.findall(text))
    last, booted = values.get("Last slurmctld msg time", ""), values.get("Boot time", "")
    try:
        # The daemon's own start, not the machine's.
        started = _time(booted)
        return Slurmd(True, 0.0 if last in {"NONE", "None"} else _time(last), started=started)
    except ValueError as error:
        message = text.strip().splitlines()[-1][:120] if text.strip() else "nothing"
        raise Unreadable(f"scontrol show slurmd said: {message}") from error


def _time(text: str) -> float:
    # The collector runs the command with TZ=UTC.
    return datetime.strptime(f"{text}+0000", "%Y-%m-%dT%H:%M:%S%z").timestamp()


def judge(measured: Slurmd, context: Context) -> Iterable[Finding]:
    most = context.limits.default.number("slurmctld_silence_max_s")
    if not measured.answers:
        # Any user may flood its port; and Slurm itself takes a node out whose slurmd is gone.
        return [problem(f"slurmd does not answer: {measured.message}", measured="silent", user_made=True)]
    if not measured.last and context.now - measured.started < context.limits.default.number("slurmd_patience_s"):
        return [unknown("slurmd has just started: the controller has not spoken to it yet")]
    if not measured.last:
        return [
            problem(
                "slurmd has never heard from the controller", measured="never", threshold=f"{most:g}", user_made=False
            )
        ]
    silent = context.now - measured.last
    message = f"the controller spoke to slurmd {silent:.0f} s ago"
    if silent > most:
        return [problem(message, measured=f"{silent:.0f}", threshold=f"{most:g}", user_made=False)]
    return [ok(message, measured=f"{silent:.0f}", threshold=f"{most:g}")]
