"""Tasks of a running job, compared: which lag behind the others, and what each node's processes do. Pure.

Only what the numbers show is said. In a collective, ranks that wait often spin like one that works: then all look
alike, and nothing is said. A task counts as behind if it uses far less of a processor than the others now, and has
used less since its start: half a second alone may be a pause.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from health.jobs.model import Answer, Fact, Job, JobCause, Sure, list_briefly, safe, size
from health.tasks import MOST_PROCESSES, MOST_TASKS, STOPPED, WAITS

if TYPE_CHECKING:
    from health.jobs.boxes import Box

BUSY = 20.0  # percent of a processor
FAR = 0.2  # of what the others use
BEHIND_S = 10.0  # of processor time since their start
MUCH = 16 << 20  # bytes that a task wrote, so that one that wrote none differs
LITTLE = 0.01
LONGEST = 1 << 63
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Task:
    node: str
    step: int
    rank: int
    seconds: float  # of processor time since its start
    percent: float  # of a processor now; negative: not known
    state: str
    written: int  # negative: not known


@dataclass(frozen=True, slots=True)
class Lag:
    sentence: str
    node: str  # of the first task that is different


def add(answer: Answer, boxes: Sequence[Box], job: Job) -> Answer:
    """Add what the job's tasks do to the answer for a running job; name those that lag in its headline."""
    tasks = {box.node: tuple(read(box)) for box in boxes}
    facts = [fact for box in boxes if (fact := _describe_node(box, tasks[box.node]))]
    steps: dict[int, list[Task]] = {}
    for each in tasks.values():
        for task in each:
            steps.setdefault(task.step, []).append(task)
    facts += [Fact(text, "/proc of its nodes") for step in sorted(steps) if (text := find_silent(steps[step]))]
    unknown = (*answer.unknown, *(text for box in boxes for text in _list_gaps(box)))
    answer = replace(answer, evidence=(*answer.evidence, *facts), unknown=unknown)
    lag = next((lag for step in sorted(steps) if (lag := judge(steps[step]))), None)
    if lag is None:
        return answer
    answer = replace(answer, headline=f"{answer.headline} {lag.sentence}")
    if answer.cause is JobCause.NONE:
        answer = replace(answer, cause=JobCause.UNKNOWN, sure=Sure.POSSIBLE)
    command = f"srun --overlap --jobid={job.id} -N1 -n1 -w {safe(lag.node, 80)} --pty top"
    return replace(answer, advice=(f"see what it does there: {command}", *answer.advice))


def read(box: Box) -> Iterator[Task]:
    """Read the tasks of the box's first line."""
    rows = _entry(box).get("tasks")
    for row in rows[:MOST_TASKS] if isinstance(rows, list) else ():
        if not isinstance(row, list) or len(row) != 6:
            continue
        step, rank, seconds, percent, state, written = row
        numbers = (step, rank, seconds, percent, written)
        if state in ("", STOPPED, WAITS) and all(_is_number(part, -1) for part in numbers) and min(step, rank) >= 0:
            yield Task(box.node, int(step), int(rank), float(seconds), float(percent), state, int(written))


def judge(tasks: Sequence[Task]) -> Lag | None:
    """Say which of a step's tasks differ; None if they look alike, or not enough is known."""
    stopped = [task for task in tasks if task.state == STOPPED]
    if stopped and len(stopped) < len(tasks):
        are = "is" if len(stopped) == 1 else "are"
        end = "a signal such as SIGSTOP, or a debugger, did that; SIGCONT ends it"
        return Lag(f"{_name(stopped, first=True)} {are} stopped: {end}.", stopped[0].node)
    if len(tasks) < 2 or any(task.percent < 0 for task in tasks):
        return None
    busy = [task for task in tasks if task.percent >= BUSY]
    bound = FAR * min((task.percent for task in busy), default=0.0)
    slow = [task for task in tasks if task.percent <= bound]
    if not busy or len(slow) + len(busy) < len(tasks) or not slow:
        return None
    if min(task.seconds for task in busy) - max(task.seconds for task in slow) < BEHIND_S:
        return None
    if len(slow) <= len(busy):
        waits = [task for task in slow if task.state == WAITS]
        they = "it" if len(slow) == 1 else "they"
        meaning = f"{they} may be stuck or wait"
        if len(waits) == len(slow):
            meaning = f"{they} {'waits' if len(slow) == 1 else 'wait'} for a device or a file system"
        return Lag(_contrast(slow, busy, meaning), slow[0].node)
    return Lag(_contrast(busy, slow, "the others may wait for it" if len(busy) == 1 else "the others may wait"),
                   busy[0].node)  # fmt: skip


