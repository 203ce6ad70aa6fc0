"""Slurm's side of a snapshot: nodes, jobs, reservations, and the reasons and marks that the fleet writes there."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TypeVar

from fleet import FleetError
from fleet.world.fields import Fields, Object
from ground.errors import one_line
from init.slurm import node as record
from init.slurm.conf import expand

# Reasons that more nodes may cure. The last two belong to jobs that ask for more than the partition has. Held jobs,
# dependent jobs, later start times and limits of a user are not among them.
CURABLE = ("Resources", "Priority", "ReqNodeNotAvail", "Nodes required", "PartitionNodeLimit", "PartitionConfig")
BEHIND = "Priority"
_GPUS = re.compile(r"(?:gres[/:])?gpu(?:[:/][A-Za-z][\w.-]*)*(?:[:=]([0-9]{1,6}))?(?:\(.*)?")
_TASKS = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9})(?::([1-9][0-9]{0,8}))?)?")
# The bound of every count, above all of the tasks of an array.
MOST_COUNT = 1 << 20


@dataclass(frozen=True, slots=True)
class Offer:
    """A node's resources; 0 and empty mean not known."""

    partitions: frozenset[str] = frozenset()
    features: frozenset[str] = frozenset()
    cpus: int = 0
    memory: int = 0  # MB
    gpus: int = 0


UNKNOWN_OFFER = Offer()


@dataclass(frozen=True, slots=True)
class PendingJob:
    """A job that waits. `cpus`, `memory`, `gpus`: the least on each node; `all_*`: the sum over all its nodes."""

    job: str
    reason: str
    since: float  # eligible since
    times: int = 1  # tasks of an array that wait
    nodes: int = 1
    partitions: tuple[str, ...] = ()
    features: str = ""
    cpus: int = 0
    memory: int = 0
    gpus: int = 0
    all_cpus: int = 0
    all_gpus: int = 0
    all_memory: int = 0
    alone: bool = False  # exclusive nodes

    @property
    def curable(self) -> bool:
        """Return whether more nodes may let the job start."""
        return self.since > 0 and self.reason.replace("_", " ").startswith(CURABLE)


def parse_pending_jobs(jobs: Iterable[object]) -> tuple[PendingJob, ...]:
    """Parse the pending jobs; raise FleetError if one cannot be read."""
    waiting = (job for job in (Fields(item, "job") for item in jobs) if "PENDING" in job.items("job_state"))
    # A job that names its nodes waits for those, and no other node helps.
    return tuple(_parse_pending_job(job) for job in waiting if not job.text("required_nodes"))


def _parse_pending_job(job: Fields) -> PendingJob:
    def count(key: str) -> int:
        return min(max(0, job.number(key)), MOST_COUNT)

    nodes, cpus = max(1, count("node_count")), count("cpus")
    cpus_per_node = max(1, count("minimum_cpus_per_node"))
    per_cpu, per_node = count("memory_per_cpu"), count("memory_per_node")
    return PendingJob(
        job=str(job.number("job_id")),
        reason=job.text("state_reason"),
        since=float(job.number("eligible_time")),
        times=tasks(job.text("array_task_string"), count("array_max_tasks")),
        nodes=nodes,
        partitions=tuple(filter(None, job.text("partition").split(","))),
        features=job.text("features"),
        cpus=cpus_per_node,
        memory=per_node or per_cpu * cpus_per_node,
        gpus=gpus(job.text("tres_per_node")),
        all_cpus=cpus,
        all_gpus=gpus(job.text("tres_per_job")),
        all_memory=per_node * nodes or per_cpu * cpus,
        alone="none" in {str(word).lower() for word in job.items("shared")},
    )


def tasks(text: str, at_once: int) -> int:
    """Count the waiting tasks of an array that may run at once: "1-3,7,10-20:5%4". Slurm cuts long texts off."""
    total = 0
    for part in text.partition("%")[0].split(","):
        if match := _TASKS.fullmatch(part):
            first, last, step = (int(group) if group else 0 for group in match.groups())
            total += (last - first) // (step or 1) + 1 if last > first else 1
    return max(1, min(total, at_once or MOST_COUNT, MOST_COUNT))


def gpus(text: str) -> int:
    """Count the GPUs in "gres/gpu:2", "gres/gpu:h100=8,gres/shard:1" or "gpu:h100:8(S:0-1)"."""
    return sum(int(match[1] or 1) for part in text.split(",") if (match := _GPUS.fullmatch(part)))


