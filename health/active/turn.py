"""One turn of the planner of active checks: memory, jobs and nodes in; memory, submissions and cancellations out. Pure.

The flow of `decide`:

1. `_take_result` takes in each ended job once. `_forget_future`, `_retry_at_new_commit` and `_drop_stale` forget what
   counts no more.
2. `_plan_tests` names the tests that are due: single machines, or groups of a round (`_continue_round`), which
   `health.active.culprit` plans and diagnoses. A round ends with the parts to blame.
3. `admit` limits how many run; two checks that want the same machines take turns.
4. `plan_weights` lets Slurm avoid a blamed leaf switch, where a site wants that.
5. `_choose_cancellations` ends waiting jobs that lost their nodes.

Slurm knows which checks are in flight: each job's comment names its check and machines. So a planner that is killed
between submitting a job and writing its memory submits nothing twice. The memory is kept as JSON between turns; a lost
file only makes tests run again.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Set
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path

from ground.files import read_plain, remove_temporaries, write_json
from health.active.culprit import (
    Culprit,
    Diagnosis,
    GroupResult,
    GroupTest,
    Part,
    PlacedMachine,
    admit,
    diagnose,
    sweep,
)
from health.active.penalty import Penalty, WeighedNode, plan_weights
from health.checks.active_checks import Needs

MEMORY = Path("/var/lib/minivm/active/plan.json")
LIMIT = 64 * 1024 * 1024
# A round that has not ended by then is judged by what is known: its machines are not idle together.
SWEEP_S = 4 * 3600.0
# After an attempt without a result: the node was taken, or the check is broken.
RETRY_S = 600.0
# Attempts in a row without a result after which the check rests, and for how long it does so, also when at fault.
BROKEN, REST_S = 3, 6 * 3600.0
# A job that does not start at once has lost its node.
START_S = 30.0
# A check that fails on more than this share of at least as many machines is at fault itself.
MANY, MOST = 3, 0.5


@dataclass(frozen=True, slots=True)
class MachineResult:
    """Last result of a machine in one check."""

    at: float = 0.0
    passed: bool = False
    # In a row, of single-node checks.
    failures: int = 0
    # Last attempt without a result; 0: none since the last result.
    tried: float = 0.0
    # Last rate that the machine measured itself, in MB/s; 0: none.
    rate: float = 0.0


@dataclass(frozen=True, slots=True)
class SweepState:
    """One round of group tests."""

    number: int
    started: float
    groups: tuple[GroupTest, ...]
    results: tuple[GroupResult, ...] = ()


@dataclass(frozen=True, slots=True)
class CheckState:
    """Memory of one check."""

    machines: Mapping[str, MachineResult] = field(default_factory=dict)
    sweep: SweepState | None = None
    # Number of the next round, and when the last one began.
    number: int = 0
    began: float = 0.0
    culprits: tuple[Culprit, ...] = ()
    # Attempts in a row that gave no result and were not cancelled, and the time of the last one.
    broken: int = 0
    broken_at: float = 0.0
    # The scripts' commit at which its tests began.
    commit: str = ""

    def result(self, machine: str) -> MachineResult:
        return self.machines.get(machine, MachineResult())


@dataclass(frozen=True, slots=True)
class PlanMemory:
    checks: Mapping[str, CheckState] = field(default_factory=dict)
    # Ended jobs that are taken in and that slurmctld still lists.
    taken: frozenset[str] = frozenset()
    # Of the nodes under a blamed leaf switch.
    penalties: Mapping[str, Penalty] = field(default_factory=dict)

    def of(self, check: str) -> CheckState:
        return self.checks.get(check, CheckState())

    def with_check(self, check: str, state: CheckState) -> PlanMemory:
        return replace(self, checks={**self.checks, check: state})


def load_memory(path: Path) -> PlanMemory:
    """Read the memory; empty if it is absent, damaged or of another release."""
    text = read_plain(path, LIMIT)
    try:
        data = json.loads(text or b"{}")
        checks = {str(name): _parse_check(item) for name, item in data["checks"].items()}
        penalties = {
            str(name): Penalty(int(item["before"]), int(item["given"]))
            for name, item in data.get("penalties", {}).items()
        }
        return PlanMemory(checks, frozenset(map(str, data["taken"])), penalties)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return PlanMemory()


def save_memory(path: Path, memory: PlanMemory) -> None:
    remove_temporaries(path)
    checks = {name: asdict(state) for name, state in memory.checks.items()}
    penalties = {name: asdict(penalty) for name, penalty in memory.penalties.items()}
    write_json(path, {"checks": checks, "taken": sorted(memory.taken), "penalties": penalties})


def _parse_check(data: Mapping[str, object]) -> CheckState:
    fields = dict(data)
    machines = {str(name): MachineResult(**item) for name, item in fields.pop("machines").items()}  # type: ignore[attr-defined]  # caught
    sweep = fields.pop("sweep")
    culprits = tuple(Culprit(**{**item, "part": Part(item["part"])}) for item in fields.pop("culprits"))  # type: ignore[attr-defined]  # caught
    return CheckState(machines, _parse_sweep(sweep) if sweep else None, culprits=culprits, **fields)  # type: ignore[arg-type]  # caught


def _parse_sweep(data: Mapping[str, object]) -> SweepState:
    groups, results = data["groups"], data["results"]
    if not isinstance(groups, list) or not isinstance(results, list):
        raise TypeError("wanted lists")
    return SweepState(
        int(str(data["number"])),
        float(str(data["started"])),
        tuple(_parse_test(item) for item in groups),
        tuple(GroupResult(_parse_test(item["test"]), item["passed"] is True) for item in results),
    )


def _parse_test(data: Mapping[str, object]) -> GroupTest:
    suspects, partners = data["suspects"], data["partners"]
    if not isinstance(suspects, list) or not isinstance(partners, list):
        raise TypeError("wanted lists")
    return GroupTest(tuple(map(str, suspects)), tuple(map(str, partners)))


class JobResult(StrEnum):
    IN_FLIGHT = "in flight"
    PASSED = "passed"
    FAILED = "failed"
    # Preempted or cancelled: says nothing about the check.
    CANCELLED = "cancelled"
    # Anything else: the check gave no result.
    NONE = "none"


@dataclass(frozen=True, slots=True)
class ActiveJob:
    id: str
    check: str
    test: GroupTest
    result: JobResult
    # Since its submission, while it waits.
    waits_s: float = 0.0
    # The rate that its first machine measured, in MB/s; 0: none.
    rate: float = 0.0


@dataclass(frozen=True, slots=True)
class ActiveSettings:
    idle_s: float = 600.0
    share: float = 0.25
    # Weight of the nodes under a blamed leaf switch; 0: their own.
    switch_weight: int = 0


@dataclass(frozen=True, slots=True)
class ActiveNode:
    """A node of the partition for active checks."""

    machine: PlacedMachine
    # Without jobs, reservation, drain or other hold.
    is_idle: bool
    idle_since: float
    weight: int = 1


@dataclass(frozen=True, slots=True)
class Submission:
    check: str
    needs: Needs
    test: GroupTest


@dataclass(frozen=True, slots=True)
class ActiveInputs:
    checks: Mapping[str, Needs]
    jobs: tuple[ActiveJob, ...]
    nodes: tuple[ActiveNode, ...]
    # Nodes for which users' jobs wait that may start soon.
    awaited: frozenset[str] = frozenset()
    settings: ActiveSettings = ActiveSettings()
    commit: str = ""
    # Users' jobs that wait although idle nodes fit, by partition. For metrics alone.
    startable: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Turn:
    memory: PlanMemory
    submit: tuple[Submission, ...] = ()
    cancel: tuple[str, ...] = ()
    weights: Mapping[str, int] = field(default_factory=dict)


def decide(memory: PlanMemory, inputs: ActiveInputs, now: float) -> Turn:
    """Decide one turn."""
    ended = [job for job in inputs.jobs if job.result is not JobResult.IN_FLIGHT]
    in_flight = [job for job in inputs.jobs if job.result is JobResult.IN_FLIGHT]
    for job in ended:
        if job.id not in memory.taken:
            memory = _take_result(memory, job, now)
    memory = _retry_at_new_commit(_forget_future(memory, now), inputs)
    memory = replace(
        memory,
        # An ended job that slurmctld has forgotten cannot come again.
        taken=frozenset(job.id for job in ended),
        checks={name: state for name, state in memory.checks.items() if name in inputs.checks},
    )
    machines = [node.machine for node in inputs.nodes]
    memory = _drop_stale(memory, inputs.checks, machines, now)
    busy = {name for job in in_flight for name in job.test.machines}
    idle = _find_idle_machines(inputs, busy, now)
    memory, submissions = _plan_tests(memory, inputs.checks, idle, machines, in_flight, now)
    free = {machine.name for machine in idle}
    possible = [submission for submission in submissions if free.issuperset(submission.test.machines)]
    leaves = {machine.name: machine.leaf for machine in machines}
    admitted = admit([submission.test for submission in possible], busy, leaves, inputs.settings.share)
    allowed = set(admitted)
    # Two checks may want the same group: the first runs now.
    chosen = {submission.test: submission for submission in reversed(possible) if submission.test in allowed}
    submit = tuple(chosen[test] for test in admitted)
    weighed = (WeighedNode(node.machine.name, node.machine.leaf, node.weight) for node in inputs.nodes)
    penalties, weights = plan_weights(
        memory.penalties, weighed, list_blamed_leaves(memory), inputs.settings.switch_weight
    )
    memory = replace(memory, penalties=penalties)
    return Turn(memory, submit, _choose_cancellations(in_flight, inputs.awaited), weights)


def _find_idle_machines(inputs: ActiveInputs, busy: Set[str], now: float) -> list[PlacedMachine]:
    occupied = busy | inputs.awaited
    return [
        node.machine
        for node in inputs.nodes
        if node.is_idle and now - node.idle_since >= inputs.settings.idle_s and node.machine.name not in occupied
    ]


def _plan_tests(
    memory: PlanMemory,
    checks: Mapping[str, Needs],
    idle: list[PlacedMachine],
    machines: list[PlacedMachine],
    in_flight: Iterable[ActiveJob],
    now: float,
) -> tuple[PlanMemory, list[Submission]]:
    """Return the tests that each check wants, and the memory with the rounds that began or ended."""
    submissions: list[Submission] = []
    for check, needs in sorted(checks.items()):
        if needs.nodes > 1:
            running = [job.test for job in in_flight if job.check == check]
            state, tests = _continue_round(memory.of(check), needs, idle, machines, running, now)
            memory = memory.with_check(check, state)
        else:
            tests = _single_tests(memory.of(check), needs, idle, now)
        if not _is_resting(memory.of(check), now):
            submissions += [Submission(check, needs, test) for test in tests]
    return memory, submissions


def _choose_cancellations(in_flight: Iterable[ActiveJob], awaited: frozenset[str]) -> tuple[str, ...]:
    """Return the waiting checks that lost their nodes, that a user's job waits for, or that were submitted twice.

    An sbatch that outlives a killed planner may reach slurmctld after the next planner has asked for the jobs.
    """
    visited: set[tuple[str, frozenset[str]]] = set()
    cancel = []
    for job in sorted(in_flight, key=lambda job: job.waits_s > 0):
        test = (job.check, frozenset(job.test.suspects))
        if job.waits_s and (job.waits_s > START_S or test in visited or awaited.intersection(job.test.machines)):
            cancel.append(job.id)
        visited.add(test)
    return tuple(cancel)


def _forget_future(memory: PlanMemory, now: float) -> PlanMemory:
    """Forget a check's state from the future, whose age is not known: the clock was set back."""
    for check, state in memory.checks.items():
        machine_times = (time for result in state.machines.values() for time in (result.at, result.tried))
        if max(state.began, state.broken_at, *machine_times) > now:
            memory = memory.with_check(check, CheckState(number=state.number))
    return memory


