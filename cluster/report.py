"""Reports about a cluster: a row per pod, what this machine cannot provide, and time per stage. Pure."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cluster.manifests import PodSpec
from cluster.pods import RunningPod
from cluster.readiness import Readiness
from images.pins import EngineImage


@dataclass(frozen=True, slots=True)
class Row:
    pod: str
    role: str
    ready: bool
    why: str
    slurm: str
    restarts: int
    also: tuple[str, ...] = ()
    # Of the image that the pod runs, whatever its name refers to now.
    version: str = ""
    image: str = ""
    # What the pod is among several controllers, in full.
    turn: str = ""


HEADINGS = ("POD", "ROLE", "READY", "SLURM", "VERSION", "IMAGE", "RESTARTS", "WHY NOT, AND WHAT ELSE IS WRONG")
NAMED = 3  # pods that are named where several have the same problem
VERSION_LABEL = "org.opencontainers.image.version"


def image(inspected: Mapping[str, Any]) -> EngineImage:
    """Read the image from docker's reply. A role's image has <slurm version>-<variant>-<hash12> as its version."""
    version = re.match(r"[0-9][0-9.]*", ((inspected.get("Config") or {}).get("Labels") or {}).get(VERSION_LABEL, ""))
    return EngineImage(str(inspected["Id"]), version[0] if version else "")


def image_name(inspected: Mapping[str, Any]) -> str:
    """Return the hash at the end of its tag, or else the start of its id, as `docker images` shows it."""
    names = [content[1] for tag in inspected.get("RepoTags") or () if (content := re.search(r"-([0-9a-f]{12})$", tag))]
    return sorted(names)[0] if names else str(inspected["Id"]).removeprefix("sha256:")[:12]


def rows(
    pods: Iterable[PodSpec],
    running: Mapping[str, RunningPod],
    readiness: Mapping[str, Readiness],
    slurm: Mapping[str, str],
    images: Mapping[str, Mapping[str, Any]],
) -> list[Row]:
    """Build the rows. `images` maps ids to docker's replies, empty for a removed image."""
    runs = {name: images.get(item.image) or {} for name, item in running.items()}
    return [
        Row(
            pod.name,
            pod.role,
            readiness[pod.name].ready,
            readiness[pod.name].reason,
            readiness[pod.name].turn.partition(":")[0] or slurm.get(pod.name, "-"),
            running[pod.name].restarts if pod.name in running else 0,
            readiness[pod.name].also,
            image(found).slurm if (found := runs.get(pod.name)) else "",
            image_name(found) if found else "",
            readiness[pod.name].turn,
        )
        for pod in pods
    ]


def shared(shown_rows: Sequence[Row]) -> dict[str, str]:
    """Return what degrades several ready pods alike, with the names of the pods."""
    pods: dict[str, list[str]] = {}
    for row in filter(lambda row: row.ready, shown_rows):
        for text in dict.fromkeys(row.also):
            pods.setdefault(text, []).append(row.pod)
    return {text: _in_short(names, len(shown_rows)) for text, names in pods.items() if len(names) > 1}


def _in_short(names: Sequence[str], total: int) -> str:
    if len(names) == total:
        return "all pods"
    return ", ".join(names[:NAMED]) + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")


def table(shown_rows: Sequence[Row], *, width: int = 160) -> list[str]:
    """Format aligned columns; text that does not fit goes below its pod, and what several pods share to the end."""
    once = shared(shown_rows)
    cells = [HEADINGS] + [
        (row.pod, row.role, "yes" if row.ready else "NO", row.slurm, row.version, row.image, str(row.restarts), "")
        for row in shown_rows
    ]
    widths = [max(len(line[column]) for line in cells) for column in range(len(HEADINGS))]
    heads = ["  ".join(cell.ljust(size) for cell, size in zip(line, widths, strict=True)) for line in cells]
    lines = [heads[0].rstrip()]
    for head, row in zip(heads[1:], shown_rows, strict=True):
        # The reasons of a booting pod include these already.
        problems = [f"degraded: {text}" for text in row.also if text not in once] if row.ready else row.why.splitlines()
        first, *rest = problems or [""]
        lines.append((head.rstrip().ljust(sum(widths[:-1]) + 2 * len(widths[:-1])) + first).rstrip())
        lines += [f"    {text}" for text in rest]
    lines += [f"{pods}: degraded: {text}" for text, pods in once.items()]
    lines += [f"{row.pod}: {row.turn}" for row in shown_rows if ": " in row.turn]
    return [line if len(line) <= width else f"{line[: width - 4]} ..." for line in lines]


def slurm_states(sinfo: str) -> dict[str, str]:
    """Parse `sinfo -h -N -o '%N|%T|%E'`; a node appears once per partition."""
    states = {}
    for line in sinfo.splitlines():
        name, state, reason = [*line.split("|", 2), "", ""][:3]
        if name:
            states[name] = state + (f" ({reason})" if reason not in ("", "none") else "")
    return states


def not_granted(pods: Iterable[PodSpec], *, cgroups: str, security: Sequence[str]) -> list[str]:
    """List what the chart provides on Kubernetes and this machine does not.

    `cgroups`: why pods have none of their own; `security`: the engine's options, such as
    `name=seccomp,profile=default`.
    """
    missing = []
    if not any(option.startswith("name=seccomp") and "unconfined" not in option for option in security):
        missing.append("seccomp: this engine was built or started without it, so pods may use every system call")
    if cgroups:
        missing.append(
            f"cgroups that a pod may write to: {cgroups}. So jobs are tracked but not held to their share, ssh to a"
            " worker is not adopted into a job, and people on the login pod have ulimits and no common limit"
        )
    for pod in pods:
        for device, count in pod.limits.devices:
            missing.append(f"{pod.name}: {count} x {device} (no device plugin here)")
        if pod.host_network:
            missing.append(f"{pod.name}: the host's network")
    return missing


@dataclass
class Stages:
    """Time spent per stage of a run, in order."""

    clock: Callable[[], float]
    spent: dict[str, float] = field(default_factory=dict)

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        begun = self.clock()
        try:
            yield
        finally:
            self.spent[name] = self.spent.get(name, 0.0) + self.clock() - begun
