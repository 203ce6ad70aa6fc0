"""What a person is told of a cluster: one row a pod, and what this machine could not give. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from cluster.manifests import Pod
from cluster.pods import Running
from cluster.readiness import Readiness


@dataclass(frozen=True, slots=True)
class Row:
    pod: str
    role: str
    ready: bool
    why: str
    slurm: str
    restarts: int


HEADINGS = ("POD", "ROLE", "READY", "SLURM", "RESTARTS", "WHY NOT, OR WHAT ELSE")


def rows(
    pods: Iterable[Pod],
    running: Mapping[str, Running],
    readiness: Mapping[str, Readiness],
    slurm: Mapping[str, str],
) -> list[Row]:
    return [
        Row(
            pod.name,
            pod.role,
            readiness[pod.name].ready,
            readiness[pod.name].reason,
            slurm.get(pod.name, "-"),
            running[pod.name].restarts if pod.name in running else 0,
        )
        for pod in pods
    ]


def table(found: Sequence[Row]) -> list[str]:
    cells = [HEADINGS] + [
        (row.pod, row.role, "yes" if row.ready else "NO", row.slurm, str(row.restarts), first_line(row.why))
        for row in found
    ]
    widths = [max(len(line[column]) for line in cells) for column in range(len(HEADINGS))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells]
    # The rest of a long reason stands below its pod.
    for index in range(len(found), 0, -1):
        rest = found[index - 1].why.splitlines()[1:]
        lines[index + 1 : index + 1] = [f"    {line}" for line in rest]
    return lines


def first_line(text: str) -> str:
    line = text.partition("\n")[0]
    return "" if line in ("ok", "ready") else line


def slurm_states(sinfo: str) -> dict[str, str]:
    """`sinfo -h -N -o '%N|%T|%E'`: a node stands in it once a partition."""
    states = {}
    for line in sinfo.splitlines():
        name, state, reason = [*line.split("|", 2), "", ""][:3]
        if name:
            states[name] = state + (f" ({reason})" if reason not in ("", "none") else "")
    return states


def not_granted(pods: Iterable[Pod], *, proctrack: str, cgroup_version: str) -> list[str]:
    """What the chart would give on Kubernetes and this machine does not."""
    missing = []
    if proctrack != "cgroup":
        missing.append(
            f"cgroup v{cgroup_version} is not writable in a pod here, so slurm.proctrack is {proctrack}: jobs are"
            " tracked but not held to their share, and ssh to a worker is not adopted into a job"
        )
    for pod in pods:
        for device, count in pod.limits.devices:
            missing.append(f"{pod.name}: {count} x {device} (no device plugin here)")
        if pod.host_network:
            missing.append(f"{pod.name}: the host's network")
    return missing
