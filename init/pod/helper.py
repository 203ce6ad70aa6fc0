"""Output of PID 1's helpers: a log line, a condition of the pod, and the view of a service."""

from __future__ import annotations

from pathlib import Path

from init.pod.client import Client
from init.view.snapshot import ServiceView

FIRST, PROOF = "fresh-node", "cluster-proof"


def log(text: str) -> None:
    print(text, flush=True)


def condition(control: Path, name: str, text: str, *, expires: float | None = None) -> None:
    """Set a condition of the pod; an empty text removes it."""
    with Client(control) as client:
        client.request("condition", name=name, text=text, expires=expires)


def service(client: Client, name: str) -> ServiceView | None:
    return next((view for view in client.snapshot().services if view.name == name), None)


def prove_again(control: Path) -> None:
    """Run the proof of the cluster's key again; PID 1 retries a failed proof, with growing delays, until it passes."""
    with Client(control) as client:
        # This service contacts slurmctld before the proof does. Start it only from its backoff: once done, it stays
        # done.
        before = service(client, FIRST)
        if before is not None and before.state == "backoff":
            client.request("start", service=FIRST, wait=False)
        if service(client, PROOF) is not None:
            client.request("restart", service=PROOF, wait=False)


def last_lines(client: Client, name: str) -> list[str]:
    return [str(line) for line in client.request("logs", service=name, lines=400)["lines"]]
