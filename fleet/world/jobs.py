"""Jobs that wait, as slurmrestd tells of them, and what a node has for one."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

from fleet.world import fields
from fleet.world.fields import Object

# What more nodes may cure. The last two are said of a job that asks for more than there is: of more nodes, or of bigger
# ones. A held one, one that waits for another or for its hour, and one over a limit of its user are not among them.
CURABLE = ("Resources", "Priority", "ReqNodeNotAvail", "Nodes required", "PartitionNodeLimit", "PartitionConfig")
BEHIND = "Priority"
_GPUS = re.compile(r"(?:gres[/:])?gpu(?:[:/][A-Za-z][\w.-]*)*(?:[:=]([0-9]{1,6}))?(?:\(.*)?")
_TASKS = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9})(?::([1-9][0-9]{0,8}))?)?")
# Of what may be larger, an array of jobs above all, no more is counted.
MOST = 1 << 20


@dataclass(frozen=True, slots=True)
class Offer:
    """0: not known."""

    partitions: frozenset[str] = frozenset()
    features: frozenset[str] = frozenset()
    cpus: int = 0
    memory: int = 0  # MB
    gpus: int = 0


UNKNOWN_OFFER = Offer()


@dataclass(frozen=True, slots=True)
class PendingJob:
    """`cpus`, `memory`, `gpus`: on each node at least; `all_cpus`, `all_gpus`: on all together."""

    job: str
    reason: str
    since: float  # from when it may run
    times: int = 1  # of an array: so many of it wait
    nodes: int = 1
    partitions: tuple[str, ...] = ()
    features: str = ""
    cpus: int = 0
    memory: int = 0
    gpus: int = 0
    all_cpus: int = 0
    all_gpus: int = 0
    all_memory: int = 0
    alone: bool = False  # shares its nodes with nobody

    @property
    def curable(self) -> bool:
        return self.since > 0 and self.reason.replace("_", " ").startswith(CURABLE)


def pending(jobs: Iterable[object]) -> tuple[PendingJob, ...]:
    """FleetError: one of them cannot be read."""
    found = []
    for item in jobs:
        one = fields.mapping(item, "job")
        if "PENDING" in fields.items(one.get("job_state"), "job.job_state"):
            found.append(_pending(one))
    # One that names its nodes waits for those and for no others.
    return tuple(one for one in found if one is not None)


def _pending(one: Object) -> PendingJob | None:
    def count(key: str) -> int:
        return min(max(0, fields.number(one.get(key), f"job.{key}")), MOST)

    def said(key: str) -> str:
        return fields.text(one.get(key), f"job.{key}")

    if said("required_nodes"):
        return None
    nodes, cpus = max(1, count("node_count")), count("cpus")
    least = max(1, count("minimum_cpus_per_node"))
    each = count("memory_per_cpu")
    on_node = count("memory_per_node")
    shared = {str(word).lower() for word in fields.items(one.get("shared"), "job.shared")}
    return PendingJob(
        job=str(fields.number(one.get("job_id"), "job.job_id")),
        reason=said("state_reason"),
        since=float(fields.number(one.get("eligible_time"), "job.eligible_time")),
        times=tasks(said("array_task_string"), count("array_max_tasks")),
        nodes=nodes,
        partitions=tuple(filter(None, said("partition").split(","))),
        features=said("features"),
        cpus=least,
        memory=on_node or each * least,
        gpus=gpus(said("tres_per_node")),
        all_cpus=cpus,
        all_gpus=gpus(said("tres_per_job")),
        all_memory=on_node * nodes or each * cpus,
        alone="none" in shared,
    )


def tasks(said: str, at_once: int) -> int:
    """How many of an array wait that may run at once: "1-3,7,10-20:5%4"; a long one is cut off by Slurm."""
    many = 0
    for part in said.partition("%")[0].split(","):
        if found := _TASKS.fullmatch(part):
            first, last, step = (int(one) if one else 0 for one in found.groups())
            many += (last - first) // (step or 1) + 1 if last > first else 1
    limit = at_once or MOST
    return max(1, min(many, limit, MOST))


def gpus(said: str) -> int:
    """In "gres/gpu:2", "gres/gpu:h100=8,gres/shard:1", "gpu:h100:8(S:0-1)"."""
    return sum(int(found[1] or 1) for part in said.split(",") if (found := _GPUS.fullmatch(part)))


def offer(one: Object) -> Offer:
    """Of a node's record."""

    def names(key: str) -> frozenset[str]:
        return frozenset(fields.text(item, f"node.{key}") for item in fields.items(one.get(key), f"node.{key}"))

    return Offer(
        names("partitions"),
        names("features"),
        fields.number(one.get("cpus"), "node.cpus"),
        fields.number(one.get("real_memory"), "node.real_memory"),
        gpus(fields.text(one.get("gres"), "node.gres")),
    )


def serves(has: Offer, job: PendingJob) -> str:
    """Why a node that has this is none for the job; "": it is one, as far as is known."""
    named = re.findall(r"[A-Za-z0-9_.=-]+", re.sub(r"\*[0-9]+", "", job.features))
    plain = not re.search(r"[|\[\]()]", job.features)
    lacks = [name for name in named if name not in has.features]
    if has.partitions and job.partitions and not has.partitions & {*job.partitions}:
        return f"partition {','.join(job.partitions)}"
    if lacks and (plain or len(lacks) == len(named)):
        return f"feature {lacks[0]}"
    for what, wants, there in (
        ("CPUs", job.cpus, has.cpus),
        ("MB of memory", job.memory, has.memory),
        ("GPUs", job.gpus, has.gpus),
    ):
        if there and wants > there:
            return f"{wants} {what} on a node, and one has {there}"
    return ""


def nodes_of(has: Offer, job: PendingJob) -> float:
    """How many it takes; less than 1: it leaves room for others on one."""
    parts = [
        wants / there
        for wants, there in ((job.all_cpus, has.cpus), (job.all_memory, has.memory), (job.all_gpus, has.gpus))
        if there
    ]
    most = max(parts, default=1.0)
    if job.nodes == 1 and most < 1.0 and has.cpus and not job.alone:
        return most
    return float(max(job.nodes, math.ceil(most)))
