"""Simulate active checks of a large fleet with the real planner: rounds, minutes of a sweep, share of the fleet busy.

`python -m bench active`: 10,000 machines, 32 below a leaf switch, 8 rails with one check each, two bad links a rail and
one bad leaf switch. Nothing runs: each turn gives `health.active.turn.decide` what Slurm would show.
"""

from __future__ import annotations

import math
import os
import random
import time
from collections import Counter
from dataclasses import dataclass, field

from health.active.culprit import Part, PlacedMachine, rounds
from health.active.turn import (
    ActiveInputs,
    ActiveJob,
    ActiveNode,
    ActiveSettings,
    JobResult,
    PlanMemory,
    Submission,
    decide,
    findings,
)
from health.checks.active_checks import Needs

TURN_S, TEST_S, SBATCH_S, SUBMIT_S, FORGOTTEN_S = 20.0, 60.0, 0.03, 60.0, 300.0
Fault = tuple[str, Part, str]


def placed(machines: int, per_leaf: int) -> tuple[PlacedMachine, ...]:
    return tuple(PlacedMachine(f"n{i:05}", ("/", f"/l{i // per_leaf:04}")) for i in range(machines))


@dataclass
class SimulatedFabric:
    """Idle machines with one link a rail. A rail has leaf switches of its own."""

    machines: tuple[PlacedMachine, ...]
    rails: int
    faults: frozenset[Fault]
    settings: ActiveSettings = field(default_factory=ActiveSettings)
    now: float = 1e9
    memory: PlanMemory = field(default_factory=PlanMemory)
    jobs: list[tuple[str, Submission, float]] = field(default_factory=list)
    tests: Counter[str] = field(default_factory=Counter)
    idle_since: dict[str, float] = field(default_factory=dict)
    submitted: int = 0
    busiest: int = 0
    slowest_s: float = 0.0

    def __post_init__(self) -> None:
        self.leaf = {machine.name: machine.leaf for machine in self.machines}
        self.checks = {f"rail{rail}": Needs(nodes=2) for rail in range(self.rails)}

    def fails(self, item: Submission) -> bool:
        return any(
            (item.check, Part.MACHINE, name) in self.faults or (item.check, Part.LEAF, self.leaf[name]) in self.faults
            for name in item.test.machines
        )

    def inputs(self) -> ActiveInputs:
        self.jobs = [job for job in self.jobs if job[2] + FORGOTTEN_S > self.now]
        busy = {name for _, item, end in self.jobs if end > self.now for name in item.test.machines}
        self.busiest = max(self.busiest, len(busy))
        shown = tuple(
            ActiveJob(
                number, item.check, item.test,
                JobResult.IN_FLIGHT if end > self.now else JobResult.FAILED if self.fails(item) else JobResult.PASSED,
            )
            for number, item, end in self.jobs
        )  # fmt: skip
        nodes = tuple(
            ActiveNode(machine, machine.name not in busy, self.idle_since.get(machine.name, 0.0))
            for machine in self.machines
        )
        return ActiveInputs(self.checks, shown, nodes, settings=self.settings)

    def turn(self) -> None:
        inputs = self.inputs()
        began = time.perf_counter()
        turn = decide(self.memory, inputs, self.now)
        self.slowest_s = max(self.slowest_s, time.perf_counter() - began)
        self.memory = turn.memory
        started = turn.submit[: int(SUBMIT_S / SBATCH_S)]
        for item in started:
            self.submitted += 1
            self.tests[item.check] += 1
            end = self.now + TEST_S
            self.jobs.append((str(self.submitted), item, end))
            # Slurm counts a check as use of the node.
            self.idle_since.update(dict.fromkeys(item.test.machines, end))
        self.now += max(TURN_S, len(started) * SBATCH_S)
        if not started:
            # Nothing changes before the next test ends or the next machine has been idle for long enough.
            ends = [end for _, _, end in self.jobs]
            ends += [since + self.settings.idle_s for since in self.idle_since.values()]
            self.now = max(self.now, min((end for end in ends if end >= self.now - TURN_S), default=self.now))

    def sweep(self, most_turns: int = 3000) -> float:
        """Take turns until every rail has had its round; return the minutes."""
        start = self.now
        for _ in range(most_turns):
            self.turn()
            if all(self.memory.of(check).number > 0 for check in self.checks):
                return (self.now - start) / 60
        raise AssertionError(f"no end after {most_turns} turns")

    def reported(self) -> frozenset[Fault]:
        return frozenset(
            (check, item.part, item.name) for check in self.checks for item in findings(self.memory.of(check))
        )

    def further(self, check: str) -> int:
        """Return the tests after the check's first pairs."""
        return self.tests[check] - len(self.machines) // 2


def break_some(machines: tuple[PlacedMachine, ...], rails: int, links: int, dice: random.Random) -> frozenset[Fault]:
    """Break links of each rail, no two below one leaf switch, and a leaf switch of one rail."""
    leaves = sorted({machine.leaf for machine in machines})
    bad_rail, bad_leaf = f"rail{dice.randrange(rails)}", dice.choice(leaves)
    faults: set[Fault] = {(bad_rail, Part.LEAF, bad_leaf)}
    for rail in range(rails):
        for leaf in dice.sample([leaf for leaf in leaves if leaf != bad_leaf], links):
            below = [machine.name for machine in machines if machine.leaf == leaf]
            faults.add((f"rail{rail}", Part.MACHINE, dice.choice(below)))
    return frozenset(faults)


def main() -> int:
    machines = placed(int(os.environ.get("MINIVM_BENCH_MACHINES", "10000")), 32)
    rails, links = 8, 2
    fabric = SimulatedFabric(machines, rails, break_some(machines, rails, links, random.Random(1)))
    minutes = fabric.sweep()
    reported = fabric.reported()
    further = max(fabric.further(check) for check in fabric.checks)
    bound = 2 * (links + 1) * math.log2(len(machines)) + 4
    share = fabric.busiest / len(machines)
    print(f"{len(machines)} machines, {rails} rails, {rounds(len(machines))} rounds cross every level, one a day")
    print(f"one round of all rails: {minutes:.0f} min, {fabric.submitted} tests of {TEST_S:.0f} s")
    print(f"busy at most: {100 * share:.1f} % of the fleet; budget {100 * fabric.settings.share:.0f} %")
    print(f"faults: {len(fabric.faults)}; found {len(reported & fabric.faults)}, false {len(reported - fabric.faults)}")
    print(f"tests beyond the pairs: at most {further} a rail; bound {bound:.0f}")
    print(f"slowest turn of the planner: {fabric.slowest_s:.1f} s")
    return int(share > fabric.settings.share or reported != fabric.faults or further > bound)
