"""The `minivm active` command on the acting controller: each check's results, what is blamed, the slowest machines."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from ground.errors import counted
from health.active.culprit import Part
from health.active.turn import MEMORY, CheckState, complaint, findings, is_at_fault, load_memory
from health.jobs.model import duration

# The slowest of each check that are shown at least: one percent of a small cluster is no machine.
AT_LEAST = 3


def describe(check: str, state: CheckState, percent: float, now: float) -> dict[str, Any]:
    """Describe one check for programs; `percent` of the machines with a rate are shown, the slowest first."""
    tested = {name: item for name, item in state.machines.items() if item.at}
    ranked = sorted((item.rate, name) for name, item in tested.items() if item.rate > 0)
    usual = median(rate for rate, _ in ranked) if ranked else None
    count = max(AT_LEAST, math.ceil(len(ranked) * percent / 100))
    return {
        "check": check,
        "machines": len(tested),
        "failed": sum(not item.passed for item in tested.values()),
        "oldest_s": max((now - item.at for item in tested.values()), default=0.0),
        "commit": state.commit,
        "at_fault": is_at_fault(state),
        "complaint": complaint(check, state),
        "culprits": [{"part": item.part, "name": item.name, "failures": item.failures} for item in findings(state)],
        "median_mbs": usual,
        "slowest": [
            {"machine": name, "mbs": rate, "percent": round(100 * rate / (usual or rate), 1),
             "age_s": now - tested[name].at}
            for rate, name in ranked[:count]
        ],
    }  # fmt: skip


def lines(check: dict[str, Any]) -> Iterable[str]:
    """Describe one check for people."""
    if not check["machines"]:
        yield f"{check['check']}: no machine was tested yet"
    else:
        yield from describe_tests(check)
    if check["complaint"]:
        yield f"  {check['complaint']}"


def describe_tests(check: dict[str, Any]) -> Iterable[str]:
    usual = f", median {check['median_mbs']:.0f} MB/s" if check["median_mbs"] is not None else ""
    counts = f"{counted(check['machines'], 'machine')} tested, {check['failed']} failed last"
    yield f"{check['check']}: {counts}, oldest result {duration(check['oldest_s'])} ago{usual}"
    for item in check["culprits"]:
        part = "leaf switch " if item["part"] is Part.LEAF else ""
        yield f"  blamed: {part}{item['name']}, {item['failures']} failed tests"
    for item in check["slowest"]:
        share = f"{item['percent']:.0f} % of the median"
        yield f"  slowest: {item['machine']} {item['mbs']:.0f} MB/s, {share}, {duration(item['age_s'])} ago"


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
    checks = [
        describe(name, state, options.slowest, now)
        for name, state in sorted(known.items())
        if name in (options.checks or known)
    ]
    if options.json:
        print(json.dumps(checks))
    else:
        for check in checks:
            print("\n".join(lines(check)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
