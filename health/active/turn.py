"""One turn of the planner: memory, jobs and nodes in; memory and jobs to submit or cancel out. Pure functions.

Slurm knows which checks are in flight: each job's comment names its check and machines. So a planner that is killed
between submitting a job and writing its memory submits nothing twice, and takes in each ended job once. The memory is
kept as JSON between turns; a lost file only makes tests run again.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path

from ground.files import read_plain, remove_temporaries, write_json
from health.active.culprit import Culprit, GroupResult, GroupTest, Part, PlacedMachine, admit, diagnose, sweep
from health.checks.active_checks import Needs

LIMIT = 64 * 1024 * 1024


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


@dataclass(frozen=True, slots=True)
class PlanMemory:
    checks: Mapping[str, CheckState] = field(default_factory=dict)
    # Ended jobs that are taken in and that slurmctld still lists.
    taken: frozenset[str] = frozenset()

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
        return PlanMemory(checks, frozenset(map(str, data["taken"])))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return PlanMemory()


def save_memory(path: Path, memory: PlanMemory) -> None:
    remove_temporaries(path)
    write_json(path, {"checks": {name: asdict(item) for name, item in memory.checks.items()},
                      "taken": sorted(memory.taken)})  # fmt: skip


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


@dataclass(frozen=True, slots=True)
class ActiveNode:
    """A node of the partition for active checks."""

    machine: PlacedMachine
    # Without jobs, reservation, drain or other hold.
    is_idle: bool
    idle_since: float


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


@dataclass(frozen=True, slots=True)
class Turn:
    memory: PlanMemory
    submit: tuple[Submission, ...] = ()
    cancel: tuple[str, ...] = ()


def decide(memory: PlanMemory, inputs: ActiveInputs, now: float) -> Turn:
    ended = [job for job in inputs.jobs if job.result is not JobResult.IN_FLIGHT]
    for job in ended:
        if job.id not in memory.taken:
            memory = _take(memory, job, now)
    flying = [job for job in inputs.jobs if job.result is JobResult.IN_FLIGHT]
    memory = _by_this_commit(_by_this_clock(memory, now), inputs)
    memory = replace(
        memory,
        # What slurmctld has forgotten cannot come again.
        taken=frozenset(job.id for job in ended),
        checks={name: state for name, state in memory.checks.items() if name in inputs.checks},
    )
    busy = {name for job in flying for name in job.test.machines}
    occupied = busy | inputs.awaited
    idle = [
        node.machine
        for node in inputs.nodes
        if node.is_idle and now - node.idle_since >= inputs.settings.idle_s and node.machine.name not in occupied
    ]
    places = [node.machine for node in inputs.nodes]
    memory = _current(memory, inputs.checks, places, now)
    submissions: list[Submission] = []
    for check, needs in sorted(inputs.checks.items()):
        if needs.nodes > 1:
            state, tests = _sweep(memory.of(check), needs, idle, places, _of(flying, check), now)
            memory = memory.with_check(check, state)
        else:
            tests = _singles(memory.of(check), needs, idle, now)
        if not _rests(memory.of(check), now):
            submissions += [Submission(check, needs, test) for test in tests]
    free = {machine.name for machine in idle}
    possible = [item for item in submissions if free.issuperset(item.test.machines)]
    leaves = {machine.name: machine.leaf for machine in places}
    admitted = admit([item.test for item in possible], busy, leaves, inputs.settings.share)
    allowed = set(admitted)
    # Two checks may want the same group: the first runs now.
    chosen = {item.test: item for item in reversed(possible) if item.test in allowed}
    return Turn(memory, tuple(chosen[test] for test in admitted), _to_cancel(flying, inputs.awaited))


def _to_cancel(flying: Iterable[ActiveJob], awaited: frozenset[str]) -> tuple[str, ...]:
    """Return the waiting checks that lost their nodes, that a user's job waits for, or that were submitted twice.

    An sbatch that outlives a killed planner may reach slurmctld after the next planner has asked for the jobs.
    """
    visited: set[tuple[str, frozenset[str]]] = set()
    cancel = []
    for job in sorted(flying, key=lambda job: job.waits_s > 0):
        test = (job.check, frozenset(job.test.suspects))
        if job.waits_s and (job.waits_s > START_S or test in visited or awaited.intersection(job.test.machines)):
            cancel.append(job.id)
        visited.add(test)
    return tuple(cancel)


def _by_this_clock(memory: PlanMemory, now: float) -> PlanMemory:
    """Forget a check's state from the future, whose age is not known: the clock was set back."""
    for check, state in memory.checks.items():
        times = [
            state.began,
            state.broken_at,
            *(time for item in state.machines.values() for time in (item.at, item.tried)),
        ]
        if max(times) > now:
            memory = memory.with_check(check, CheckState(number=state.number))
    return memory