def _retry_at_new_commit(memory: PlanMemory, inputs: ActiveInputs) -> PlanMemory:
    """Forget the results of a check that was at fault or broken at another commit: the new one may have mended it."""
    for check in inputs.checks:
        state = memory.of(check)
        if state.commit and state.commit != inputs.commit and (is_at_fault(state) or is_broken(state)):
            state = CheckState(number=state.number)
        if state.commit != inputs.commit:
            memory = memory.with_check(check, replace(state, commit=inputs.commit))
    return memory


def _drop_stale(
    memory: PlanMemory, checks: Mapping[str, Needs], machines: Iterable[PlacedMachine], now: float
) -> PlanMemory:
    """Forget machines that slurmctld no longer knows, and end verdicts that are older than the check's period."""
    names = {name for machine in machines for name in (machine.name, machine.leaf)}
    for check, state in memory.checks.items():
        period_s = checks[check].period_s
        results = {
            name: replace(result, failures=0) if result.failures and now - result.at > period_s else result
            for name, result in state.machines.items()
            if name in names
        }
        culprits = tuple(
            culprit for culprit in state.culprits if culprit.name in names and now - culprit.at <= period_s
        )
        memory = memory.with_check(check, replace(state, machines=results, culprits=culprits))
    return memory


def _is_due(last: MachineResult, needs: Needs, now: float) -> bool:
    """Tell if a machine is due: a first failure soon, later ones before their verdict ends."""
    pause_s: float = needs.period_s
    if last.at and not last.passed:
        pause_s = RETRY_S if last.failures == 1 else needs.period_s / 2
    return now - last.at >= pause_s and now - last.tried >= RETRY_S


