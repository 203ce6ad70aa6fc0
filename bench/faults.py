"""Fail PID 1's system calls: each call that it makes, each fitting error, at several places.

`python -m bench faults [CALL ...]`. Needs root and strace. Each cell is one life (tests/process/fault_life.py): five
services, a restart, probes, a reload, a hand-over, kills, requests, HTTP, syslog and the stop. Never allowed: PID 1
ends, a service is lost, a hang, a state that is wrong. A fault at the very start may end PID 1 with one message.
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


def row(call: str, made: int, found: list[Outcome]) -> str:
    well = [outcome for outcome in found if not outcome.failed]
    errors = " ".join(FITS[call])
    refused = sum(outcome.refused for outcome in well)
    reported = sum(bool(outcome.told) and not outcome.refused for outcome in well)
    cells = (
        call,
        made,
        errors,
        len(found),
        sum(outcome.injected for outcome in found),
        len(well),
        reported,
        refused,
        len(found) - len(well),
    )
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def main(arguments: list[str] | None = None) -> int:
    if os.geteuid() != 0 or not shutil.which("strace"):
        print("bench faults needs root and strace", file=sys.stderr)
        return 1
    live(None)  # whatever Python compiles, it has compiled now
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
    print("| call | made | errors | lives | injected | survived | told of it | refused at the start | failed |")
    print("|---|---|---|---|---|---|---|---|---|")
    for call, outcomes in outcomes_by_call.items():
        print(row(call, calls.get(call, 0), outcomes))
    every = [one for outcomes in outcomes_by_call.values() for one in outcomes]
    lost = sum(bool(one.failed) for one in every)
    print(f"\n{len(every)} lives, {sum(one.injected for one in every)} errors injected, {lost} failed.")
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
