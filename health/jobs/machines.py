"""Say why a node takes no jobs, and which class of cause that is. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from health.jobs.model import Fact, Job, JobCause, JobNode, Sure, count, listed, moment, safe, size
from init.slurm.conf import expanded
from init.slurm.node import ADDED, FRESH, PREFIX, SILENT, STOPPING

ASLEEP = "grows again when jobs ask"  # the fleet's reason for a pod of an elastic pool that sleeps
FLEET = f"{PREFIX} fleet:"
MOST = 6  # nodes listed one by one
# slurmctld drains a node with these words that refuses to start a job again while the job's first start goes on there.
# That happens after a kill of slurmctld which had started the job and not yet saved that.
STARTED_TWICE = "Duplicate jobid"
SLURM = (
    "Prolog error",
    "Epilog error",
    "Kill task failed",
    "batch job complete failure",
    "Not responding",
    "Low ",
    "gres/",
    "Node unexpectedly rebooted",
)


def is_asleep(node: JobNode) -> bool:
    return ASLEEP in node.reason


def cause_of(node: JobNode) -> tuple[JobCause, Sure]:
    """Return what keeps a node from jobs: its own fault, the cluster's care, or a person."""
    reason = node.reason
    is_ours = is_asleep(node) or reason.split(ADDED)[0] in (STOPPING, FRESH) or reason.startswith(FLEET)
    if is_ours or reason == STARTED_TWICE:
        return JobCause.CLUSTER, Sure.CERTAIN
    if reason.startswith(PREFIX):
        return JobCause.MACHINE, Sure.CERTAIN
    if not reason or reason.startswith(SLURM) or reason == SILENT:
        return JobCause.MACHINE, Sure.LIKELY
    return JobCause.PERSON, Sure.LIKELY


def describe(node: JobNode) -> str:
    """Describe a node that takes no jobs: "w3 is drained: minivm: gpu_count... (by root, since ...)"."""
    if is_asleep(node):
        return f"{safe(node.name, 80)} sleeps; the fleet starts it when jobs need it ({safe(node.reason)})"
    text = f"{safe(node.name, 80)} is {node.condition}"
    if not node.reason:
        return f"{text}; no reason is recorded"
    author = f"by {safe(node.author, 40)}" if node.author else ""
    since = f"since {moment(node.since)}" if node.since else ""
    more = ", ".join(part for part in (author, since) if part)
    return f"{text}: {safe(node.reason)}" + (f" ({more})" if more else "")


def facts(nodes: Sequence[JobNode]) -> tuple[Fact, ...]:
    shown = [Fact(describe(node), "scontrol show node") for node in nodes[:MOST]]
    if len(nodes) > MOST:
        shown.append(Fact(f"{len(nodes) - MOST} more nodes take no jobs", "sinfo -R"))
    return tuple(shown)


def common(nodes: Iterable[JobNode]) -> tuple[JobCause, Sure]:
    """Return the cause that the nodes share; the cluster where they have different ones."""
    causes = {cause_of(node) for node in nodes}
    if len(causes) == 1:
        return causes.pop()
    return (
        (JobCause.MACHINE, Sure.POSSIBLE)
        if {each for each, _ in causes} == {JobCause.MACHINE}
        else (JobCause.CLUSTER, Sure.LIKELY)
    )


# Compare a job's request with nodes: which could ever run it, and what the others lack. Pure.
_PLAIN = re.compile(r"[\w.&-]+", re.ASCII)  # features joined by "and"; others are not judged here


@dataclass(frozen=True, slots=True)
class Fit:
    """Nodes of the job's partitions by what they mean for the job."""

    fitting: tuple[JobNode, ...]  # large enough, usable
    held: tuple[JobNode, ...]  # large enough, drained or down
    lacking: tuple[tuple[JobNode, tuple[str, ...]], ...]  # too small, with what they lack; nearest first
    wanted: int  # nodes that the job needs at least
    is_exact: bool  # False if a part of the request was not judged

    @property
    def never(self) -> bool:
        """True if the existing nodes could not satisfy the request even if they were all idle."""
        return len(self.fitting) + len(self.held) < self.wanted

    @property
    def without_held(self) -> bool:
        """True if the request waits for nodes that are drained or down."""
        return not self.never and len(self.fitting) < self.wanted


