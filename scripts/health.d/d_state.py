"""Processes stuck in the kernel, and zombies."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from parsers import processes
from parsers.processes import PROCESSES, WAITING, Waiting

from health.api import Check, Class, Context, Finding, Inputs, UserMade, When, ok, problem

CHECK = Check(
    name="d_state",
    about="no process hangs in the kernel, and few are zombies",
    class_=Class.REBOOT,
    period_s=60,
    when=frozenset({When.BACKGROUND}),
    sources=(PROCESSES, WAITING),
    thresholds="host",
    user_made=UserMade.PARTLY,
)


@dataclass(frozen=True, slots=True)
class WaitingProcesses:
    waiting: tuple[Waiting, ...]
    zombies: int


def parse(inputs: Inputs) -> WaitingProcesses:
    listed = processes.parse(inputs["processes"])
    return WaitingProcesses(processes.waiting(inputs["waiting"]), sum(1 for process in listed if process.state == "Z"))


def judge(measured: WaitingProcesses, context: Context) -> Iterable[Finding]:
    limits = context.limits.default
    most, zombies_max = limits.number("d_state_max_s"), limits.number("zombies_max")
    before = context.previous.get("since", {})
    since: dict[str, list[float]] = {}
    for process in measured.waiting:
        # Like the kernel's own detector: a process that runs now and then, if only to wait again, does not hang.
        known = before.get(process.key)
        first, switches = known if isinstance(known, list) else (context.now, -1)
        since[process.key] = [first if switches == process.switches else context.now, process.switches]
    context.state["since"] = since
    for process in measured.waiting:
        stuck = context.now - since[process.key][0]
        if stuck > most:
            message = f"pid {process.pid} ({process.command[:60]}) hangs in the kernel for {stuck:.0f} s"
            # A vfork whose child sleeps looks the same, and any user can create one; but a kill would end it.
            user_made = process.uid != 0 and not process.killed
            subject = f"pid {process.pid}"
            yield problem(message, subject=subject, measured=f"{stuck:.0f}", threshold=f"{most:g}", user_made=user_made)
    if measured.zombies > zombies_max:
        message = f"{measured.zombies} zombies: their parents do not wait for them"
        yield problem(message, measured=measured.zombies, threshold=f"{zombies_max:g}", user_made=True)
    else:
        waiting = len(measured.waiting)
        yield ok(f"{waiting} processes in D, {measured.zombies} zombies", measured=waiting)