def _is_resting(state: CheckState, now: float) -> bool:
    """Tell if the check is in quarantine: it gives no results, or fails on most machines."""
    if is_broken(state) and now - state.broken_at < REST_S:
        return True
    return is_at_fault(state) and now - max(result.at for result in state.machines.values()) < REST_S


def _take_result(memory: PlanMemory, job: ActiveJob, now: float) -> PlanMemory:
    """Take in the result of an ended job."""
    state = memory.of(job.check)
    machines = dict(state.machines)
    if job.result in {JobResult.CANCELLED, JobResult.NONE}:
        machines |= {name: replace(state.result(name), tried=now) for name in job.test.machines}
        state = replace(state, machines=machines)
        if job.result is JobResult.NONE:
            state = replace(state, broken=state.broken + 1, broken_at=now)
        return memory.with_check(job.check, state)
    passed = job.result is JobResult.PASSED
    round_ = state.sweep
    if round_ is not None:
        round_ = replace(round_, results=(*round_.results, GroupResult(job.test, passed)))
    # A failed group does not tell which of its machines is bad.
    if len(job.test.machines) == 1 or passed:
        for name in job.test.machines:
            before = state.result(name)
            rate = job.rate if name == job.test.machines[0] and job.rate else before.rate
            machines[name] = MachineResult(now, passed, 0 if passed else before.failures + 1, rate=rate)
    return memory.with_check(job.check, replace(state, machines=machines, sweep=round_, broken=0))