def judge(job: Job, nodes: Iterable[JobNode]) -> Fit:
    partitions = frozenset(job.partition.split(","))
    required = frozenset(expanded(job.required[:4096]))
    excluded = frozenset(expanded(job.excluded[:4096]))
    fitting: list[JobNode] = []
    unusable: list[JobNode] = []
    lacking: list[tuple[JobNode, tuple[str, ...]]] = []
    for node in nodes:
        if not node.partitions & partitions:
            continue
        if lacks := _lacks(job, node, required, excluded):
            lacking.append((node, lacks))
        else:
            (fitting if node.is_usable else unusable).append(node)
    lacking.sort(key=lambda pair: (len(pair[1]), -pair[0].memory, -pair[0].cpus, pair[0].name))
    exact = not job.features or bool(_PLAIN.fullmatch(job.features))
    needed = max(1, job.node_count, len(required))
    if not job.single_node and job.cpus and not job.cpus_per_node:
        needed = max(needed, _spread(job.cpus, [node.cpus for node in [*fitting, *unusable]]))
    return Fit(tuple(fitting), tuple(unusable), tuple(lacking), needed, exact)


def _spread(cpus: int, sizes: Sequence[int]) -> int:
    """Count the largest nodes over which the CPUs spread; one more than there are where they do not fit."""
    cpus_left = cpus
    for number, most in enumerate(sorted(sizes, reverse=True), 1):
        cpus_left -= most
        if cpus_left <= 0:
            return number
    return len(sizes) + 1 if sizes else 1


def share(job: Job) -> tuple[int, int]:
    """Return the CPUs and the memory that one node must have at least."""
    cpus = max(job.cpus_per_task, job.cpus_per_node, job.cpus if job.single_node else 1)
    memory = job.memory_per_node or job.memory_per_cpu * cpus
    return cpus, memory


def _lacks(job: Job, node: JobNode, required: frozenset[str], excluded: frozenset[str]) -> tuple[str, ...]:
    cpus, memory = share(job)
    lacks = []
    if required and node.name not in required and len(required) >= max(1, job.node_count):
        lacks.append("is not among the nodes that the job names")
    if node.name in excluded:
        lacks.append("is excluded by the job")
    if cpus > node.cpus:
        lacks.append(f"has {count(node.cpus, 'CPU')} and the job needs {cpus} on one node")
    if memory > node.memory:
        lacks.append(f"has {size(node.memory)} of memory and the job needs {size(memory)} on one node")
    lacks += [
        f"has {present} of {name} and the job needs {number} on each node"
        for name, number in job.gres_per_node
        if (present := amount(name, node.gres)) < number
    ]
    if job.features and _PLAIN.fullmatch(job.features):
        absent = [name for name in job.features.split("&") if name and name not in node.features]
        if absent:
            lacks.append(f"lacks the feature {listed(absent)}")
    return tuple(lacks)


def amount(name: str, gres: Iterable[tuple[str, int]]) -> int:
    """Count a resource: "gpu" includes every type of it."""
    return sum(number for kind, number in gres if kind == name or kind.startswith(f"{name}:"))


def most_memory(nodes: Iterable[JobNode]) -> int:
    return max((node.memory for node in nodes), default=0)


def free(nodes: Iterable[JobNode], job: Job) -> int:
    """Count nodes that have room for one share of the job now; an exclusive job needs idle ones."""
    if job.exclusive:
        return sum(not node.cpus_used and not node.memory_used for node in nodes)
    cpus, memory = share(job)
    return sum(1 for node in nodes if node.cpus - node.cpus_used >= cpus and node.memory - node.memory_used >= memory)
