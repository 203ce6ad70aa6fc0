"""Break two controllers at random, and check what they acknowledged.

`python -m bench lease`. Needs root; a quarter of an hour. 200 seeds give 200 sequences of faults
(tests/process/lease_faults.py), under clients that submit all the time. A run fails if a job that was acknowledged is
neither there nor brought back, or there twice, if a number is given twice, or if two pods write into one term. Then
each fault comes alone, ten times: the seconds without a submission, with a stand-in for slurmctld that starts at once.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from statistics import median

from tests.process.lease_faults import ACTS, BOTH, PROBLEMS, Fault, Outcome, can_mount, run

SEEDS = 200
AT_ONCE = 8  # for each processor: a sequence waits most of its time
TIMES, AT_S, AWAY_S, ENDS_S = 10, 4.0, 20.0, 6.0
ALONE = {
    "`slurmctld` killed": Fault(AT_S, "kill", ACTS, "slurmctld", ENDS_S),
    "`lease` killed": Fault(AT_S, "kill", ACTS, "lease", ENDS_S),
    "handed over": Fault(AT_S, "hand over", ACTS, "", ENDS_S),
    "pod deleted": Fault(AT_S, "pod ends", ACTS, "", AWAY_S),
    "pod or machine dies": Fault(AT_S, "pod dies", ACTS, "", AWAY_S),
    "stopped for 3 s": Fault(AT_S, "freeze", ACTS, "", 3.0),
    "stopped for 8 s": Fault(AT_S, "freeze", ACTS, "", 8.0),
    "stopped for 30 s": Fault(AT_S, "freeze", ACTS, "", 30.0),
    "network cut, requests lost": Fault(AT_S, "requests cut", ACTS, "", AWAY_S),
    "network cut, answers lost": Fault(AT_S, "answers cut", ACTS, "", AWAY_S),
    "volume hangs for 10 s": Fault(AT_S, "volume hangs", BOTH, "", 10.0),
    "volume full for 10 s": Fault(AT_S, "volume full", BOTH, "", 10.0),
    "both pods die for 5 s": Fault(AT_S, "pod dies", BOTH, "", 5.0),
}


def main(arguments: list[str] | None = None) -> int:
    """Run the seeds of the arguments, or all and each fault alone."""
    if os.geteuid() != 0:
        print("bench lease needs root", file=sys.stderr)
        return 1
    hangs = can_mount()
    if not hangs:
        print("no file system can be mounted: no volume hangs", file=sys.stderr)
    seeds = [int(word) for word in arguments or ()]
    with ThreadPoolExecutor(AT_ONCE * (os.cpu_count() or 1)) as pool:
        outcomes = checked(pool.map(partial(run, hangs=hangs), seeds or range(SEEDS)))
    faults = Counter(fault.kind for outcome in outcomes for fault in outcome.faults)
    print("| fault | times |\n|---|---|")
    for kind, times in faults.most_common():
        print(f"| {kind} | {times} |")
    report(outcomes)
    alone = [] if seeds else run_alone(hangs=hangs)
    return 1 if any(outcome.problems for outcome in (*outcomes, *alone)) else 0


def run_alone(*, hangs: bool) -> list[Outcome]:
    """Run each fault alone, ten times, and print the seconds without a submission."""
    print("\n| fault | s without a submission: median, worst |\n|---|---|", flush=True)
    outcomes = []
    with ThreadPoolExecutor(TIMES) as pool:
        for what, fault in ALONE.items():
            turns = checked(pool.map(lambda turn, fault=fault: run(turn, hangs=hangs, faults=[fault]), range(TIMES)))
            gaps = [turn.gap for turn in turns if not turn.problems] or [float("nan")]
            print(f"| {what} | {median(gaps):.1f}, {max(gaps):.1f} |", flush=True)
            outcomes += turns
    report(outcomes)
    return outcomes


def checked(outcomes: Iterable[Outcome]) -> list[Outcome]:
    """Print the failures as they come."""
    ended = []
    for outcome in outcomes:
        ended.append(outcome)
        if outcome.problems:
            problems = "; ".join(outcome.problems)
            print(f"FAILED seed {outcome.seed}: {problems}\n{outcome.faults}", file=sys.stderr, flush=True)
    return ended


def report(outcomes: Sequence[Outcome]) -> None:
    acknowledged = sum(len(outcome.acknowledged) for outcome in outcomes)
    print(
        f"\n{len(outcomes)} sequences, {sum(outcome.terms for outcome in outcomes)} terms, {acknowledged} jobs "
        f"acknowledged, {sum(outcome.refused for outcome in outcomes)} refused by a closed term, "
        f"{sum(outcome.brought_back for outcome in outcomes)} brought back."
    )
    counts = sum((outcome.counts for outcome in outcomes), Counter[str]())
    print(", ".join(f"{kind}: {counts[kind]}" for kind in PROBLEMS))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
