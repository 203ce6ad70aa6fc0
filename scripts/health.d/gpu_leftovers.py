"""Without a job on the node no process uses a GPU, and no GPU has memory in use."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from parsers import nvidia_smi, processes
from parsers.nvidia_smi import NVIDIA_SMI
from parsers.processes import PROCESSES

from health.api import Check, Class, Context, Finding, Hardware, Inputs, Unreadable, UserMade, When, ok, problem

CHECK = Check(
    name="gpu_leftovers",
    about="no GPU process or memory is left when no job runs",
    class_=Class.REBOOT,
    period_s=60,
    when=frozenset({When.BACKGROUND, When.EPILOG}),
    hardware=Hardware.GPU,
    sources=(NVIDIA_SMI, PROCESSES),
    thresholds="gpu",
    user_made=UserMade.PARTLY,
)


@dataclass(frozen=True, slots=True)
class Held:
    uuid: str
    label: str
    model: str
    used_mib: int
    holders: tuple[tuple[int, str], ...]


@dataclass(frozen=True, slots=True)
class Leftovers:
    gpus: tuple[Held, ...]
    jobs: frozenset[str]
    # Number of users' processes: one may use a GPU without being listed.
    people: int = 0


def parse(inputs: Inputs) -> Leftovers:
    held = []
    for gpu in nvidia_smi.parse(inputs["nvidia_smi_q"]):
        used = gpu.count("FB Memory Usage", "Used")
        if used is None:
            raise Unreadable(f"{gpu.label} does not report its used memory")
        section = gpu.section("Processes")
        if section is None and gpu.text("Processes") != "None":
            raise Unreadable(f"{gpu.label}: Processes: {gpu.text('Processes')!r}")
        listed = section.processes if section else []
        holders = tuple((int(row["Process ID"]), row.get("Name", "?")) for row in listed)
        held.append(Held(gpu.uuid, gpu.label, gpu.model, used, holders))
    listed_processes = processes.parse(inputs["processes"])
    people = sum(1 for process in listed_processes if processes.is_users(process))
    return Leftovers(tuple(held), frozenset(processes.jobs(listed_processes)), people)


def judge(measured: Leftovers, context: Context) -> Iterable[Finding]:
    if not measured.gpus:
        raise Unreadable("no GPU to judge")
    if measured.jobs:
        # While jobs share the node, the owner of a process is unknown here.
        yield ok(f"{len(measured.jobs)} jobs run: leftovers are not judged")
        return
    for gpu in measured.gpus:
        most = context.limits.model(gpu.model).number("idle_memory_max_mib")
        allowed = context.limits.model(gpu.model).strings("idle_processes_allowed")
        strangers = [(pid, name) for pid, name in gpu.holders if not any(part in name for part in allowed)]
        if strangers:
            pid, name = strangers[0]
            message = f"{gpu.label}: {name} (pid {pid}) uses it and no job runs"
            yield problem(message, subject=gpu.uuid, measured=len(strangers), threshold=0, user_made=True)
        elif gpu.used_mib > most and not gpu.holders:
            message = f"{gpu.label}: {gpu.used_mib} MiB in use by no process"
            limit, user_made = f"{most:g}", measured.people > 0
            yield problem(message, subject=gpu.uuid, measured=gpu.used_mib, threshold=limit, user_made=user_made)
        else:
            yield ok(f"{gpu.label}: free", subject=gpu.uuid, measured=gpu.used_mib, threshold=f"{most:g}")
