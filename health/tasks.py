"""Measure the tasks of a running job on this node: processor time, states, and bytes read and written.

`scontrol listpids` asks the job's own slurmstepd, never slurmctld; the kernel counts the rest. So no task can claim
another's rank: its environment is not read. Two looks half a second apart give the present rates. They cost only a
person that asks, and nothing is kept.

A task is what slurmstepd started, with the children and grandchildren that lead up to it. The kernel adds a child that
ended to its parent. A process that left its parent counts for the node alone.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial

from health import gpus
from health.places import Places
from init.slurm import client

PAUSE_S = 0.5
WITHIN_S = 2.0
MOST_LISTED = 1 << 20  # bytes
MOST_PROCESSES = 4096  # more are not looked at: each costs two files a look
MOST_TASKS = 128
LARGEST = 1 << 62
STOPPED, WAITS = "T", "D"  # all its processes are stopped; one waits for a device or a file system
_LINE = re.compile(r"(\d{1,10}) +\d{1,10} +(\S{1,30}) +(?:\d{1,7}|-) +(\d{1,7}|-) *", re.ASCII)
_STEP = re.compile(r"(\d{1,9})(?:\+\d{1,9})?", re.ASCII)
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class ProcessUse:
    parent: int
    state: str
    ticks: int  # of processor time, with the children that ended
    read: int | None  # bytes; None: this node may not see them
    written: int | None


@dataclass(slots=True)
class TaskUse:
    """Sum over processes."""

    seconds: float = 0.0
    read: int | None = 0
    written: int | None = 0
    states: dict[int, str] = field(default_factory=dict)

    def add(self, pid: int, process: ProcessUse) -> None:
        self.seconds += process.ticks / _TICKS
        self.read = None if self.read is None or process.read is None else self.read + process.read
        self.written = None if self.written is None or process.written is None else self.written + process.written
        self.states[pid] = process.state


@dataclass(frozen=True, slots=True)
class TaskSnapshot:
    """The job's processes at one moment."""

    at: float
    tasks: Mapping[tuple[int, int], TaskUse]  # by step and rank
    whole: TaskUse


def describe(job: int, node: str) -> dict[str, object]:
    """Return what a black box's first line says of the job's tasks; only `processes` where these are too many."""

    def listed() -> str:
        try:
            argv = [client.SCONTROL, "listpids", str(job), node]
            return client.run(argv, "", within=WITHIN_S, most=MOST_LISTED)
        except client.SlurmError as error:
            return " " * (MOST_LISTED + 1) if error.is_too_long else ""

    return compare(listed, "/proc", PAUSE_S)


def lead(box: bytes, job: int, node: str) -> bytes:
    """Return the job's box, led by this node's clock and, while the job runs, its GPUs and tasks."""
    now_line = gpus.describe_now(box, Places.from_environment().gpus, time.time(), partial(describe, job, node))
    return now_line + box


def compare(listed: Callable[[], str], proc: str, pause: float) -> dict[str, object]:
    ranks, pids = parse_listing(text := listed())
    if len(text) > MOST_LISTED or len(pids) > MOST_PROCESSES:
        return {"processes": max(len(pids), MOST_PROCESSES + 1)}
    if not pids:
        return {}
    first = second = look(ranks, pids, proc)
    if ranks:  # a job without tasks has nothing to compare
        time.sleep(pause)
        ranks, pids = parse_listing(listed())
        second = look(ranks, pids[:MOST_PROCESSES], proc)
    rows = [_row(key, first, second) for key in sorted(second.tasks) if key in first.tasks]
    entry: dict[str, object] = {"processes": len(pids), "tasks": rows[:MOST_TASKS]}
    if second.whole.read is not None and second.whole.written is not None:
        entry["bytes"] = [min(second.whole.read, LARGEST), min(second.whole.written, LARGEST)]
        if (rates := _rates(first, second)) is not None:
            entry["bytes_a_second"] = rates
    return entry


def parse_listing(text: str) -> tuple[dict[int, tuple[int, int]], list[int]]:
    """Return step and rank of each task's first process, and all processes of the job."""
    ranks: dict[int, tuple[int, int]] = {}
    pids: dict[int, None] = {}
    for line in text.splitlines()[1:]:
        if not (match := _LINE.fullmatch(line)):
            continue
        pid = int(match[1])
        pids[pid] = None
        step = _STEP.fullmatch(match[2])
        if step and match[3] != "-":
            ranks[pid] = int(step[1]), int(match[3])
    return ranks, list(pids)


def look(ranks: Mapping[int, tuple[int, int]], pids: Iterable[int], proc: str) -> TaskSnapshot:
    at = time.monotonic()
    processes = {pid: process for pid in pids if (process := read_process(pid, proc))}
    whole, tasks = TaskUse(), {key: TaskUse() for pid, key in ranks.items() if pid in processes}
    for pid, process in processes.items():
        whole.add(pid, process)
        leader = pid
        passed: set[int] = set()  # a number that was used again meanwhile may make a circle
        while leader in processes and leader not in ranks and leader not in passed:
            passed.add(leader)
            leader = processes[leader].parent
        if leader in ranks and ranks[leader] in tasks:
            tasks[ranks[leader]].add(pid, process)
    return TaskSnapshot(at, tasks, whole)


def read_process(pid: int, proc: str = "/proc") -> ProcessUse | None:
    """Return what the kernel counts; None for a process that ended meanwhile."""
    try:
        # Its name stands in parentheses, and may have any letters.
        fields = _read_file(f"{proc}/{pid}/stat").rpartition(")")[2].split()
        state, parent, ticks = fields[0], int(fields[1]), sum(map(int, fields[11:15]))
    except (OSError, IndexError, ValueError):
        return None
    read = written = None
    try:
        lines = (line.partition(": ") for line in _read_file(f"{proc}/{pid}/io").splitlines())
        numbers = {name: int(number) for name, _, number in lines}
        read, written = numbers["read_bytes"], numbers["write_bytes"]
    except (FileNotFoundError, ProcessLookupError):
        return None
    except (OSError, KeyError, ValueError):
        pass  # without SYS_PTRACE
    return ProcessUse(parent, state, ticks, read, written)


def _read_file(path: str) -> str:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(fd, 4096).decode("utf-8", "replace")
    finally:
        os.close(fd)


def _row(key: tuple[int, int], first: TaskSnapshot, second: TaskSnapshot) -> list[object]:
    """Return step, rank, processor seconds, percent of a processor now, state, bytes written; -1 if not known."""
    before, after = first.tasks[key], second.tasks[key]
    passed = second.at - first.at
    grown = after.seconds - before.seconds
    # A child that ended unseen by its parent takes its time along.
    percent = round(100 * grown / passed, 1) if passed > 0 and grown >= 0 else -1
    states = [state for state in after.states.values() if state not in "ZX"]
    state = ""
    if states and all(state in "Tt" for state in states):
        state = STOPPED
    elif any(state == "D" == before.states.get(pid) for pid, state in after.states.items()):
        state = WAITS
    written = -1 if after.written is None else min(after.written, LARGEST)
    return [*key, round(after.seconds, 2), percent, state, written]


def _rates(first: TaskSnapshot, second: TaskSnapshot) -> list[int] | None:
    passed = second.at - first.at
    before, after = (first.whole.read, first.whole.written), (second.whole.read, second.whole.written)
    pairs = [(old, new) for old, new in zip(before, after, strict=True) if old is not None and new is not None]
    if passed <= 0 or len(pairs) < len(after) or any(new < old for old, new in pairs):
        return None
    return [min(int((new - old) / passed), LARGEST) for old, new in pairs]
