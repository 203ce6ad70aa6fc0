"""Slurm's side of a snapshot, as slurmrestd reports it: nodes, and the jobs and reservations that name them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TypeVar

from fleet import reasons
from fleet.errors import FleetError
from fleet.world.fields import Fields
from fleet.world.jobs import UNKNOWN_OFFER, Offer, PendingJob, parse_offer, pending_jobs
from init.slurm import node as record
from init.slurm.conf import expanded

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
        return reasons.kinds(self.reason) if self.drained else frozenset()

    @property
    def by_fleet(self) -> bool:
        """Return whether the fleet drained the node. A lifted drain leaves a reason without causes."""
        return bool(self.kinds)

    @property
    def mark(self) -> reasons.Mark | None:
        return reasons.marked(self.comment) or (reasons.mark_of(self.reason) if self.by_fleet else None)

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

    running, waiting = read_all(_held, jobs, "job"), read_all(lambda item: pending_jobs([item]), jobs, "job")
    by_jobs = by_all = promised = None
    if reservations is not None:
        by_jobs = read_all(_named_by_job, jobs, "job")
        by_all = read_all(_named_by_reservation, reservations, "reservation")
        promised = read_all(_reserved_for_work, reservations, "reservation")
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
    place = node.text("topology", needed=False) if "topology" in node.data else None
    return SlurmNode(parsed, node.text("comment"), float(node.number("reason_changed_at")), place, *_for_pools(node))


def _for_pools(node: Fields) -> tuple[float, Offer]:
    """Read the fields that only elastic pools need; an error in them does not make the whole record unreadable."""
    try:
        return float(node.number("last_busy")), _shared(parse_offer(node.data))
    except FleetError:
        return 0.0, UNKNOWN_OFFER


@lru_cache(maxsize=256)
def _shared(offer: Offer) -> Offer:
    """Keep one object for the few different offers of ten thousand nodes."""
    return offer


def _states(job: Fields) -> set[str]:
    return {str(state) for state in job.items("job_state")}


def _named_by_job(item: object) -> Iterable[str]:
    """List the nodes that an unfinished job names; Slurm lists finished jobs for a while."""
    job = Fields(item, "job")
    states = _states(job)
    if states and states <= OVER:
        return frozenset()
    return _names(job, "required_nodes") | _names(job, "nodes")


def _named_by_reservation(item: object) -> Iterable[str]:
    return _names(Fields(item, "reservation"), "node_list")


def _reserved_for_work(item: object) -> Iterable[str]:
    """List the nodes of a reservation for jobs; a reservation for maintenance needs no running node."""
    reservation = Fields(item, "reservation")
    return frozenset() if "MAINT" in reservation.items("flags") else _names(reservation, "node_list")


def _held(item: object) -> Iterable[tuple[str, str]]:
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
            is_there = any(name == node for name, _ in _held(item))
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
    names = frozenset(expanded(fields.text(key)))
    if any("[" in name for name in names):
        fields.fail(key, "it names more nodes than can be told apart")
    return names
