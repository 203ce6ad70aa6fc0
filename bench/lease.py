"""Break two controllers at random, and check what they acknowledged.

`python -m bench lease`. Needs root; five to ten minutes. 200 seeds give 200 sequences of faults
(tests/process/lease_faults.py), under clients that submit all the time. A run fails if a job that was acknowledged is
neither there nor brought back, or there twice, if a number is given twice, or if two pods write into one term.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from tests.process.lease_faults import PROBLEMS, can_mount, run

SEEDS = 200
AT_ONCE = 8  # for each processor: a sequence waits most of its time


def main(arguments: list[str] | None = None) -> int:
    """Run the seeds of the arguments, or all."""
    if os.geteuid() != 0:
        print("bench lease needs root", file=sys.stderr)
        return 1
    hangs = can_mount()
    if not hangs:
        print("no file system can be mounted: no volume hangs", file=sys.stderr)
    seeds = [int(word) for word in arguments or ()] or range(SEEDS)
    with ThreadPoolExecutor(AT_ONCE * (os.cpu_count() or 1)) as pool:
        outcomes = []
        for outcome in pool.map(partial(run, hangs=hangs), seeds):
            outcomes.append(outcome)
            if outcome.problems:
                print(f"FAILED seed {outcome.seed}: {'; '.join(outcome.problems)}\n{outcome.faults}", file=sys.stderr)
    faults = Counter(fault.kind for outcome in outcomes for fault in outcome.faults)
    print("| fault | times |\n|---|---|")
    for kind, times in faults.most_common():
        print(f"| {kind} | {times} |")
    acknowledged = sum(len(outcome.acknowledged) for outcome in outcomes)
    print(
        f"\n{len(outcomes)} sequences, {sum(outcome.terms for outcome in outcomes)} terms, {acknowledged} jobs "
        f"acknowledged, {sum(outcome.refused for outcome in outcomes)} refused by a closed term, "
        f"{sum(outcome.brought_back for outcome in outcomes)} brought back."
    )
    counts = sum((outcome.counts for outcome in outcomes), Counter[str]())
    print(", ".join(f"{kind}: {counts[kind]}" for kind in PROBLEMS))
    return 1 if any(outcome.problems for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
