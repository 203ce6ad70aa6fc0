"""Jobs of several users fail here, and end well on other nodes."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from math import comb

from health.api import Builtin, Check, Class, Context, Finding, Inputs, Unreadable, When, ok, problem, unknown

CHECK = Check(
    name="failing_jobs",
    about="jobs of several users do not fail on this node alone",
    class_=Class.MANUAL,
    period_s=60,
    when=frozenset({When.BACKGROUND}),
    sources=(Builtin("failed_jobs", evidence=True),),
    thresholds="",
)

WITHIN_S = 3600.0
USERS = 3
# The odds that failures which have nothing to do with the node all fall on it.
ODDS = 1000
SHOWN = 5


@dataclass(frozen=True, slots=True)
class FailingJob:
    """A user's job of one name: its failures here, and its other ends, None if not known."""

    user: str
    jobs: tuple[str, ...]
    times: tuple[float, ...]
    passed_here: int | None = None
    passed_elsewhere: int | None = None
    failed_elsewhere: int | None = None

    @property
    def fails_here_alone(self) -> bool:
        return self.passed_here == 0 and self.failed_elsewhere == 0 and bool(self.passed_elsewhere)


def parse(inputs: Inputs) -> list[FailingJob]:
    lines = inputs["failed_jobs"].splitlines()
    if len(lines) < 2 or lines[0] != f"failed jobs {len(lines) - 2}" or lines[-1] != "end":
        raise Unreadable("failed_jobs: wanted a first line with the count, and a last line")
    try:
        return [_failing(line) for line in lines[1:-1]]
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise Unreadable(f"failed_jobs: {type(error).__name__}: {error}") from error


def _failing(line: str) -> FailingJob:
    data = json.loads(line)
    runs = data["other_runs"] or {}
    numbers = [runs.get(key) for key in ("passed_here", "passed_elsewhere", "failed_elsewhere")]
    if any(isinstance(number, bool) or not isinstance(number, int | None) for number in numbers):
        raise ValueError("wanted numbers of runs")
    jobs, times = tuple(map(str, data["jobs"])), tuple(map(float, data["times"]))
    if len(jobs) != len(times):
        raise ValueError("wanted a time for each job")
    return FailingJob(str(data["user"])[:64], jobs, times, *numbers)


def judge(measured: list[FailingJob], context: Context) -> Iterable[Finding]:
    recent = [each for each in measured if any(abs(context.now - at) <= WITHIN_S for at in each.times)]
    users = {each.user for each in recent}
    alone = [each for each in recent if each.fails_here_alone]
    witnesses = {each.user for each in alone}
    if len(witnesses) >= USERS and _odds(alone) >= ODDS:
        ids = ", ".join([job[:20] for each in alone for job in each.jobs][:SHOWN])
        passed = sum(each.passed_elsewhere or 0 for each in alone)
        failures = f"jobs of {len(witnesses)} users failed here within an hour ({ids})"
        reason = f"{failures}; {passed} like them ended well elsewhere"
        return [problem(reason, measured=len(witnesses), threshold=USERS)]
    if len({each.user for each in recent if each.passed_here is None}) >= USERS:
        return [unknown(f"jobs of {len(users)} users failed here within an hour; of their other runs nothing is known")]
    return [ok(f"jobs of {len(users)} users failed here within an hour", measured=len(users), threshold=USERS)]


def _odds(alone: list[FailingJob]) -> int:
    """Return in how many ways as many failures fall on the runs; in one of these all are here."""
    failed = sum(len(each.jobs) for each in alone)
    return comb(failed + sum(each.passed_elsewhere or 0 for each in alone), failed)
