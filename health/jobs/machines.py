"""Say why a node takes no jobs, and which class of cause that is. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from health.jobs.model import Fact, JobCause, JobNode, Sure
from health.jobs.text import moment, safe
from init.slurm.node import ADDED, FRESH, PREFIX, SILENT, STOPPING

ASLEEP = "grows again when jobs ask"  # the fleet's reason for a pod of an elastic pool that sleeps
FLEET = f"{PREFIX} fleet:"
MOST = 6  # nodes listed one by one
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
    if is_asleep(node) or reason.split(ADDED)[0] in (STOPPING, FRESH) or reason.startswith(FLEET):
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