def parse_offer(record: Object) -> Offer:
    """Read what a node has from its record."""
    node = Fields(record, "node")
    return Offer(
        frozenset(node.strings("partitions")),
        frozenset(node.strings("features")),
        node.number("cpus"),
        node.number("real_memory"),
        gpus(node.text("gres")),
    )


def mismatch(offer: Offer, job: PendingJob) -> str:
    """Return the job's request that such a node lacks; empty: the job fits, as far as is known."""
    named = re.findall(r"[A-Za-z0-9_.=-]+", re.sub(r"\*[0-9]+", "", job.features))
    plain = not re.search(r"[|\[\]()]", job.features)
    lacks = [name for name in named if name not in offer.features]
    if offer.partitions and job.partitions and not offer.partitions & {*job.partitions}:
        return f"partition {','.join(job.partitions)}"
    if lacks and (plain or len(lacks) == len(named)):
        return f"feature {lacks[0]}"
    for resource, wanted, available in (
        ("CPUs", job.cpus, offer.cpus),
        ("MB of memory", job.memory, offer.memory),
        ("GPUs", job.gpus, offer.gpus),
    ):
        if available and wanted > available:
            return f"{wanted} {resource} on a node, and one has {available}"
    return ""


def nodes_needed(offer: Offer, job: PendingJob) -> float:
    """Count the nodes that the job takes; less than 1: it leaves room for other jobs on its node."""
    parts = [
        wanted / available
        for wanted, available in (
            (job.all_cpus, offer.cpus),
            (job.all_memory, offer.memory),
            (job.all_gpus, offer.gpus),
        )
        if available
    ]
    most = max(parts, default=1.0)
    if job.nodes == 1 and most < 1.0 and offer.cpus and not job.alone:
        return most
    return float(max(job.nodes, math.ceil(most)))


# Text that the fleet writes into Slurm and reads back: the reason of a drain, and the mark beside it.
#
#     Reason=minivm: fleet: cordon+going: fan 3; spot notice      Comment=minivm: fleet: held 1 cordon+going
#
# One update writes both, so reason and mark never disagree. If a marked node is not drained, a person resumed it.

FLEET_PREFIX = f"{record.PREFIX} fleet:"
# Without accounting Slurm keeps the reason of a lifted drain, and would show it for Slurm's own next drain.
LIFTED = f"{FLEET_PREFIX} lifted"
# Lower-case letters only: the fleet would neither recognize nor lift its drain for a kind with a digit.
CAUSES = r"[a-z]+(?:\+[a-z]+)*"
_REASON = re.compile(rf"{re.escape(FLEET_PREFIX)} ({CAUSES}): ")
_MARK = re.compile(rf"{re.escape(FLEET_PREFIX)} held ([0-9]{{1,6}}) ({CAUSES})")
# Letters of a user's text that are kept; the rest is in the annotation.
MOST_REASON = 160
AGAIN = " (again)"
# The broker splits a reason at "; " and knows its own checks by NAME[CLASS]@COMMIT. A user's text must not look like a
# verdict, or the broker would lift the drain when its checks pass.
_UNWANTED = re.compile(r"[\s\"'`|;\[\]()@=]+")


@dataclass(frozen=True, slots=True)
class Mark:
    """Number of drains that the fleet made for these causes."""

    times: int
    kinds: frozenset[str]


def drain_reason(causes: Mapping[str, str], times: int = 1) -> str:
    """Build the reason from the causes; mark it if a person has lifted the drain before."""
    text = ", ".join(plain_text(words) for _, words in sorted(causes.items()))
    return f"{FLEET_PREFIX} {'+'.join(sorted(causes))}: {text[:MOST_REASON].strip()}{AGAIN if times > 1 else ''}"


def plain_text(words: str) -> str:
    return _UNWANTED.sub(" ", one_line(words))[:MOST_REASON].strip() or "no reason given"


def causes_in(reason: str) -> frozenset[str]:
    """Return the causes in a reason of the fleet; none for another author's reason."""
    match = _REASON.match(reason)
    return frozenset(match[1].split("+")) if match else frozenset()


def words_in(reason: str) -> str:
    """Return a reason of the fleet without its prefix and its causes' names."""
    return reason.removeprefix(FLEET_PREFIX).strip().partition(": ")[2] or reason


def mark_in_reason(reason: str) -> Mark | None:
    """Read the mark from a reason, where the comment is a person's or was lost with an older record."""
    named = causes_in(reason)
    return Mark(2 if AGAIN in reason else 1, named) if named else None


def mark_comment(mark: Mark) -> str:
    return f"{FLEET_PREFIX} held {mark.times} {'+'.join(sorted(mark.kinds))}"


