"""Frozen records of jobs, nodes, partitions and limits as Slurm's clients show them, and of the explanation."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from ground.errors import one_line

ENDED = frozenset({
    "COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL", "DEADLINE", "OUT_OF_MEMORY",
    "REVOKED",
})  # fmt: skip
UNUSABLE = frozenset({"DRAIN", "DOWN", "FAIL", "NOT_RESPONDING", "MAINTENANCE", "REBOOT_ISSUED", "FUTURE", "UNKNOWN"})


class JobCause(StrEnum):
    """Class of a cause."""

    CODE = "your code"
    REQUEST = "the request"
    LIMIT = "a limit"
    MACHINE = "the machine"
    CLUSTER = "the cluster"
    PERSON = "a person"
    NONE = "nothing is wrong"
    UNKNOWN = "not known"


class Sure(StrEnum):
    CERTAIN = "certain"
    LIKELY = "likely"
    POSSIBLE = "possible"


@dataclass(frozen=True, slots=True)
class JobStep:
    id: str  # "12.batch", "12.0"
    state: str
    exit_code: int
    signal: int
    nodes: str = ""
    memory: int = 0  # MiB that it was given, in all
    has_code: bool = True  # False: Slurm has not seen its processes end, or they never began


@dataclass(frozen=True, slots=True)
class Job:
    """A job, an array task or a component. Times are seconds since the epoch, 0 if unknown; sizes are MiB."""

    id: int
    shown: str  # 12, 12_3, 12_[4-9], 12+1
    name: str = ""
    user: str = ""
    account: str = ""
    partition: str = ""  # a pending job may ask for several: a,b
    qos: str = ""
    states: frozenset[str] = frozenset()
    reason: str = ""
    detail: str = ""  # slurmctld's description beside the reason
    submitted: float = 0
    eligible: float = 0
    started: float = 0  # of a pending job: slurmctld's estimate
    ended: float = 0  # of a running job: its time limit
    evaluated: float = 0  # when the scheduler last looked at it
    limit: int | None = None  # minutes; None: without limit
    nodes: str = ""
    node_count: int = 0
    single_node: bool = False
    exclusive: bool = False  # shares its nodes with no other job
    cpus: int = 0
    cpus_per_task: int = 1
    cpus_per_node: int = 0
    memory_per_node: int = 0
    memory_per_cpu: int = 0
    memory: str = ""  # in all, as Slurm writes it: 200M
    gres_per_node: tuple[tuple[str, int], ...] = ()  # ("gpu", 2), ("gpu:h100", 2)
    features: str = ""
    required: str = ""
    excluded: str = ""
    licenses: str = ""
    reservation: str = ""
    dependency: str = ""
    exit_code: int = 0
    signal: int = 0
    restarts: int = 0
    task_limit: int = 0  # of an array: tasks at a time
    admin_comment: str = ""
    system_comment: str = ""
    failed_node: str = ""
    killer: str = ""  # user that requested the end
    command: str = ""  # the batch script's path, and its arguments
    output: str = ""
    errors: str = ""  # the file of standard error
    batch: bool = True
    is_held: bool = False
    requeues: bool = True  # False: submitted with --no-requeue
    source: str = "squeue"  # the client that showed it
    is_lost: bool = False  # accounting has not seen its end, and slurmctld does not know it
    steps: tuple[JobStep, ...] = ()

    @property
    def state(self) -> str:
        """Return the state that matters most: LOST, an end, then PENDING, then what else slurmctld shows."""
        if self.is_lost:
            return "LOST"
        for state in sorted(self.states & ENDED):
            return state
        return "PENDING" if "PENDING" in self.states else min(self.states, default="UNKNOWN")

    @property
    def has_ended(self) -> bool:
        return bool(self.states & ENDED) and not self.is_pending

    @property
    def is_pending(self) -> bool:
        return bool(self.states & {"PENDING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT"})

    @property
    def is_unexplained(self) -> bool:
        """Tell if it waits by accounting alone, which has no reasons: slurmctld did not answer."""
        return self.is_pending and self.source == "sacct"


@dataclass(frozen=True, slots=True)
class JobNode:
    name: str
    address: str = ""
    states: frozenset[str] = frozenset()
    reason: str = ""
    author: str = ""
    since: float = 0  # of the reason
    booted: float = 0
    partitions: frozenset[str] = frozenset()
    cpus: int = 0
    cpus_used: int = 0
    memory: int = 0
    memory_used: int = 0
    features: frozenset[str] = frozenset()
    gres: tuple[tuple[str, int], ...] = ()

    @property
    def is_usable(self) -> bool:
        return not self.states & UNUSABLE

    @property
    def condition(self) -> str:
        if "DRAIN" in self.states:
            return "drained"
        for state in sorted(self.states & UNUSABLE):
            return state.lower().replace("_", " ")
        return min(self.states, default="unknown").lower()


@dataclass(frozen=True, slots=True)
class Partition:
    name: str
    states: frozenset[str] = frozenset()
    max_minutes: int | None = None
    max_nodes: int | None = None
    min_nodes: int = 0
    max_memory_per_node: int = 0
    qos: str = ""
    total_nodes: int = 0
    accounts: str = ""  # that it takes alone; empty: all
    denied_accounts: str = ""
    allowed_qos: str = ""


@dataclass(frozen=True, slots=True)
class Reservation:
    name: str
    nodes: str = ""
    start: float = 0
    end: float = 0
    users: str = ""
    accounts: str = ""
    flags: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class License:
    name: str
    total: int = 0
    used: int = 0
    reserved: int = 0


@dataclass(frozen=True, slots=True)
class UsageLimit:
    """One limit of a QOS or an association, with its use."""

    holder: str  # "QOS normal", "account physics", "user alice in account physics"
    key: str  # GrpTRES, MaxJobsPU
    resource: str  # cpu, mem, gres/gpu; "" for counts of jobs
    limit: int
    used: int | None = None


@dataclass(frozen=True, slots=True)
class WaitingJob:
    """A line of the queue, as squeue shows it to any user."""

    id: int
    shown: str
    priority: int
    partitions: frozenset[str]
    reason: str


@dataclass(frozen=True, slots=True)
class World:
    """The cluster around the job, as Slurm's clients show it. None: not requested, or no answer."""

    nodes: tuple[JobNode, ...] | None = None
    partitions: tuple[Partition, ...] | None = None
    reservations: tuple[Reservation, ...] | None = None
    licenses: tuple[License, ...] | None = None
    limits: tuple[UsageLimit, ...] | None = None
    accounts: tuple[str, ...] | None = None  # that the job's user may use
    waiting: tuple[WaitingJob, ...] | None = None  # all that wait, for a job that waits for its turn
    waiting_age: float = 0.0  # seconds since slurmctld listed them
    # On which the job depends; of a preempted job those that came to its nodes.
    related_jobs: tuple[Job, ...] | None = None
    usage: tuple[tuple[str, int, float], ...] | None = None  # step, bytes of memory, CPU seconds
    output_age: float | None = None  # seconds since the last write to the output
    history: tuple[Job, ...] = ()  # earlier runs of a requeued job, oldest first
    missing: tuple[str, ...] = ()  # what could not be read, and why


