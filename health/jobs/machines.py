"""Nodes from a job's view: why a node takes no jobs, which nodes fit the job, and why it waits for them. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ground.errors import counted
from health.jobs.model import Answer, Fact, Job, JobCause, JobNode, Sure, count, list_briefly, moment, safe, size
from init.slurm.conf import expand
from init.slurm.node import ADDED, FRESH, PREFIX, SILENT, STOPPING

ASLEEP = "grows again when jobs ask"  # the fleet's reason for a pod of an elastic pool that sleeps
FLEET = f"{PREFIX} fleet:"
MOST = 6  # nodes listed one by one
_VERDICT = re.compile(r"([\w.-]{1,100})\[(?:node|reboot|manual|rma)\]@", re.ASCII)
SCRIPTS = ("prolog.", "epilog.", "task_prolog.", "health.")
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


def find_cause(node: JobNode) -> tuple[JobCause, Sure]:
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


def has_verdict(node: JobNode) -> bool:
    """Tell if the broker drained the node for a check's verdict; a script's may be a job's own doing."""
    text = node.reason.split(ADDED)[0]
    parts = text.removeprefix(PREFIX).split(";") if text.startswith(PREFIX) and not text.startswith(FLEET) else []
    checks = [match[1] for part in parts if (match := _VERDICT.match(part.strip()))]
    return "DRAIN" in node.states and any(not check.startswith(SCRIPTS) for check in checks)


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


def list_facts(nodes: Sequence[JobNode]) -> tuple[Fact, ...]:
    shown = [Fact(describe(node), "scontrol show node") for node in nodes[:MOST]]
    if len(nodes) > MOST:
        shown.append(Fact(f"{counted(len(nodes) - MOST, 'more node takes', 'more nodes take')} no jobs", "sinfo -R"))
    return tuple(shown)


def find_common_cause(nodes: Iterable[JobNode]) -> tuple[JobCause, Sure]:
    """Return the cause that the nodes share; the cluster where they have different ones."""
    causes = {find_cause(node) for node in nodes}
    if len(causes) == 1:
        return causes.pop()
    return (
        (JobCause.MACHINE, Sure.POSSIBLE)
        if {cause for cause, _ in causes} == {JobCause.MACHINE}
        else (JobCause.CLUSTER, Sure.LIKELY)
    )


# Which nodes could ever run the job, and what the other nodes lack.

_UNAVAILABLE = re.compile(r"UnavailableNodes:([^\s()]{1,4096})")
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
    """Compare the request with the nodes of the job's partitions."""
    partitions = frozenset(job.partition.split(","))
    required = frozenset(expand(job.required[:4096]))
    excluded = frozenset(expand(job.excluded[:4096]))
    fitting: list[JobNode] = []
    unusable: list[JobNode] = []
    lacking: list[tuple[JobNode, tuple[str, ...]]] = []
    for node in nodes:
        if not node.partitions & partitions:
            continue
        if lacks := _list_lacking(job, node, required, excluded):
            lacking.append((node, lacks))
        else:
            (fitting if node.is_usable else unusable).append(node)
    lacking.sort(key=lambda pair: (len(pair[1]), -pair[0].memory, -pair[0].cpus, pair[0].name))
    is_exact = not job.features or bool(_PLAIN.fullmatch(job.features))
    needed = max(1, job.node_count, len(required))
    if not job.single_node and job.cpus and not job.cpus_per_node:
        needed = max(needed, _count_nodes_for_cpus(job.cpus, [node.cpus for node in [*fitting, *unusable]]))
    return Fit(tuple(fitting), tuple(unusable), tuple(lacking), needed, is_exact)


def _count_nodes_for_cpus(cpus: int, sizes: Sequence[int]) -> int:
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


def _list_lacking(job: Job, node: JobNode, required: frozenset[str], excluded: frozenset[str]) -> tuple[str, ...]:
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
        if (present := count_resource(name, node.gres)) < number
    ]
    if job.features and _PLAIN.fullmatch(job.features):
        absent = [name for name in job.features.split("&") if name and name not in node.features]
        if absent:
            lacks.append(f"lacks the feature {list_briefly(absent)}")
    return tuple(lacks)