def _by_this_commit(memory: PlanMemory, inputs: ActiveInputs) -> PlanMemory:
    """Forget the results of a check that was at fault or broken at another commit: the new one may have mended it."""
    for check in inputs.checks:
        state = memory.of(check)
        if state.commit and state.commit != inputs.commit and (is_at_fault(state) or is_broken(state)):
            state = CheckState(number=state.number)
        if state.commit != inputs.commit:
            memory = memory.with_check(check, replace(state, commit=inputs.commit))
    return memory


def _current(memory: PlanMemory, checks: Mapping[str, Needs], places: list[PlacedMachine], now: float) -> PlanMemory:
    """Forget machines that slurmctld no longer knows, and end verdicts that are older than the check's period."""
    names = {machine.name for machine in places} | {machine.leaf for machine in places}
    for check, state in memory.checks.items():
        period = checks[check].period_s
        machines = {
            name: replace(item, failures=0) if item.failures and now - item.at > period else item
            for name, item in state.machines.items()
            if name in names
        }
        culprits = tuple(item for item in state.culprits if item.name in names and now - item.at <= period)
        memory = memory.with_check(check, replace(state, machines=machines, culprits=culprits))
    return memory


def _is_due(last: MachineResult, needs: Needs, now: float) -> bool:
    """Tell if a machine is due: a first failure soon, later ones before their verdict ends."""
    again: float = needs.period_s
    if last.at and not last.passed:
        again = RETRY_S if last.failures == 1 else needs.period_s / 2
    return now - last.at >= again and now - last.tried >= RETRY_S


def _of(jobs: Iterable[ActiveJob], check: str) -> list[GroupTest]:
    return [job.test for job in jobs if job.check == check]


def _rests(state: CheckState, now: float) -> bool:
    """Tell if the check is in quarantine: it gives no results, or fails on most machines."""
    if is_broken(state) and now - state.broken_at < REST_S:
        return True
    return is_at_fault(state) and now - max(item.at for item in state.machines.values()) < REST_S


def _take(memory: PlanMemory, job: ActiveJob, now: float) -> PlanMemory:
    """Take in the result of an ended job."""
    state = memory.of(job.check)
    machines = dict(state.machines)
    if job.result in {JobResult.CANCELLED, JobResult.NONE}:
        machines.update(
            {name: replace(state.machines.get(name, MachineResult()), tried=now) for name in job.test.machines}
        )
        state = replace(state, machines=machines)
        if job.result is JobResult.NONE:
            state = replace(state, broken=state.broken + 1, broken_at=now)
        return memory.with_check(job.check, state)
    passed = job.result is JobResult.PASSED
    sweep_state = state.sweep
    if sweep_state is not None:
        sweep_state = replace(sweep_state, results=(*sweep_state.results, GroupResult(job.test, passed)))
    if len(job.test.machines) == 1 or passed:
        for name in job.test.machines:
            before = machines.get(name, MachineResult())
            rate = job.rate if name == job.test.machines[0] and job.rate else before.rate
            machines[name] = MachineResult(now, passed, 0 if passed else before.failures + 1, rate=rate)
    return memory.with_check(job.check, replace(state, machines=machines, sweep=sweep_state, broken=0))


def _singles(state: CheckState, needs: Needs, idle: Iterable[PlacedMachine], now: float) -> list[GroupTest]:
    """Return a test of each machine that is due, the longest untested first. A first failure is repeated soon."""
    due = []
    for machine in idle:
        last = state.machines.get(machine.name, MachineResult())
        if _is_due(last, needs, now):
            due.append((last.at, machine.name))
    return [GroupTest((name,)) for _, name in sorted(due)]