def _single_tests(state: CheckState, needs: Needs, idle: Iterable[PlacedMachine], now: float) -> list[GroupTest]:
    """Return one test for each machine that is due, the longest untested first; a first failure is due again soon."""
    due = sorted((last.at, machine.name) for machine in idle if _is_due(last := state.result(machine.name), needs, now))
    return [GroupTest((name,)) for _, name in due]


def _continue_round(
    state: CheckState,
    needs: Needs,
    idle: list[PlacedMachine],
    machines: list[PlacedMachine],
    in_flight: list[GroupTest],
    now: float,
) -> tuple[CheckState, list[GroupTest]]:
    """Continue the present round, or begin the next one; return the tests that it wants."""
    if state.sweep is None:
        return _begin_round(state, needs, idle, now)
    current, names = state.sweep, {machine.name for machine in machines}
    groups = tuple(group for group in current.groups if names.issuperset(group.machines))
    is_late = now - current.started >= SWEEP_S
    if is_late:
        tested = {result.test.suspects for result in current.results}
        groups = tuple(group for group in groups if group.suspects in tested)
    results = [result for result in current.results if names.issuperset(result.test.machines)]
    good = {
        name
        for name, result in state.machines.items()
        if name in names and result.passed and now - result.at < 2 * needs.period_s
    }
    diagnosis = diagnose(machines, groups, results, good, {machine.name for machine in idle})
    if is_late or not (diagnosis.wanted or in_flight):
        return _end_round(state, current, diagnosis, machines, now), []
    running = {test.suspects for test in in_flight}
    return state, [
        test
        for test in diagnosis.wanted
        if test.suspects not in running and all(now - state.result(name).tried >= RETRY_S for name in test.machines)
    ]