@dataclass(frozen=True, slots=True)
class Fact:
    text: str
    source: str


@dataclass(frozen=True, slots=True)
class Answer:
    """Why a job is as it is."""

    headline: str
    cause: JobCause
    sure: Sure = Sure.CERTAIN
    evidence: tuple[Fact, ...] = ()
    advice: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Event:
    at: float
    text: str


@dataclass(frozen=True, slots=True)
class Page:
    """The explanation of one job."""

    job: Job
    answer: Answer
    timeline: tuple[Event, ...] = ()
    age: float = 0.0  # seconds since slurmctld told the job's state; 0 for the present or accounting
    nodes_age: float = 0.0  # the same for nodes and partitions


# Words for durations, sizes and signals, and text from users and Slurm made safe for a terminal.
LONGEST = 300
SHOWN = 4
FAR = 366 * 86400  # slurmctld counts a job without limit as one of a year or more


def safe(text: str, most: int = LONGEST) -> str:
    """Make text printable on one line and bound its length. Format characters (bidi, zero width) go too."""
    clean = " ".join(one_line(text[: most * 4]).split())
    return clean if len(clean) <= most else f"{clean[: most - 3]}..."


def duration(seconds: float) -> str:
    whole = max(0, int(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min"
    if whole < 2 * 86400:
        minutes = whole % 3600 // 60
        return f"{whole // 3600} h" + (f" {minutes} min" if minutes else "")
    return f"{whole // 86400} days"


def minutes(number: int | None) -> str:
    return "no limit" if number is None else duration(number * 60)


def size(mebibytes: float) -> str:
    if mebibytes >= 1 << 20:
        return f"{mebibytes / (1 << 20):.4g} TiB"
    return f"{mebibytes / 1024:.4g} GiB" if mebibytes >= 1024 else f"{mebibytes:.4g} MiB"


def moment(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def list_briefly(names: Iterable[str], most: int = SHOWN) -> str:
    """List a few names and count the rest: a, b and 3 more."""
    texts = list(names)
    shown = ", ".join(safe(name, 80) for name in texts[:most])
    return f"{shown} and {len(texts) - most} more" if len(texts) > most else shown


def count(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"
