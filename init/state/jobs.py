"""Jobs around a copy: two listings of slurmctld, between which the copy was made."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from init.records import record

SQUEUE = ("/usr/bin/squeue", "--all", "--noheader", "--format=%i|%T")
# A job in one of these ends without any act of slurmctld's.
OVER = frozenset({"COMPLETING", "STAGE_OUT"})


def parse(text: str) -> dict[str, str]:
    """Return job -> state from squeue's lines, without jobs that have ended."""
    rows = (line.strip().rpartition("|") for line in text.splitlines())
    return {job: state for job, _, state in rows if job and state and state not in OVER}


@record(frozen=True, slots=True)
class Around:
    """Jobs that are the same before and after the copy, which it must hold so, and those that are not."""

    settled: Mapping[str, str]
    changing: frozenset[str]

    @property
    def by_state(self) -> tuple[tuple[str, int], ...]:
        return tuple(sorted(Counter(self.settled.values()).items()))


def around(before: Mapping[str, str], after: Mapping[str, str]) -> Around:
    settled = {job: state for job, state in before.items() if after.get(job) == state}
    return Around(settled, frozenset((before.keys() | after.keys()) - settled.keys()))


def differences(expected: Around, restored: Mapping[str, str]) -> list[str]:
    """Compare a restored slurmctld's jobs with the copy's list; an empty list if all are there."""
    return [
        f"job {job} is {restored.get(job, 'missing')}, expected {state}"
        for job, state in expected.settled.items()
        if restored.get(job) != state
    ]


def beyond(expected: Around, restored: Mapping[str, str]) -> int:
    """Count restored jobs that the list does not know: they had ended, and slurmctld had not saved that yet."""
    # A task that started takes its number out of the pending rest, "7_[3-9]": the array itself was known.
    arrays = {_array(job) for job in expected.settled.keys() | expected.changing}
    return sum(_array(job) not in arrays for job in restored)


def _array(job: str) -> str:
    return job.partition("_")[0].partition("+")[0]


def highest(jobs: Iterable[str]) -> int:
    numbers = (_array(job) for job in jobs)
    return max((int(text) for text in numbers if text.isascii() and text.isdecimal() and len(text) < 12), default=0)
