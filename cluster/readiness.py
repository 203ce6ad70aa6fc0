"""A pod's own word: its readiness port asked, as a kubelet asks it."""

from __future__ import annotations

import http.client
from dataclasses import dataclass

from cluster.manifests import Pod
from cluster.pods import Running

TIMEOUT = 2.0


@dataclass(frozen=True, slots=True)
class Readiness:
    ready: bool
    reason: str = ""


def ask(pod: Pod, running: Running | None) -> Readiness:
    if running is None:
        return Readiness(False, "no such pod: deleted, or never started")
    if not running.running:
        return Readiness(False, f"exited {running.exit_code}, will be started again")
    connection = http.client.HTTPConnection(running.address, pod.ready.port, timeout=TIMEOUT)
    try:
        connection.request("GET", pod.ready.path)
        answer = connection.getresponse()
        text = answer.read(4096).decode(errors="replace").strip()
    except (OSError, http.client.HTTPException) as error:
        return Readiness(False, f"port {pod.ready.port} does not answer: {error}")
    finally:
        connection.close()
    return Readiness(answer.status == 200, text)