def _begin_round(
    state: CheckState, needs: Needs, idle: list[PlacedMachine], now: float
) -> tuple[CheckState, list[GroupTest]]:
    machines = _due_machines(state, needs, idle, now)
    # Machines that become idle one by one share a round.
    if not machines or now - state.began < RETRY_S:
        return state, []
    groups = sweep(machines, state.number)
    return replace(state, sweep=SweepState(state.number, now, groups), began=now), list(groups)


def _end_round(
    state: CheckState, ended: SweepState, diagnosis: Diagnosis, machines: Iterable[PlacedMachine], now: float
) -> CheckState:
    """Record the parts to blame; clear earlier ones that have passed, and fail the machines that have not."""
    leaf_of = {machine.name: machine.leaf for machine in machines}
    passed = {name for result in ended.results if result.passed for name in result.test.machines}
    passed_leaves = {leaf_of[name] for name in passed if name in leaf_of}
    new = {(culprit.part, culprit.name): replace(culprit, at=now) for culprit in diagnosis.culprits}
    remaining = (
        old
        for old in state.culprits
        if old.name not in (passed if old.part is Part.MACHINE else passed_leaves) and (old.part, old.name) not in new
    )
    results = dict(state.machines)
    for name in {name for group in ended.groups for name in group.suspects} - passed:
        results[name] = MachineResult(now, False)
    culprits = (*remaining, *new.values())
    return replace(state, machines=results, sweep=None, number=ended.number + 1, culprits=culprits)


def _due_machines(state: CheckState, needs: Needs, idle: list[PlacedMachine], now: float) -> list[PlacedMachine]:
    """Return the idle machines that are due for a round; to a single one add another."""
    due = [machine for machine in idle if _is_due(state.result(machine.name), needs, now)]
    if len(due) == 1:
        partners = (machine for machine in idle if machine != due[0])
        due += sorted(partners, key=lambda machine: machine.leaf != due[0].leaf)[:1]
    return due if len(due) > 1 else []


def findings(state: CheckState) -> tuple[Culprit, ...]:
    """Return the parts to blame for one check; none where the check fails on most machines."""
    if is_at_fault(state):
        return ()
    results = sorted(state.machines.items())
    single = (Culprit(Part.MACHINE, name, result.failures) for name, result in results if result.failures >= 2)
    return (*single, *state.culprits)


def list_blamed_leaves(memory: PlanMemory) -> frozenset[str]:
    return frozenset(
        item.name for state in memory.checks.values() for item in findings(state) if item.part is Part.LEAF
    )


def is_at_fault(state: CheckState) -> bool:
    """Tell if the check itself is at fault, rather than that many machines."""
    bad = {name for name, result in state.machines.items() if result.failures >= 2}
    bad |= {culprit.name for culprit in state.culprits if culprit.part is Part.MACHINE}
    tested = {name for name, result in state.machines.items() if result.at} | bad
    return len(bad) >= MANY and len(bad) > MOST * len(tested)


def is_broken(state: CheckState) -> bool:
    """Tell if the check gave no result so many times in a row that it rests."""
    return state.broken >= BROKEN


def complaint(check: str, state: CheckState) -> str:
    """Return why the check rests at this commit; "" if it does not."""
    if is_at_fault(state):
        fault = "fails on most machines"
    elif is_broken(state):
        fault = f"gave no result {state.broken} times in a row"
    else:
        return ""
    at = f" at commit {state.commit[:12]}" if state.commit else ""
    until = f"for {REST_S / 3600:.0f} h or until another commit"
    return f"the active check {check} {fault}{at} and rests {until}: inspect the check, not the machines"
