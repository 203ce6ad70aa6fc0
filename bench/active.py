"""Simulate active checks of a large fleet (`active`), and measure how they delay a user's job (`make-room`).

`active`: 10,000 machines, 32 below a leaf switch, 8 rails with one check each, two bad links a rail and one bad leaf
switch. Nothing runs: each turn gives `health.active.turn.decide` what Slurm would show. Prints rounds, minutes of a
sweep and the share of the fleet that is busy.

`make-room`: a cluster of three workers, all of which run a check when a user submits a job on all of them. Prints the
time until the job starts, with checks and without.
"""

from __future__ import annotations

import math
import os
import random
import shlex
import statistics
import subprocess
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from bench.cluster import running_cluster, ssh
from cluster.local import LocalCluster
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


# A user's job on nodes that run checks

CONTROLLER, WORKERS = "slurm-controller-0", 3
MOST_DELAY_S = 2.0
# A user's job meets a check at any of its steps: it is submitted at any time within the first of its seconds.
PHASE_S = 2.0
# A turn without checks after so many with them.
EVERY = 4
# The planner's own function submits each CHECK:NODES, as the user slurm.
SUBMIT = """
import os, sys
from health.active.__main__ import submit
from health.active.culprit import GroupTest
from health.active.turn import Submission
from health.checks.active_checks import Needs
from init.slurm import client
for word in sys.argv[1:]:
    check, _, nodes = word.partition(":")
    test = GroupTest(tuple(nodes.split(",")))
    submit(Submission(check, Needs(nodes=len(test.machines)), test), "", client.address(os.environ))
"""
AS_SLURM = "setpriv --reuid=slurm --regid=slurm --init-groups /opt/minivm/bin/python3 -I -c"
RUNNING = "squeue --all --noheader --partition=minivm-active --states=R --format=%i"
STATES = "squeue --all --noheader --partition=minivm-active --states=all --format=%T"
IDLE = "sinfo --noheader --Node --states=idle --format=%N | sort -u | wc -l"
NONE = 'until [ -z "$(squeue --all --noheader)" ]; do sleep 0.1; done'


class UserShell:
    """A user's shell on the login pod, so that a turn spends no time on a login."""

    def __init__(self, cluster: LocalCluster) -> None:
        self.process = subprocess.Popen(
            cluster.ssh_command("alice", "bash"), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, command: str) -> str:
        """Run a command that prints one line."""
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(f"{command} < /dev/null\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()

    def close(self) -> None:
        self.process.terminate()
        self.process.wait()


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the value that so many percent of the values do not exceed."""
    return sorted(values)[max(0, math.ceil(len(values) * percent / 100) - 1)]


def make_room() -> int:
    turns = int(os.environ.get("MINIVM_BENCH_TURNS", "100"))
    active = {"enabled": True, "idleSeconds": 86400}
    with running_cluster("bench-active", WORKERS, activeChecks=active) as cluster:
        ssh(cluster, f"srun -N{WORKERS} true")
        return measure_delay(cluster, turns)


def measure_delay(cluster: LocalCluster, turns: int) -> int:
    """Measure a job on all nodes, mostly while each of them runs a check; return 1 if it starts too late."""
    dice, user = random.Random(1), UserShell(cluster)
    job = f"t=$(date +%s%N); s=$(srun -Q -N{WORKERS} date +%s%N | sort | tail -1); echo $((s - t))"
    busy: list[float] = []
    free: list[float] = []
    ended: Counter[str] = Counter()
    try:
        for turn in range(turns):
            on_controller(cluster, f"{NONE}; until [ $({IDLE}) = {WORKERS} ]; do sleep 0.1; done")
            if turn % EVERY == 0:
                free.append(int(user.run(job)) / 1e9)
                continue
            before = Counter(on_controller(cluster, STATES).split())
            start_checks(cluster)
            time.sleep(dice.uniform(0, PHASE_S))
            seconds = int(user.run(job)) / 1e9
            cancelled = (Counter(on_controller(cluster, STATES).split()) - before)["PREEMPTED"]
            ended["cancelled" if cancelled else "over before"] += 1
            busy.append(seconds)
    finally:
        user.close()
    return print_delay(busy, free, ended)


def start_checks(cluster: LocalCluster) -> None:
    """Start TCP between two workers and hashing on the third one; return when Slurm has started both jobs."""
    first, second, third = (f"slurm-worker-{number}" for number in range(WORKERS))
    submit = f"{AS_SLURM} {shlex.quote(SUBMIT)} tcp:{first},{second} cpu:{third}"
    on_controller(cluster, f"{submit} && until [ $({RUNNING} | wc -l) = 2 ]; do sleep 0.05; done")


def on_controller(cluster: LocalCluster, script: str) -> str:
    code, output = cluster.exec(CONTROLLER, ["timeout", "120", "sh", "-c", script])
    assert code == 0, output
    return output


def print_delay(busy: Sequence[float], free: Sequence[float], ended: Counter[str]) -> int:
    usual = statistics.median(free)
    delay = percentile(busy, 99) - usual
    for what, values in ((f"no checks, {len(free)} jobs", free), (f"a check on each node, {len(busy)} jobs", busy)):
        middle, late = percentile(values, 50), percentile(values, 99)
        print(f"{what:<40} p50 {middle:5.2f} s  p99 {late:5.2f} s  ({middle / usual:.1f} and {late / usual:.1f} times)")
    print(f"delay at p99: {delay:.2f} s, at most {MOST_DELAY_S:.0f} s; load {os.getloadavg()[0]:.1f}")
    print("checks that " + ", ".join(f"were {how}: {count}" for how, count in sorted(ended.items())))
    return int(delay > MOST_DELAY_S)
