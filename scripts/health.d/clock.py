"""The clock is disciplined and its error small; munge refuses credentials when two nodes differ by minutes."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from health.api import Builtin, Check, Class, Context, Finding, Inputs, Unreadable, When, ok, problem, unknown

CHECK = Check(
    name="clock",
    about="the kernel's clock is synchronised, within its error",
    class_=Class.NODE,
    period_s=120,
    when=frozenset({When.BACKGROUND, When.BOOT}),
    sources=(Builtin("clock"),),
    thresholds="host",
)

STA_UNSYNC = 0x0040


@dataclass(frozen=True, slots=True)
class ClockState:
    synchronised: bool
    offset_s: float
    error_s: float


def parse(inputs: Inputs) -> ClockState:
    text = inputs["clock"].strip()
    match = re.fullmatch(
        r"# adjtimex\nstate: (\d+)\nstatus: (0x[0-9a-f]{4})\noffset_s: (-?\d+\.\d+)\nmaxerror_s: (\d+\.\d+)\n"
        r"esterror_s: (-?\d+\.\d+)\n# end",
        text,
    )
    if match is None:
        raise Unreadable("adjtimex: not its answer")
    status = int(match.group(2), 16)
    # State 5 is TIME_ERROR: the kernel itself calls the clock unreliable.
    synchronised = not status & STA_UNSYNC and match.group(1) != "5"
    return ClockState(synchronised, float(match.group(3)), float(match.group(4)))


def judge(measured: ClockState, context: Context) -> Iterable[Finding]:
    limits = context.limits.default
    most = limits.number("clock_error_max_s")
    if not measured.synchronised:
        if not limits.number("clock_must_be_synchronised"):
            return [unknown("nothing disciplines the kernel's clock, so its error is unknown")]
        return [problem("the kernel's clock is not synchronised", measured="free", threshold="synchronised")]
    worst = max(abs(measured.offset_s), measured.error_s)
    message = f"the clock may be wrong by {worst:.3f} s"
    if worst > most:
        return [problem(message, measured=f"{worst:.3f}", threshold=f"{most:g}")]
    return [ok(message, measured=f"{worst:.3f}", threshold=f"{most:g}")]
