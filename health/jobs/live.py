"""Say what the nodes of a running job tell of it now: what its GPUs do, which checks found a problem. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from health.jobs.model import Answer, Fact, Job, JobCause, Sure, World, duration, listed, safe, size

if TYPE_CHECKING:
    from health.jobs.boxes import Box

HUNG_S = 600.0  # without output and with unused GPUs
MOST_GPUS = 64


@dataclass(frozen=True, slots=True)
class GpuUse:
    minor: int
    use: int
    memory: int
    room: int
    idle: float  # seconds for which each sample saw it unused


def add(answer: Answer, boxes: Sequence[Box], job: Job, world: World, now: float) -> Answer:
    """Add to the answer of a running job what its nodes say."""
    if "RUNNING" not in job.states:
        return answer
    nodes = {box.node: tuple(_uses(box)) for box in boxes}
    facts = [_fact(node, uses) for node, uses in nodes.items() if uses]
    answer = replace(answer, evidence=(*answer.evidence, *facts))
    problems = [f"{safe(box.node, 80)}: {safe(text, 160)}" for box in boxes for text in _problems(box)]
    # A node that does not answer is worse than a problem on another.
    if problems and answer.cause is not JobCause.MACHINE:
        head = f"{answer.headline} A check found a problem while it ran: {listed(problems, 2)}."
        answer = replace(answer, headline=head, cause=JobCause.MACHINE, sure=Sure.POSSIBLE)
    used = [gpu for uses in nodes.values() for gpu in uses]
    idle = min((gpu.idle for gpu in used), default=0.0)
    if idle < HUNG_S:
        return answer
    silent = min(idle, world.output_age or 0.0)
    if silent >= HUNG_S and all(nodes.values()):
        head = f"{answer.headline} No output and 0 % of its GPUs for {duration(silent)}: hung?"
        cause = JobCause.UNKNOWN if answer.cause is JobCause.NONE else answer.cause
        return replace(answer, headline=head, cause=cause, sure=Sure.POSSIBLE)
    advice = f"its GPUs were unused for {duration(idle)}: see if it waits for data, or does not use them at all"
    return replace(answer, advice=(*answer.advice, advice))


def _uses(box: Box) -> Iterator[GpuUse]:
    entry = box.entries[0] if box.entries and box.entries[0].get("kind") == "now" else {}
    rows, sampled = entry.get("gpus"), entry.get("sampled")
    if not isinstance(rows, list) or not isinstance(sampled, int | float):
        return
    for row in rows[:MOST_GPUS]:
        if isinstance(row, list) and len(row) == 5 and all(isinstance(part, int | float) for part in row):
            minor, use, memory, room, since = row
            if all(0 <= part < 1 << 40 for part in row):
                # Both times are the node's own.
                yield GpuUse(int(minor), int(use), int(memory), int(room), max(0.0, sampled - since) if since else 0.0)


def _fact(node: str, uses: Sequence[GpuUse]) -> Fact:
    shown = listed((f"GPU {gpu.minor} {gpu.use} %, {size(gpu.memory)} of {size(gpu.room)}" for gpu in uses), 8)
    return Fact(f"on {safe(node, 80)} it uses {shown}", "nvidia-smi")


def _problems(box: Box) -> list[str]:
    """Return the problems that came while the job ran and have not gone, by the broker's words in the box."""
    standing: dict[str, str] = {}
    for entry in box.last_run:
        text = entry.get("text")
        if entry.get("kind") != "seen" or not isinstance(text, str):
            continue
        if text.startswith("no longer: "):
            standing.pop(text.removeprefix("no longer: "), None)
        elif not text.startswith("drained by the broker") and ": " in text:
            standing[text.partition(": ")[0]] = text
    return list(standing.values())