def mark_in_comment(comment: str) -> Mark | None:
    match = _MARK.fullmatch(comment)
    return Mark(int(match[1]), frozenset(match[2].split("+"))) if match else None


def is_free_comment(comment: str) -> bool:
    """Return whether the fleet may write a mark: it does not overwrite a person's comment."""
    return not comment or comment.startswith(FLEET_PREFIX)


# A job in one of these states has its nodes.
HOLDING = frozenset({"RUNNING", "COMPLETING", "SUSPENDED", "CONFIGURING", "SIGNALING", "STAGE_OUT", "STOPPED"})
OVER = frozenset(
    {
        "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED",
        "REVOKED", "TIMEOUT",
    }
)  # fmt: skip
ID_KEYS = {"job": "job_id", "reservation": "name"}
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Precondition:
    """Facts of a node that a change re-checks first: a drain that a person sets in between must survive."""

    drained: bool
    down: bool
    reason: str
    comment: str


@dataclass(frozen=True, slots=True)
class SlurmNode:
    record: record.Node
    comment: str = ""
    since: float = 0.0  # when its reason was set
    topology: str | None = None  # its place in each topology; None: Slurm before 25.05 does not report it
    last_busy: float = 0.0  # 0: not reported
    offer: Offer = UNKNOWN_OFFER

    @property
    def name(self) -> str:
        return self.record.name

    @property
    def reason(self) -> str:
        return self.record.reason

    @property
    def drained(self) -> bool:
        return "DRAIN" in self.record.flags

    @property
    def down(self) -> bool:
        return "DOWN" in self.record.flags

    @property
    def runs(self) -> bool:
        """Return whether a job has processors of the node."""
        return self.record.allocated > 0 or bool(self.record.flags & {"ALLOCATED", "MIXED"})

    @property
    def kinds(self) -> frozenset[str]:
        """The causes of the fleet's drain; empty if the fleet did not drain the node."""
        return causes_in(self.reason) if self.drained else frozenset()

    @property
    def by_fleet(self) -> bool:
        """Return whether the fleet drained the node. A lifted drain leaves a reason without causes."""
        return bool(self.kinds)

    @property
    def mark(self) -> Mark | None:
        return mark_in_comment(self.comment) or (mark_in_reason(self.reason) if self.by_fleet else None)

    @property
    def precondition(self) -> Precondition:
        return Precondition(self.drained, self.down, self.reason, self.comment)


@dataclass(frozen=True, slots=True)
class SlurmView:
    nodes: Mapping[str, SlurmNode] = field(default_factory=dict)
    # The jobs that hold nodes, by node; None here and below: not requested, or not known.
    jobs: Mapping[str, tuple[str, ...]] | None = None
    # Nodes that a pending job or a reservation names.
    claims: frozenset[str] | None = None
    # Nodes that a reservation for work names.
    reserved: frozenset[str] | None = None
    pending: tuple[PendingJob, ...] | None = None
    # Why a node's record cannot be read.
    unread: Mapping[str, str] = field(default_factory=dict)
    # The job or reservation for which one of the above is not known although it was requested, and why.
    doubts: Mapping[str, str] = field(default_factory=dict)

    def holding(self, node: str) -> tuple[str, ...] | None:
        """Return the jobs that hold the node; None: not known."""
        return None if self.jobs is None else self.jobs.get(node, ())


def parse_slurm(
    nodes: Iterable[object], jobs: Iterable[object] | None = None, reservations: Iterable[object] | None = None
) -> SlurmView:
    side = parse_nodes(nodes)
    return side if jobs is None else with_jobs(side, jobs, reservations)


def parse_nodes(nodes: Iterable[object]) -> SlurmView:
    nodes_by_name: dict[str, SlurmNode] = {}
    unread: dict[str, str] = {}
    for item in nodes:
        try:
            node = slurm_node(item)
            nodes_by_name[node.name] = node
        except FleetError as error:
            name = item.get("name", "?") if isinstance(item, dict) else "?"
            unread[str(name)] = str(error)
    return SlurmView(nodes_by_name, unread=unread)


