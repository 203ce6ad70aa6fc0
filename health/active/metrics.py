"""Metrics of the planner: blamed parts, and jobs that wait although enough idle nodes fit. Pure.

The planner reads nodes and waiting jobs in each turn anyway, so these metrics cost slurmctld nothing.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Set
from dataclasses import dataclass

from ground.metrics import family
from health.active.turn import PlanMemory, findings
from init.slurm.conf import expand

# Reasons of jobs that start when nodes are free. All others explain themselves.
WAITS_FOR_NODES = frozenset({"None", "Resources", "Priority"})
# Eligible for so long: the scheduler has looked at the job more than once.
WAITED_S = 1800.0
# Each request is compared with each kind of idle nodes.
MOST_REQUESTS, MOST_PARTITIONS, MOST_BLAMED = 200, 100, 50
# Features, in which a user may write any text, come last.
FORMAT = ",".join(
    f"{name}:|"
    for name in (
        "partition", "reason", "starttime", "eligibletime", "numnodes", "tres-alloc", "reqnodes", "excnodes",
        "reservation", "feature",
    )
)  # fmt: skip
NONE = ("", "(null)")
_AMOUNT = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,6})?)([KMGTP]?)")
_PLAIN = re.compile(r"[\w.-]+(?:[&,][\w.-]+)*", re.ASCII)
_UNITS = {unit: 1024.0**power for power, unit in enumerate(["", "K", "M", "G", "T", "P"])}


@dataclass(frozen=True, slots=True)
class IdleKind:
    """Nodes that are alike for a request."""

    partitions: frozenset[str]
    features: frozenset[str]
    tres: str  # what the node offers, as `scontrol show node` lists it under CfgTRES


@dataclass(frozen=True, slots=True)
class JobRequest:
    """A request, as many jobs may have it."""

    partitions: frozenset[str]
    nodes: int
    tres: str  # of the whole job
    excluded: str
    features: frozenset[str]


def parse_tres(text: str) -> dict[str, float]:
    """Parse `cpu=4,mem=1.50T,gres/gpu=8`; leave out what no node has, and an amount that is no number."""
    amounts = {}
    for name, _, amount in (part.partition("=") for part in text.split(",")):
        if name not in ("", "node", "billing") and (match := _AMOUNT.fullmatch(amount)):
            amounts[name] = float(match[1]) * _UNITS[match[2]]
    return amounts


def parse_request(line: str) -> tuple[JobRequest, str] | None:
    """Parse a line of FORMAT: the request, and since when the job is eligible.

    None for a job that waits for another reason than nodes, or that names its nodes, a reservation or alternative
    features: these may explain why it waits.
    """
    fields = [field.strip() for field in line.split("|", 9)]
    if len(fields) < 10:
        return None
    partitions, reason, _, eligible, nodes, tres, required, excluded, reservation, features = fields
    if reason not in WAITS_FOR_NODES:
        return None
    features = "" if (features := features.removesuffix("|").strip()) in NONE else features
    count = _AMOUNT.fullmatch(nodes)
    if (
        required not in NONE
        or reservation not in NONE
        or count is None
        or (features and not _PLAIN.fullmatch(features))
    ):
        return None
    request = JobRequest(
        frozenset(partitions.split(",")),
        max(1, int(float(count[1]) * _UNITS[count[2]])),
        tres,
        "" if excluded in NONE else excluded,
        frozenset(filter(None, re.split("[&,]", features))),
    )
    return request, eligible


def count_startable(requests: Counter[JobRequest], idle: Mapping[IdleKind, Set[str]]) -> dict[str, int]:
    """Count for each partition with idle nodes the jobs that could start there; of the most frequent requests alone."""
    offers = [(kind, parse_tres(kind.tres), names) for kind, names in idle.items()]
    counts = dict.fromkeys(sorted({name for kind in idle for name in kind.partitions})[:MOST_PARTITIONS], 0)
    for request, jobs in requests.most_common(MOST_REQUESTS):
        share = {name: amount / request.nodes for name, amount in parse_tres(request.tres).items()}
        excluded = frozenset(expand(request.excluded[:4096])) if request.excluded else frozenset()
        fitting = [
            (kind.partitions, len(names - excluded))
            for kind, has, names in offers
            if request.features <= kind.features and all(share[name] <= has.get(name, 0.0) for name in share)
        ]
        for partition in request.partitions & counts.keys():
            if sum(number for partitions, number in fitting if partition in partitions) >= request.nodes:
                counts[partition] += jobs
    return counts


def render(memory: PlanMemory, startable: Mapping[str, int]) -> str:
    blamed = [
        ({"check": check, "part": str(item.part), "name": item.name}, str(item.failures))
        for check, state in sorted(memory.checks.items())
        for item in findings(state)
    ]
    about = "Tests that a blamed machine or leaf switch failed in a row."
    lines = family("minivm_active_blamed", about, blamed[:MOST_BLAMED])
    jobs = [({"partition": name}, str(count)) for name, count in startable.items()]
    about = f"Jobs that wait for {WAITED_S / 60:.0f} minutes or more although enough idle nodes fit."
    return "\n".join([*lines, *family("minivm_active_startable_jobs", about, jobs)]) + "\n"
