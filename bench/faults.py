"""Fail PID 1's system calls: each call that it makes, each fitting error, at several places.

`python -m bench faults [CALL ...]`. Needs root and strace. Each fault gets a PID 1 of its own
(tests/process/fault_life.py): boot of five services, a restart, probes, a reload, a hand-over, kills, requests, HTTP,
syslog and the stop. A run fails if PID 1 ends, hangs, loses a service or shows a wrong state. Only a fault during the
start may end PID 1, with one message.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

from tests.process.fault_life import FITS, Fault, Outcome, census, live, places


def matrix(calls: dict[str, int], *, late: bool) -> Iterator[Fault]:
    for call, count in calls.items():
        for error in FITS[call]:
            for when in places(count):
                yield Fault(call, error, when, late)


def run(faults: Iterable[Fault], workers: int) -> Iterator[Outcome]:
    with ThreadPoolExecutor(workers) as pool:
        yield from pool.map(live, faults)


def row(call: str, made: int, outcomes: list[Outcome]) -> str:
    survived = [outcome for outcome in outcomes if not outcome.failed]
    errors = " ".join(FITS[call])
    refused = sum(outcome.refused for outcome in survived)
    reported = sum(bool(outcome.told) and not outcome.refused for outcome in survived)
    cells = (
        call,
        made,
        errors,
        len(outcomes),
        sum(outcome.injected for outcome in outcomes),
        len(survived),
        reported,
        refused,
        len(outcomes) - len(survived),
    )
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def main(arguments: list[str] | None = None) -> int:
    if os.geteuid() != 0 or not shutil.which("strace"):
        print("bench faults needs root and strace", file=sys.stderr)
        return 1
    live(None)  # warm up: Python compiles its modules before the measured runs
    calls, once_ready = (
        {
            name: calls_made
            for name, calls_made in census(live(None, late=late)).items()
            if not arguments or name in arguments
        }
        for late in (False, True)
    )
    outcomes_by_call: dict[str, list[Outcome]] = {call: [] for call in calls | once_ready}
    faults = [*matrix(calls, late=False), *matrix(once_ready, late=True)]
    for outcome in run(faults, os.cpu_count() or 1):
        assert outcome.fault is not None
        outcomes_by_call[outcome.fault.call].append(outcome)
        if outcome.failed:
            print(f"FAILED {outcome.fault}: {outcome.failed}", file=sys.stderr, flush=True)
    print("| call | made | errors | lives | injected | survived | reported | refused at the start | failed |")
    print("|---|---|---|---|---|---|---|---|---|")
    for call, outcomes in outcomes_by_call.items():
        print(row(call, calls.get(call, 0), outcomes))
    runs = [outcome for outcomes in outcomes_by_call.values() for outcome in outcomes]
    lost = sum(bool(outcome.failed) for outcome in runs)
    print(f"\n{len(runs)} lives, {sum(outcome.injected for outcome in runs)} errors injected, {lost} failed.")
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
