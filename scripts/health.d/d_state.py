"""Processes that are stuck in the kernel, and zombies."""

from __future__ import annotations

from collections.abc import Iterable

from parsers import processes
from parsers.processes import PROCESSES, Process

from gitsync.health_api import Check, Class, Context, Finding, Inputs, When, ok, problem

CHECK = Check(
    name="d_state",
    about="no process hangs in the kernel, and few are zombies",
    class_=Class.REBOOT,
    period_s=60,
    when=frozenset({When.BACKGROUND}),
    sources=(PROCESSES,),
    thresholds="host",
)


def parse(inputs: Inputs) -> tuple[Process, ...]:
    return processes.parse(inputs["processes"])


def judge(measured: tuple[Process, ...], context: Context) -> Iterable[Finding]:
    limits = context.limits.default
    most, zombies_max = limits.number("d_state_max_s"), limits.number("zombies_max")
    before = context.previous.get("since", {})
    # The kernel does not tell since when: we remember when we first saw it so. Kernel threads rest in D by design.
    waiting = [process for process in measured if process.state == "D" and not process.command.startswith("[")]
    since = {process.key: float(before.get(process.key, context.now)) for process in waiting}
    context.state["since"] = since
    for process in waiting:
        stuck = context.now - since[process.key]
        if stuck > most:
            said = f"pid {process.pid} ({process.command[:60]}) hangs in the kernel for {stuck:.0f} s"
            yield problem(said, subject=f"pid {process.pid}", measured=f"{stuck:.0f}", threshold=f"{most:g}")
    zombies = sum(1 for process in measured if process.state == "Z")
    if zombies > zombies_max:
        said = f"{zombies} zombies: somebody does not wait for its children"
        yield problem(said, class_=Class.NODE, measured=zombies, threshold=f"{zombies_max:g}")
    else:
        yield ok(f"{len(waiting)} processes in D, {zombies} zombies", measured=len(waiting))
