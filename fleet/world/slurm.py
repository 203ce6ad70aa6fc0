"""Slurm's side, as slurmrestd tells it: nodes, and the jobs that hold them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TypeVar

from fleet import reasons
from fleet.errors import FleetError
from fleet.world import fields
from fleet.world.fields import Object
from fleet.world.jobs import UNKNOWN_OFFER, Offer, PendingJob, offer, pending
from init.slurm import node as record
from init.slurm.conf import expanded

# What squeue calls R, CG, S, CF, SI, SO: a job in one of these has its nodes.
HOLDING = frozenset({"RUNNING", "COMPLETING", "SUSPENDED", "CONFIGURING", "SIGNALING", "STAGE_OUT", "STOPPED"})
OVER = frozenset(
    {
        "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED",
        "REVOKED", "TIMEOUT",
    }
)  # fmt: skip

CALLED = {"job": "job_id", "reservation": "name"}
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SlurmNode:
    record: record.Node
    comment: str = ""
    since: float = 0.0  # when its reason was set
    topology: str | None = None  # its place in each topology; None: releases before 25.05 do not tell
    last_busy: float = 0.0  # 0: not told
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
        """A job has processors of it."""
        return self.record.allocated > 0 or bool(self.record.flags & {"ALLOCATED", "MIXED"})

    @property
    def downed(self) -> bool:
        """Down by the fleet, and not for what Slurm itself has found since."""
        return self.down and self.ours and bool(reasons.kinds(self.reason) & reasons.DOWN)

    @property
    def ours(self) -> bool:
        """Drained by the fleet. Without a kind in its reason it is not: that one is lifted already."""
        return self.drained and bool(reasons.kinds(self.reason))

    @property
    def mark(self) -> reasons.Mark | None:
        return reasons.marked(self.comment) or (reasons.mark_of(self.reason) if self.ours else None)

    @property
    def seen(self) -> Precondition:
        return Precondition(self.drained, self.down, self.reason, self.comment)


@dataclass(frozen=True, slots=True)
class Precondition:
    """What must still be so when a change is made: a drain that a person sets in between is not to be lost."""

    drained: bool
    down: bool
    reason: str
    comment: str


@dataclass(frozen=True, slots=True)
class Slurm:
    nodes: Mapping[str, SlurmNode] = field(default_factory=dict)
    # Those that hold nodes, by node; None: nobody has asked, or nobody answered.
    jobs: Mapping[str, tuple[str, ...]] | None = None
    # Nodes that a pending job or a reservation names; None as above.
    claims: frozenset[str] | None = None
    # Nodes that a reservation for work names; None as above.
    reserved: frozenset[str] | None = None
    # Those that wait; None as above.
    pending: tuple[PendingJob, ...] | None = None
    # Nodes that could not be read.
    unread: Mapping[str, str] = field(default_factory=dict)
    # Why one of the above is not known although it was asked for: by the job or the reservation.
    doubts: Mapping[str, str] = field(default_factory=dict)

    def holding(self, node: str) -> tuple[str, ...] | None:
        """The jobs that hold the node; None: not known."""
        return None if self.jobs is None else self.jobs.get(node, ())


def slurm(
    nodes: Iterable[object], jobs: Iterable[object] | None = None, reservations: Iterable[object] | None = None
) -> Slurm:
    here = of_nodes(nodes)
    return here if jobs is None else with_jobs(here, jobs, reservations)


def of_nodes(nodes: Iterable[object]) -> Slurm:
    found: dict[str, SlurmNode] = {}
    unread: dict[str, str] = {}
    for item in nodes:
        try:
            one = slurm_node(item)
            found[one.name] = one
        except FleetError as error:
            name = item.get("name", "?") if isinstance(item, dict) else "?"
            unread[str(name)] = str(error)
    return Slurm(found, unread=unread)


def with_jobs(here: Slurm, jobs: Iterable[object], reservations: Iterable[object] | None = None) -> Slurm:
    """One that cannot be read may hold or name any node: then nothing is known, and which one it is."""
    jobs, reservations = list(jobs), None if reservations is None else list(reservations)
    doubts: dict[str, str] = {}

    def known(read: Callable[[object], Iterable[T]], items: Iterable[object], what: str) -> list[T] | None:
        found: list[T] = []
        for item in items:
            try:
                found += read(item)
            except FleetError as error:
                name = item.get(CALLED[what], "?") if isinstance(item, dict) else "?"
                doubts[f"{what} {str(name)[:64]}"] = str(error)
                return None
        return found

    held, waiting = known(_held, jobs, "job"), known(_waiting, jobs, "job")
    by_jobs = by_all = promised = None
    if reservations is not None:
        by_jobs, by_all = known(_named, jobs, "job"), known(_of, reservations, "reservation")
        promised = known(_promised, reservations, "reservation")
    return replace(
        here,
        jobs=None if held is None else _by_node(held),
        claims=None if by_jobs is None or by_all is None else frozenset((*by_jobs, *by_all)),
        reserved=None if promised is None else frozenset(promised),
        pending=None if waiting is None else tuple(waiting),
        doubts=doubts,
    )


def slurm_node(item: object) -> SlurmNode:
    one = fields.mapping(item, "node")
    states = [fields.text(state, "node.state", needed=True) for state in fields.items(one.get("state"), "node.state")]
    if not states:
        raise FleetError("read node", "it has no state")
    known = record.Node(
        name=fields.text(one.get("name"), "node.name", needed=True),
        state="+".join(states),
        address=fields.text(one.get("address"), "node.address"),
        reason=fields.text(one.get("reason"), "node.reason"),
        started=str(fields.number(one.get("slurmd_start_time"), "node.slurmd_start_time") or "None"),
        allocated=fields.number(one.get("alloc_cpus"), "node.alloc_cpus"),
        author=fields.text(one.get("reason_set_by_user"), "node.reason_set_by_user"),
    )
    since = fields.number(one.get("reason_changed_at"), "node.reason_changed_at")
    place = fields.text(one["topology"], "node.topology") if "topology" in one else None
    comment = fields.text(one.get("comment"), "node.comment")
    return SlurmNode(known, comment, float(since), place, *_of_jobs(one))


def _of_jobs(one: Object) -> tuple[float, Offer]:
    """What only elastic pools ask for: a node whose drain can be read is not unread for it."""
    try:
        return float(fields.number(one.get("last_busy"), "node.last_busy")), _shared(offer(one))
    except FleetError:
        return 0.0, UNKNOWN_OFFER


@lru_cache(maxsize=256)
def _shared(found: Offer) -> Offer:
    """The same few on ten thousand nodes."""
    return found


def _states(one: Object) -> set[str]:
    return {str(state) for state in fields.items(one.get("job_state"), "job.job_state")}


def _named(item: object) -> Iterable[str]:
    """By a job that is not over: Slurm tells of it for a while."""
    one = fields.mapping(item, "job")
    states = _states(one)
    if states and states <= OVER:
        return frozenset()
    return frozenset().union(*(_names(one.get(key), f"job.{key}") for key in ("required_nodes", "nodes")))


def _of(item: object) -> Iterable[str]:
    return _names(fields.mapping(item, "reservation").get("node_list"), "reservation.node_list")


def _promised(item: object) -> Iterable[str]:
    """For jobs to come: one for maintenance keeps jobs away, and needs no node."""
    one = fields.mapping(item, "reservation")
    return frozenset() if "MAINT" in fields.items(one.get("flags"), "reservation.flags") else _of(one)


def _held(item: object) -> Iterable[tuple[str, str]]:
    one = fields.mapping(item, "job")
    states = _states(one)
    if states and not states & HOLDING:
        return ()
    number = str(fields.number(one.get("job_id"), "job.job_id"))
    return [(node, number) for node in _names(one.get("nodes"), "job.nodes")]


def _by_node(held: Iterable[tuple[str, str]]) -> Mapping[str, tuple[str, ...]]:
    found: dict[str, list[str]] = {}
    for node, number in held:
        found.setdefault(node, []).append(number)
    return {node: tuple(numbers) for node, numbers in found.items()}


def _waiting(item: object) -> Iterable[PendingJob]:
    return pending([item])


def _names(value: object, where: str) -> frozenset[str]:
    found = frozenset(expanded(fields.text(value, where)))
    if any("[" in name for name in found):
        raise FleetError(f"read {where}", "it names more nodes than can be told apart")
    return found
