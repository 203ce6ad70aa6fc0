"""Readiness of a pod, from its port as a kubelet asks it, with more detail."""

from __future__ import annotations

import http.client
import json
from dataclasses import dataclass
from typing import Any

from cluster.errors import ClusterError
from cluster.manifests import PodSpec
from cluster.pods import CORRECT, RunningPod

TIMEOUT = 2.0
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
    # What the pod is among several that take turns: "active, term 3", "standby: ...".
    turn: str = ""


def ask(pod: PodSpec, running: RunningPod | None) -> Readiness:
    """Ask the pod: ready, or why not."""
    if running is None:
        return Readiness(False, "no such pod: deleted, or never started")
    if not running.running:
        cause = f": {running.last_words}" if running.last_words else ""
        # Docker restarts what ended, as a kubelet does, and not what a person stopped.
        then = "docker starts it again" if running.restarting else "`make up` starts it again"
        return Readiness(False, f"exited {running.exit_code}, {then}{cause}")
    try:
        code, text = get(running.address, pod.ready.port, pod.ready.path)
    except (OSError, http.client.HTTPException) as error:
        return Readiness(False, f"port {pod.ready.port} does not answer: {error}")
    return Readiness(code == 200, "" if code == 200 else text.strip())


def examine(pod: PodSpec, running: RunningPod | None) -> Readiness:
    """Ask the pod and read its other problems from its status."""
    answer = ask(pod, running)
    if running is None or not running.running:
        return answer
    try:
        code, text = get(running.address, pod.ready.port, STATUS)
        status = json.loads(text) if code == 200 else {}
    except (OSError, http.client.HTTPException, ValueError):
        return answer
    return Readiness(answer.ready, answer.reason, wrong(status), str(status.get("turn", "")))


def turn(running: RunningPod) -> str:
    """Ask a controller what it is among several: "active, term 3", "standby: ..."; "" if it does not say."""
    try:
        code, text = get(running.address, PORT, STATUS)
        return str(json.loads(text).get("turn", "")) if code == 200 else ""
    except (OSError, http.client.HTTPException, ValueError):
        return ""


def hopeless(pod: PodSpec, running: RunningPod | None) -> None:
    """Raise ClusterError for a pod that cannot become ready, so that nobody waits for it.

    Its PID 1 refuses its settings, or slurmctld does not start with the controller's slurm.conf.
    """
    if running is not None and not running.running and running.exit_code == WRONG_CONFIGURATION and running.last_words:
        raise ClusterError(f"bring {pod.name} up", running.last_words, hint=CORRECT)
    if pod.role != "controller" or running is None or not running.running:
        return
    cause = next((text for text in examine(pod, running).also if text.startswith(NO_START)), "")
    if cause:
        raise ClusterError("bring the cluster up", cause, hint=CORRECT)


def dead(pod: PodSpec, running: RunningPod) -> bool:
    """Tell if a kubelet would restart this container: its PID 1 hangs, or reports failure.

    A closed port means that the pod still starts: on Kubernetes the startup probe handles that.
    """
    return running.running and all(fails(pod, running) for _ in range(DEAD_AFTER))


def fails(pod: PodSpec, running: RunningPod) -> bool:
    try:
        code, _ = get(running.address, pod.alive.port, pod.alive.path)
    except ConnectionRefusedError:
        return False
    except (OSError, http.client.HTTPException):
        return True
    return code >= 400


def wrong(status: dict[str, Any]) -> tuple[str, ...]:
    """Return the pod's degraded reasons and its services that a person stopped."""
    stopped = [str(service["name"]) for service in status.get("services", ()) if service["state"] == "stopped"]
    also = [str(reason) for reason in status.get("degraded", ())]
    requested_stops = [f"{name}: stopped on request" for name in stopped]
    # A dependant's reason may contain it; a reason that only names the service does not.
    return tuple(also + [text for text in requested_stops if not any(text in other for other in also)])


def get(host: str, port: int, path: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection(host, port, timeout=TIMEOUT)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read(1 << 20).decode(errors="replace")
    finally:
        connection.close()