def count_resource(name: str, gres: Iterable[tuple[str, int]]) -> int:
    """Count a resource: "gpu" includes every type of it."""
    return sum(number for kind, number in gres if kind == name or kind.startswith(f"{name}:"))


def find_most_memory(nodes: Iterable[JobNode]) -> int:
    return max((node.memory for node in nodes), default=0)


def count_free(nodes: Iterable[JobNode], job: Job) -> int:
    """Count nodes that have room for one share of the job now; an exclusive job needs idle ones."""
    if job.exclusive:
        return sum(not node.cpus_used and not node.memory_used for node in nodes)
    cpus, memory = share(job)
    return sum(1 for node in nodes if node.cpus - node.cpus_used >= cpus and node.memory - node.memory_used >= memory)


# What the nodes mean for a waiting job.


def explain_wait_for_nodes(job: Job, nodes: Sequence[JobNode]) -> Answer:
    """Explain a wait for nodes: none is large enough, those that fit take no jobs, or they are busy."""
    fit = judge(job, nodes)
    if fit.never:
        return explain_never(job, fit)
    unusable = [node for node in _find_named_nodes(job, nodes) if not node.is_usable]
    if not unusable and fit.without_held:
        unusable = list(fit.held)
    if unusable:
        return explain_held_nodes(job, fit, unusable)
    if job.reason in ("BadConstraints", "Constraints"):
        return Answer(
            "It cannot start: Slurm finds no nodes that satisfy its constraints together.",
            JobCause.REQUEST,
            Sure.LIKELY,
            advice=("check --constraint, --nodelist, --gres and --switches", f"scancel {job.shown}"),
            unknown=("which part of the request it is",),
        )
    return explain_queue(job, fit)


def lacks_named_nodes(job: Job, nodes: Sequence[JobNode]) -> bool:
    """Tell if a node that the job names is drained or down. A reservation for maintenance does not count."""
    return any(node.states & {"DRAIN", "DOWN", "FAIL", "NOT_RESPONDING"} for node in _find_named_nodes(job, nodes))


def _find_named_nodes(job: Job, nodes: Sequence[JobNode]) -> list[JobNode]:
    """Return the nodes that Slurm's reason names, else those that the job requires."""
    match = _UNAVAILABLE.search(job.detail)
    names = set(expand(match[1])) if match else set(expand(job.required[:4096]))
    return [node for node in nodes if node.name in names]


def explain_never(job: Job, fit: Fit) -> Answer:
    """Explain a request that the existing nodes cannot satisfy, and name the nearest."""
    where = f"partition {safe(job.partition, 80)}"
    fitting = len(fit.fitting) + len(fit.held)
    total = fitting + len(fit.lacking)
    cancel = f"or cancel it: scancel {job.shown}"
    sure = Sure.CERTAIN if fit.is_exact else Sure.LIKELY
    if not total:
        return Answer(
            f"It cannot start: {where} has no nodes.",
            JobCause.CLUSTER,
            advice=("ask an operator, or choose another partition",),
        )
    if fitting:
        headline = f"It needs {count(fit.wanted, 'node')}, and {where} has {fitting} that are large enough"
        advice: tuple[str, ...] = (f"ask for at most {count(fitting, 'node')}, {cancel}",)
    else:
        node, lacks = fit.lacking[0]
        headline = f"No node of {where} can ever run it. The nearest, {safe(node.name, 80)}, {' and '.join(lacks[:3])}"
        release = (f"then scontrol release {job.shown}",) if job.reason == "BadConstraints" else ()  # Slurm holds it
        advice = (*_advise_smaller(job, fit), *release, cancel)
    evidence = tuple(
        Fact(f"{safe(node.name, 80)} {', '.join(lacks[:3])}", "scontrol show node") for node, lacks in fit.lacking[:3]
    )
    return Answer(
        f"{headline}.",
        JobCause.REQUEST,
        sure,
        evidence,
        advice,
        unknown=("whether the operators will add larger nodes",),
    )