def _sweep(
    state: CheckState,
    needs: Needs,
    idle: list[PlacedMachine],
    places: list[PlacedMachine],
    flying: list[GroupTest],
    now: float,
) -> tuple[CheckState, list[GroupTest]]:
    """Continue the present round, or begin the next one; return the tests that it wants."""
    if state.sweep is None:
        swept = _due_machines(state, needs, idle, now)
        # Machines that become idle one by one share a round.
        if not swept or now - state.began < RETRY_S:
            return state, []
        groups = sweep(swept, state.number)
        return replace(state, sweep=SweepState(state.number, now, groups), began=now), list(groups)
    current = state.sweep
    by_name = {machine.name: machine for machine in places}
    groups = tuple(group for group in current.groups if by_name.keys() >= set(group.machines))
    late = now - current.started >= SWEEP_S
    if late:
        tested = {result.test.suspects for result in current.results}
        groups = tuple(group for group in groups if group.suspects in tested)
    results = [item for item in current.results if by_name.keys() >= set(item.test.machines)]
    good = {
        name
        for name, item in state.machines.items()
        if name in by_name and item.passed and now - item.at < 2 * needs.period_s
    }
    diagnosis = diagnose(places, groups, results, good, {machine.name for machine in idle})
    if not late and (diagnosis.wanted or flying):
        in_flight = {test.suspects for test in flying}
        return state, [
            test
            for test in diagnosis.wanted
            if test.suspects not in in_flight
            and all(now - state.machines.get(name, MachineResult()).tried >= RETRY_S for name in test.machines)
        ]
    passed = {name for item in current.results if item.passed for name in item.test.machines}
    leaves = {by_name[name].leaf for name in passed if name in by_name}
    new = {(item.part, item.name): replace(item, at=now) for item in diagnosis.culprits}
    remaining = (
        old
        for old in state.culprits
        if old.name not in (passed if old.part is Part.MACHINE else leaves) and (old.part, old.name) not in new
    )
    culprits = (*remaining, *new.values())
    machines = dict(state.machines)
    for name in {name for group in current.groups for name in group.suspects} - passed:
        machines[name] = MachineResult(now, False)
    return replace(state, machines=machines, sweep=None, number=current.number + 1, culprits=culprits), []


def _due_machines(state: CheckState, needs: Needs, idle: list[PlacedMachine], now: float) -> list[PlacedMachine]:
    """Return the idle machines that are due for a round; to a single one add another."""
    due = [machine for machine in idle if _is_due(state.machines.get(machine.name, MachineResult()), needs, now)]
    if len(due) == 1:
        due += sorted((item for item in idle if item != due[0]), key=lambda item: item.leaf != due[0].leaf)[:1]
    return due if len(due) > 1 else []


def findings(state: CheckState) -> tuple[Culprit, ...]:
    """Return the parts to blame for one check; none where the check fails on most machines."""
    single = [Culprit(Part.MACHINE, name, item.failures) for name, item in sorted(state.machines.items())
              if item.failures >= 2]  # fmt: skip
    suspects = (*single, *state.culprits)
    return () if is_at_fault(state) else suspects


def is_at_fault(state: CheckState) -> bool:
    """Tell if the check itself is at fault, rather than that many machines."""
    bad = {name for name, item in state.machines.items() if item.failures >= 2}
    bad |= {item.name for item in state.culprits if item.part is Part.MACHINE}
    tested = {name for name, item in state.machines.items() if item.at} | bad
    return len(bad) >= MANY and len(bad) > MOST * len(tested)


def is_broken(state: CheckState) -> bool:
    """Tell if the check gave no result so many times in a row that it rests."""
    return state.broken >= BROKEN


def complaint(check: str, state: CheckState) -> str:
    """Return why the check rests at this commit; "" if it does not."""
    at = f" at commit {state.commit[:12]}" if state.commit else ""
    what = (
        "fails on most machines" if is_at_fault(state)
        else f"gave no result {state.broken} times in a row" if is_broken(state)
        else ""
    )  # fmt: skip
    until = f"for {REST_S / 3600:.0f} h or until another commit"
    return f"the active check {check} {what}{at} and rests {until}: inspect the check, not the machines" if what else ""