def with_jobs(side: SlurmView, jobs: Iterable[object], reservations: Iterable[object] | None = None) -> SlurmView:
    """Add the jobs. An unreadable job may hold or name any node: then the jobs are unknown, and `doubts` names it."""
    jobs, reservations = list(jobs), None if reservations is None else list(reservations)
    doubts: dict[str, str] = {}

    def read_all(read: Callable[[object], Iterable[T]], items: Iterable[object], kind: str) -> list[T] | None:
        values: list[T] = []
        for item in items:
            try:
                values += read(item)
            except FleetError as error:
                name = item.get(ID_KEYS[kind], "?") if isinstance(item, dict) else "?"
                doubts[f"{kind} {str(name)[:64]}"] = str(error)
                return None
        return values

    running, waiting = read_all(_list_held, jobs, "job"), read_all(lambda item: parse_pending_jobs([item]), jobs, "job")
    by_jobs = by_all = promised = None
    if reservations is not None:
        by_jobs = read_all(_list_nodes_of_job, jobs, "job")
        by_all = read_all(_list_nodes_of_reservation, reservations, "reservation")
        promised = read_all(_list_nodes_reserved_for_work, reservations, "reservation")
    return replace(
        side,
        jobs=None if running is None else _by_node(running),
        claims=None if by_jobs is None or by_all is None else frozenset((*by_jobs, *by_all)),
        reserved=None if promised is None else frozenset(promised),
        pending=None if waiting is None else tuple(waiting),
        doubts=doubts,
    )


def slurm_node(item: object) -> SlurmNode:
    node = Fields(item, "node")
    states = node.strings("state")
    if not states:
        raise FleetError("read node", "it has no state")
    parsed = record.Node(
        name=node.text("name", needed=True),
        state="+".join(states),
        address=node.text("address"),
        reason=node.text("reason"),
        started=str(node.number("slurmd_start_time") or "None"),
        allocated=node.number("alloc_cpus"),
        author=node.text("reason_set_by_user"),
    )
    place = node.text("topology") if "topology" in node.data else None
    return SlurmNode(parsed, node.text("comment"), float(node.number("reason_changed_at")), place, *_for_pools(node))


def _for_pools(node: Fields) -> tuple[float, Offer]:
    """Read the fields that only elastic pools need; an error in them does not make the whole record unreadable."""
    try:
        return float(node.number("last_busy")), _share(parse_offer(node.data))
    except FleetError:
        return 0.0, UNKNOWN_OFFER


@lru_cache(maxsize=256)
def _share(offer: Offer) -> Offer:
    """Keep one object for the few different offers of ten thousand nodes."""
    return offer


def _states(job: Fields) -> set[str]:
    return {str(state) for state in job.items("job_state")}


def _list_nodes_of_job(item: object) -> Iterable[str]:
    """List the nodes that an unfinished job names; Slurm lists finished jobs for a while."""
    job = Fields(item, "job")
    states = _states(job)
    if states and states <= OVER:
        return frozenset()
    return _names(job, "required_nodes") | _names(job, "nodes")


def _list_nodes_of_reservation(item: object) -> Iterable[str]:
    return _names(Fields(item, "reservation"), "node_list")


def _list_nodes_reserved_for_work(item: object) -> Iterable[str]:
    """List the nodes of a reservation for jobs; a reservation for maintenance needs no running node."""
    reservation = Fields(item, "reservation")
    return frozenset() if "MAINT" in reservation.items("flags") else _names(reservation, "node_list")


def _list_held(item: object) -> Iterable[tuple[str, str]]:
    job = Fields(item, "job")
    states = _states(job)
    if states and not states & HOLDING:
        return ()
    number = str(job.number("job_id"))
    return [(node, number) for node in _names(job, "nodes")]


def jobs_on(node: str, jobs: Iterable[object]) -> list[int]:
    """Return the jobs that run on a node, except those with a site's own AdminComment.

    slurmrestd takes no task of an array by its index, and by the array's own number it would mean all tasks: the task
    that has that number is left out while the array has others.
    """
    running: list[tuple[int, int]] = []
    members: Counter[int] = Counter()
    for item in jobs:
        try:
            job = Fields(item, "job")
            number, array, comment = job.number("job_id"), job.number("array_job_id"), job.text("admin_comment")
            members[array] += 1
            is_there = any(name == node for name, _ in _list_held(item))
        except FleetError:
            continue
        if is_there and (not comment or comment.startswith(record.PREFIX)):
            running.append((number, array))
    return [number for number, array in running if number != array or members[array] == 1]


def _by_node(jobs_on_nodes: Iterable[tuple[str, str]]) -> Mapping[str, tuple[str, ...]]:
    numbers_by_node: dict[str, list[str]] = {}
    for node, number in jobs_on_nodes:
        numbers_by_node.setdefault(node, []).append(number)
    return {node: tuple(numbers) for node, numbers in numbers_by_node.items()}


def _names(fields: Fields, key: str) -> frozenset[str]:
    names = frozenset(expand(fields.text(key)))
    if any("[" in name for name in names):
        fields.fail(key, "it names more nodes than can be told apart")
    return names
