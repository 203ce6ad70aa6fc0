"""Find the task of a job that failed first, from the steps' ends in the black boxes of its nodes. Pure.

When one task fails, Slurm or MPI ends the others: the first failure is the cause and the rest follow from it. Times of
two nodes are compared by their clocks, as far as these are known.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from health.exits import OUT_OF_MEMORY
from health.jobs.model import Answer, Fact, Job, JobCause, Sure, duration, listed, moment, safe, signal_name

if TYPE_CHECKING:
    from health.jobs.boxes import Box, Entry

TERM = 15  # by which Slurm and MPI end the other tasks: never the first failure where another is close
CLOSE_S = 0.05  # of two tasks on one node: slurmstepd collects their ends one after the other
CLOCKS_S = 0.5  # by which clocks may have moved since, at least
UNKNOWN_CLOCK_S = 10.0
BLAMED = frozenset({JobCause.CODE, JobCause.REQUEST, JobCause.LIMIT, JobCause.UNKNOWN, JobCause.MACHINE})


@dataclass(frozen=True, slots=True)
class Failure:
    rank: int
    node: str
    code: int
    signal: int
    at: float  # by this clock
    doubt: float  # seconds by which it may be wrong

    @property
    def end(self) -> str:
        if self.signal == OUT_OF_MEMORY:
            return "out of memory"
        return f"killed by {signal_name(self.signal)}" if self.signal else f"exit code {self.code}"

    @property
    def named(self) -> str:
        return f"task {self.rank} on {safe(self.node, 80)}"

    def is_clearly_earlier(self, other: Failure) -> bool:
        margin = CLOSE_S if self.node == other.node else CLOCKS_S + self.doubt + other.doubt
        return other.at - self.at > margin

    def is_surely_before(self, other: Failure) -> bool:
        is_a_consequence = other.signal == TERM != self.signal and not other.is_clearly_earlier(self)
        return is_a_consequence or self.is_clearly_earlier(other)


@dataclass(frozen=True, slots=True)
class FailedStep:
    name: str
    failures: tuple[Failure, ...]  # by time
    tasks: int  # on the nodes that told
    is_whole: bool  # each node of the job told of its tasks

    @property
    def first(self) -> Failure:
        return self.failures[0]

    @property
    def rivals(self) -> tuple[Failure, ...]:
        """Return those that may have failed first as well."""
        return tuple(each for each in self.failures[1:] if not self.first.is_surely_before(each))

    @property
    def sentence(self) -> str:
        seen = "" if self.is_whole else " of the nodes that told"
        if self.rivals:
            names = listed(each.named for each in (self.first, *self.rivals))
            return f"Of step {self.name}{seen} these failed first, too close together to tell apart: {names}."
        return f"First{seen} failed {self.first.named}, in step {self.name}: {self.first.end}."


def find(boxes: Iterable[Box], job: Job) -> FailedStep | None:
    """Return the last step of which a task failed: the job went on after an earlier one."""
    failures: dict[int, list[Failure]] = {}
    tasks: dict[int, int] = {}
    gaps: set[int] = set()
    is_whole = True
    # A user of the node can forge all lines of a step in slurmd's log, but no step in accounting.
    recorded = {step.id.rpartition(".")[2] for step in job.steps} - {""}
    for box in boxes:
        run = box.last_run
        is_whole &= not box.obstacle and any(entry.get("kind") == "end" for entry in run)
        for entry in run:
            if entry.get("kind") != "step" or not isinstance(number := entry.get("step"), int):
                continue
            if recorded and str(number) not in recorded:
                continue
            if entry.get("odd"):
                gaps.add(number)
            ran = entry.get("tasks")
            tasks[number] = tasks.get(number, 0) + (ran if isinstance(ran, int) else 0)
            failures.setdefault(number, []).extend(_failures(box, entry))
    numbers = [number for number, failed in failures.items() if failed]
    if not numbers:
        return None
    last = max(numbers)
    ordered = sorted(failures[last], key=lambda each: each.at)
    own = next((each for each in ordered if each.signal != TERM), ordered[0])
    if not ordered[0].is_clearly_earlier(own):
        ordered.remove(own)
        ordered.insert(0, own)
    return FailedStep(f"{job.shown}.{last}", tuple(ordered), tasks[last], is_whole and last not in gaps)


def _failures(box: Box, entry: Entry) -> Iterable[Failure]:
    ahead, doubt = box.clock or (0.0, UNKNOWN_CLOCK_S)
    failed = entry.get("failed")
    for each in failed if isinstance(failed, list) else ():
        if isinstance(each, list) and len(each) == 4 and all(isinstance(part, int | float) for part in each):
            rank, code, signal, at = each
            if 0 <= at < 1 << 40:
                yield Failure(int(rank), box.node, int(code), int(signal), at - ahead, doubt)


def facts(step: FailedStep) -> Sequence[Fact]:
    first = step.first
    source = f"black box of {safe(first.node, 80)}"
    shown = [Fact(f"step {step.name}: {first.named} ended first, {moment(first.at)}: {first.end}", source)]
    rest = step.failures[1:]
    if rest:
        after = duration(rest[0].at - first.at)
        names = listed(f"{each.named} ({each.end})" for each in rest)
        shown.append(Fact(f"step {step.name}: after {after} followed {names}", "black boxes of its nodes"))
    return shown


def add(answer: Answer, boxes: Sequence[Box], job: Job) -> Answer:
    """Name the first failure in the answer for a job that failed."""
    step = find(boxes, job) if job.has_ended and job.state != "COMPLETED" else None
    if step is None:
        return answer
    answer = replace(answer, evidence=(*answer.evidence, *facts(step)))
    if step.tasks < 2 or answer.cause not in BLAMED or job.state not in ("FAILED", "OUT_OF_MEMORY"):
        return answer
    answer = replace(answer, headline=f"{step.sentence} {answer.headline}")
    if answer.cause is JobCause.UNKNOWN and step.first.code and step.is_whole and not step.rivals:
        answer = replace(answer, cause=JobCause.CODE, sure=Sure.LIKELY)
    return answer
