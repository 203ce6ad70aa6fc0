"""Reports about a cluster: its pods' readiness, a row for each pod, what this machine lacks, and time per stage."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cluster import ClusterError
from cluster.manifests import PodSpec
from cluster.pods import CORRECT, RunningPod
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
    # Of the image that the pod runs, even if the image's name now refers to a newer one.
    version: str = ""
    image: str = ""
    # The pod's place among several controllers, in full.
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
            image(inspected).slurm if (inspected := runs.get(pod.name)) else "",
            image_name(inspected) if inspected else "",
            readiness[pod.name].turn,
        )
        for pod in pods
    ]


def find_shared(shown_rows: Sequence[Row]) -> dict[str, str]:
    """Return each problem that several ready pods share, with the names of these pods."""
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
    once = find_shared(shown_rows)
    cells = [HEADINGS] + [
        (row.pod, row.role, "yes" if row.ready else "NO", row.slurm, row.version, row.image, str(row.restarts), "")
        for row in shown_rows
    ]
    widths = [max(len(line[column]) for line in cells) for column in range(len(HEADINGS))]
    heads = ["  ".join(cell.ljust(size) for cell, size in zip(line, widths, strict=True)) for line in cells]
    lines = [heads[0].rstrip()]
    for head, row in zip(heads[1:], shown_rows, strict=True):
        # The reasons of an unready pod already include these.
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


QUIET_S = 10.0  # a person takes a step that is silent for longer for a hung one


@contextlib.contextmanager
def progress(log: Callable[[str], None], describe: Callable[[], str]) -> Iterator[None]:
    """Log what a long step waits for, every QUIET_S until it ends."""
    over = threading.Event()

    def tell() -> None:
        while not over.wait(QUIET_S):
            log(describe())

    teller = threading.Thread(target=tell, daemon=True)
    teller.start()
    try:
        yield
    finally:
        over.set()
        teller.join()


READ_WITHIN_S = 2.0
STATUS = "/status"
PORT = 8650  # of /status in a controller's pod
# Consecutive failures of /livez before a pod is restarted, as in the chart's probe.
DEAD_AFTER = 3
NO_START = "slurm.conf: slurmctld does not start with it"
WRONG_CONFIGURATION = 78  # docs/reference/exit-codes.md


@dataclass(frozen=True, slots=True)
class Readiness:
    ready: bool
    reason: str = ""
    # Problems that do not make the pod unready.
    also: tuple[str, ...] = ()
    # The pod's place among several controllers: "active, term 3", "standby: ...".
    turn: str = ""


def read_readiness(pod: PodSpec, running: RunningPod | None) -> Readiness:
    """Read a pod's readiness, and the reason if it is not ready."""
    if running is None:
        return Readiness(False, "no such pod: deleted, or never started")
    if not running.running:
        cause = f": {running.last_words}" if running.last_words else ""
        # Docker restarts a container that ended, as a kubelet does, but not one that a person stopped.
        then = "docker starts it again" if running.restarting else "`make up` starts it again"
        return Readiness(False, f"exited {running.exit_code}, {then}{cause}")
    try:
        code, text = _get(running.address, pod.ready.port, pod.ready.path)
    except (OSError, http.client.HTTPException) as error:
        return Readiness(False, f"port {pod.ready.port} does not answer: {error}")
    return Readiness(code == 200, "" if code == 200 else text.strip())


def read_status(pod: PodSpec, running: RunningPod | None) -> Readiness:
    """Read a pod's readiness, its other problems, and its turn."""
    answer = read_readiness(pod, running)
    if running is None or not running.running:
        return answer
    try:
        code, text = _get(running.address, pod.ready.port, STATUS)
        status = json.loads(text) if code == 200 else {}
    except (OSError, http.client.HTTPException, ValueError):
        return answer
    return Readiness(answer.ready, answer.reason, problems(status), str(status.get("turn", "")))


def read_turn(running: RunningPod) -> str:
    """Read a controller's place among several: "active, term 3", "standby: ..."; "" if it reports none."""
    try:
        code, text = _get(running.address, PORT, STATUS)
        return str(json.loads(text).get("turn", "")) if code == 200 else ""
    except (OSError, http.client.HTTPException, ValueError):
        return ""


def refuse_hopeless(pod: PodSpec, running: RunningPod | None) -> None:
    """Raise ClusterError for a pod that cannot become ready, so that `up` does not wait for it.

    Its PID 1 refuses its settings, or slurmctld does not start with the controller's slurm.conf.
    """
    if running is not None and not running.running and running.exit_code == WRONG_CONFIGURATION and running.last_words:
        raise ClusterError(f"bring {pod.name} up", running.last_words, hint=CORRECT)
    if pod.role != "controller" or running is None or not running.running:
        return
    cause = next((text for text in read_status(pod, running).also if text.startswith(NO_START)), "")
    if cause:
        raise ClusterError("bring the cluster up", cause, hint=CORRECT)


def is_dead(pod: PodSpec, running: RunningPod) -> bool:
    """Return whether a kubelet would restart this container: its PID 1 hangs, or reports failure.

    A closed port means that the pod still starts: on Kubernetes the startup probe handles that.
    """
    return running.running and all(_fails(pod, running) for _ in range(DEAD_AFTER))


def _fails(pod: PodSpec, running: RunningPod) -> bool:
    try:
        code, _ = _get(running.address, pod.alive.port, pod.alive.path)
    except ConnectionRefusedError:
        return False
    except (OSError, http.client.HTTPException):
        return True
    return code >= 400


def problems(status: dict[str, Any]) -> tuple[str, ...]:
    """Return the pod's degraded reasons and its services that a person stopped."""
    stopped = [str(service["name"]) for service in status.get("services", ()) if service["state"] == "stopped"]
    also = [str(reason) for reason in status.get("degraded", ())]
    requested_stops = [f"{name}: stopped on request" for name in stopped]
    # A dependant's reason may contain it; a reason that only names the service does not.
    return tuple(also + [text for text in requested_stops if not any(text in other for other in also)])


def _get(host: str, port: int, path: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection(host, port, timeout=READ_WITHIN_S)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read(1 << 20).decode(errors="replace")
    finally:
        connection.close()