def _advise_smaller(job: Job, fit: Fit) -> tuple[str, ...]:
    """Advise the nearest request that would fit."""
    nodes = [node for node, _ in fit.lacking]
    cpus, memory = share(job)
    nearest = nodes[0]
    advice = []
    if memory > (most := find_most_memory(nodes)):
        flag = "minmemorynode" if job.memory_per_node else "minmemorycpu"
        amount = most if job.memory_per_node else most // max(1, cpus)
        option = "--mem" if job.memory_per_node else "--mem-per-cpu"
        advice.append(
            f"ask for at most {size(amount)}: {option}={amount}M, or scontrol update jobid={job.shown} {flag}={amount}"
        )
    if cpus > nearest.cpus:
        advice.append(f"ask for at most {max(node.cpus for node in nodes)} CPUs on one node")
    if not advice:
        advice.append("change what the nearest node lacks")
    return tuple(advice)


def explain_held_nodes(job: Job, fit: Fit, held: Sequence[JobNode]) -> Answer:
    """Explain a wait for nodes that fit and take no jobs: they sleep, or are drained or down."""
    asleep = [node for node in held if is_asleep(node)]
    evidence = list_facts(held)
    if asleep and len(asleep) + len(fit.fitting) >= fit.wanted:
        return Answer(
            f"It waits for {count(min(fit.wanted, len(asleep)), 'node')} that the fleet starts for it:"
            " the pool is elastic and its pods sleep.",
            JobCause.CLUSTER,
            evidence=evidence,
            advice=("wait: a pod takes minutes, a new machine longer; an operator sees more with `fleet why POOL`",),
            unknown=("whether the pool may still grow: its limit is the operator's",),
        )
    cause, sure = find_common_cause(held)
    names = list_briefly(node.name for node in held)
    usable = f"{len(fit.fitting)} of {len(fit.fitting) + len(fit.held)} that fit take jobs"
    return Answer(
        f"It waits for nodes that take no jobs: it needs {fit.wanted}, {usable}; {names} cannot be used now.",
        cause,
        sure,
        evidence,
        (
            "nothing in your job is wrong; wait, or ask an operator when they return",
            *((f"free the choice of nodes: scontrol update jobid={job.shown} reqnodelist=",) if job.required else ()),
        ),
    )


def explain_queue(job: Job, fit: Fit | None) -> Answer:
    """Explain a wait in the queue: the job fits, and other jobs run or are before it."""
    if "COMPLETING" in job.states:  # requeued: slurmctld still counts the nodes of its last run
        where = f" on {safe(job.nodes, 120)}" if job.nodes else ""
        headline = f"It is queued again, and waits until its last run is cleaned up{where}."
        return Answer(headline, JobCause.CLUSTER, advice=("ask again in a minute",))
    evidence: list[Fact] = []
    if fit is not None:
        evidence.append(
            Fact(
                f"{count(len(fit.fitting), 'node')} can run it and {count_free(fit.fitting, job)} have room for it now;"
                f" it needs {fit.wanted}",
                "scontrol show node",
            )
        )
        if fit.held:
            evidence += list_facts(fit.held)[:3]
    if job.reason == "Priority":
        return Answer(
            "It waits its turn: jobs with a higher priority are before it.",
            JobCause.CLUSTER,
            evidence=tuple(evidence),
            advice=("a shorter --time lets it fill gaps", "sprio -l shows priorities where the site computes them"),
        )
    if job.reason in ("None", ""):
        return Answer(
            "The scheduler has not looked at it yet.",
            JobCause.CLUSTER,
            evidence=tuple(evidence),
            advice=("ask again in a minute",),
        )
    headline = "It waits until running jobs free the processors, memory or GPUs that it needs."
    if job.reason in ("ReqNodeNotAvail", "NodeDown"):
        headline = "It waits for nodes that are not available now: busy, reserved, or just back."
    advice = ("a shorter --time or a smaller request may start earlier",)
    return Answer(headline, JobCause.CLUSTER, evidence=tuple(evidence), advice=advice)