def find_silent(tasks: Sequence[Task]) -> str:
    """Say which few of a step's tasks have written nothing; "" if there are none."""
    writers = [task for task in tasks if task.written >= MUCH]
    bound = LITTLE * min((task.written for task in writers), default=0)
    silent = [task for task in tasks if 0 <= task.written <= bound]
    if not writers or not silent or len(writers) + len(silent) < len(tasks) or len(silent) > len(writers):
        return ""
    least = _amount(min(task.written for task in writers))
    has, amount = "has" if len(silent) == 1 else "have", _amount(max(task.written for task in silent))
    rest = f"the other {len(writers)} at least" if len(writers) > 1 else _name(writers)
    return f"{_name(silent)} {has} written {amount} to files, {rest} {least}"


def _contrast(few: Sequence[Task], rest: Sequence[Task], meaning: str) -> str:
    uses = "uses" if len(few) == 1 else "use"
    other = f"the other {len(rest)} use" if len(rest) > 1 else f"{_name(rest)} uses"
    return f"{_name(few, first=True)} {uses} {_share(few)} of a processor while {other} {_share(rest)}: {meaning}."


def _share(tasks: Iterable[Task]) -> str:
    low, *_, high = sorted([round(task.percent) for task in tasks] * 2)
    return f"{low} %" if low == high else f"{low} to {high} %"


def _name(tasks: Sequence[Task], *, first: bool = False) -> str:
    nodes = {task.node for task in tasks}
    if len(nodes) == 1 and len(tasks) > 1:
        text = f"tasks {list_briefly(str(task.rank) for task in tasks)} on {safe(tasks[0].node, 80)}"
    else:
        text = list_briefly(f"task {task.rank} on {safe(task.node, 80)}" for task in tasks)
    return text[0].upper() + text[1:] if first else text


def _describe_node(box: Box, tasks: Sequence[Task]) -> Fact | None:
    texts = []
    known = [task for task in tasks if task.percent >= 0]
    if known:
        whose = f"task {known[0].rank} uses" if len(known) == 1 else f"{len(known)} tasks use"
        each = "" if len(known) == 1 else " each"
        texts.append(f"{whose} {_share(known)} of a processor{each} now")
    if amounts := _numbers(box, "bytes"):
        text = f"its processes have read {_amount(amounts[0])} from files and written {_amount(amounts[1])}"
        if rates := _numbers(box, "bytes_a_second"):
            text += f" (now {_amount(rates[0])} and {_amount(rates[1])} a second)" if any(rates) else " (nothing now)"
        texts.append(text)
    node = safe(box.node, 80)
    return Fact(f"on {node} {'; '.join(texts)}", f"/proc of {node}") if texts else None


def _list_gaps(box: Box) -> Iterator[str]:
    entry, node = _entry(box), safe(box.node, 80)
    processes = entry.get("processes")
    if not _is_number(processes, 1):
        return
    if "tasks" not in entry:
        yield f"what its tasks on {node} do: it has more than {MOST_PROCESSES} processes there"
    elif "bytes" not in entry:
        yield f"what it reads and writes on {node}: the pod may not see all of its processes (SYS_PTRACE)"
    if isinstance(rows := entry.get("tasks"), list) and len(rows) >= MOST_TASKS:
        yield f"what its tasks on {node} beyond the first {MOST_TASKS} of them do"


def _entry(box: Box) -> dict[str, object]:
    return box.entries[0] if box.entries and box.entries[0].get("kind") == "now" else {}


def _numbers(box: Box, key: str) -> tuple[int, int] | None:
    pair = _entry(box).get(key)
    if isinstance(pair, list) and len(pair) == 2 and all(_is_number(part, 0) for part in pair):
        return int(pair[0]), int(pair[1])
    return None


def _is_number(value: object, least: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and least <= value < LONGEST


def _amount(number: int) -> str:
    """Write a number of bytes as people compare them: what is less than a MiB is little."""
    return size(number // MIB) if number >= MIB else "nothing" if number == 0 else "less than 1 MiB"
