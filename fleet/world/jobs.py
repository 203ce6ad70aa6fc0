"""Pending jobs as slurmrestd lists them, and what a node offers to a job."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

from fleet.world.fields import Fields, Object

# Reasons that more nodes may cure. The last two belong to jobs that ask for more than the partition has. Held jobs,
# dependent jobs, later start times and limits of a user are not among them.
CURABLE = ("Resources", "Priority", "ReqNodeNotAvail", "Nodes required", "PartitionNodeLimit", "PartitionConfig")
BEHIND = "Priority"
_GPUS = re.compile(r"(?:gres[/:])?gpu(?:[:/][A-Za-z][\w.-]*)*(?:[:=]([0-9]{1,6}))?(?:\(.*)?")
_TASKS = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9})(?::([1-9][0-9]{0,8}))?)?")
# The bound of every count, above all of the tasks of an array.
MOST = 1 << 20


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


def pending_jobs(jobs: Iterable[object]) -> tuple[PendingJob, ...]:
    """Parse the pending jobs; raise FleetError if one cannot be read."""
    waiting = (job for job in (Fields(item, "job") for item in jobs) if "PENDING" in job.items("job_state"))
    # A job that names its nodes waits for those, and no other node helps.
    return tuple(_pending_job(job) for job in waiting if not job.text("required_nodes"))


def _pending_job(job: Fields) -> PendingJob:
    def count(key: str) -> int:
        return min(max(0, job.number(key)), MOST)

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
    many = 0
    for part in text.partition("%")[0].split(","):
        if match := _TASKS.fullmatch(part):
            first, last, step = (int(group) if group else 0 for group in match.groups())
            many += (last - first) // (step or 1) + 1 if last > first else 1
    return max(1, min(many, at_once or MOST, MOST))


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
    for what, wanted, there in (
        ("CPUs", job.cpus, offer.cpus),
        ("MB of memory", job.memory, offer.memory),
        ("GPUs", job.gpus, offer.gpus),
    ):
        if there and wanted > there:
            return f"{wanted} {what} on a node, and one has {there}"
    return ""


def nodes_needed(offer: Offer, job: PendingJob) -> float:
    """Count the nodes that the job takes; less than 1: it leaves room for other jobs on its node."""
    parts = [
        wanted / there
        for wanted, there in ((job.all_cpus, offer.cpus), (job.all_memory, offer.memory), (job.all_gpus, offer.gpus))
        if there
    ]
    most = max(parts, default=1.0)
    if job.nodes == 1 and most < 1.0 and offer.cpus and not job.alone:
        return most
    return float(max(job.nodes, math.ceil(most)))
