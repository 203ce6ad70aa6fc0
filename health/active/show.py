"""The `minivm active` command on the acting controller: each check's results, what is blamed, the slowest machines."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from health.active.__main__ import MEMORY
from health.active.culprit import Part
from health.active.turn import CheckState, MachineResult, findings, is_at_fault, load_memory
from health.jobs.model import duration

# The slowest of each check that are shown at least: one percent of a small cluster is no machine.
AT_LEAST = 3


@dataclass(frozen=True, slots=True)
class MachineRate:
    """A machine's last rate in one check, against the median of all machines."""

    machine: str
    rate: float
    percent: float
    at: float


def slowest(results: Mapping[str, MachineResult], percent: float) -> list[MachineRate]:
    """Return that share of the machines with a rate, the slowest first."""
    rates = {name: item for name, item in results.items() if item.rate > 0}
    if not rates:
        return []
    usual = median(item.rate for item in rates.values())
    count = max(AT_LEAST, math.ceil(len(rates) * percent / 100))
    ranked = sorted(rates.items(), key=lambda pair: (pair[1].rate, pair[0]))[:count]
    return [MachineRate(name, item.rate, 100 * item.rate / usual, item.at) for name, item in ranked]


def describe(check: str, state: CheckState, percent: float, now: float) -> dict[str, object]:
    """Describe one check for programs."""
    tested = {name: item for name, item in state.machines.items() if item.at}
    rates = [item.rate for item in tested.values() if item.rate > 0]
    return {
        "check": check,
        "machines": len(tested),
        "oldest_s": max((now - item.at for item in tested.values()), default=0.0),
        "at_fault": is_at_fault(state),
        "culprits": [{"part": item.part, "name": item.name, "failures": item.failures} for item in findings(state)],
        "median_mbs": median(rates) if rates else None,
        "slowest": [
            {"machine": item.machine, "mbs": item.rate, "percent": round(item.percent, 1), "age_s": now - item.at}
            for item in slowest(tested, percent)
        ],
    }


def lines(check: str, state: CheckState, percent: float, now: float) -> Iterable[str]:
    """Describe one check for people."""
    tested = {name: item for name, item in state.machines.items() if item.at}
    if not tested:
        yield f"{check}: no machine was tested yet"
        return
    failed = sum(not item.passed for item in tested.values())
    oldest = duration(max(now - item.at for item in tested.values()))
    rates = [item.rate for item in tested.values() if item.rate > 0]
    usual = f", median {median(rates):.0f} MB/s" if rates else ""
    yield f"{check}: {len(tested)} machines tested, {failed} failed last, oldest result {oldest} ago{usual}"
    if is_at_fault(state):
        yield "  fails on most machines: inspect the check, not the machines"
    for culprit in findings(state):
        part = "leaf switch " if culprit.part is Part.LEAF else ""
        yield f"  blamed: {part}{culprit.name}, {culprit.failures} failed tests"
    for item in slowest(tested, percent):
        share, age = f"{item.percent:.0f} % of the median", duration(now - item.at)
        yield f"  slowest: {item.machine} {item.rate:.0f} MB/s, {share}, {age} ago"


def main(arguments: Sequence[str], file: Path = MEMORY) -> int:
    parser = argparse.ArgumentParser(prog="minivm active", description=__doc__)
    parser.add_argument("checks", nargs="*", metavar="CHECK", help="of these checks alone")
    parser.add_argument("--slowest", type=float, default=1.0, metavar="PERCENT", help="share that is shown (default 1)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(arguments)
    if not 0 <= options.slowest <= 100:
        parser.error(f"--slowest: found {options.slowest:g}, expected 0 to 100")
    if not file.exists():
        print(f"minivm: no active check has run in this pod ({file} is absent): see `activeChecks.enabled`, and ask the"
              " controller that acts", file=sys.stderr)  # fmt: skip
        return 1
    known, now = load_memory(file).checks, time.time()
    if unknown := sorted(set(options.checks) - known.keys()):
        print(
            f"minivm: no active check {unknown[0]!r}; there are: {', '.join(sorted(known)) or 'none'}", file=sys.stderr
        )
        return 2
    states = {name: state for name, state in sorted(known.items()) if name in (options.checks or known)}
    if options.json:
        print(json.dumps([describe(name, state, options.slowest, now) for name, state in states.items()]))
    else:
        for name, state in states.items():
            print("\n".join(lines(name, state, options.slowest, now)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
