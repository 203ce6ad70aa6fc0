"""How a helper of PID 1 speaks: a line for the log, a condition for the pod, and what one of its services shows."""

from __future__ import annotations

from pathlib import Path

from init.pod.client import Client
from init.view.snapshot import ServiceView

FIRST, PROOF = "fresh-node", "cluster-proof"


def log(text: str) -> None:
    print(text, flush=True)


def condition(control: Path, name: str, text: str, *, expires: float | None = None) -> None:
    """A sentence of our own beside the pod's; an empty one takes it back."""
    with Client(control) as client:
        client.request("condition", name=name, text=text, expires=expires)


def service(client: Client, name: str) -> ServiceView | None:
    return next((view for view in client.snapshot().services if view.name == name), None)


def prove_again(control: Path) -> None:
    """The munge key, once more: a proof that fails is tried again by PID 1, with growing delays, until it passes."""
    with Client(control) as client:
        # It speaks to slurmctld before the proof does. Only where it waits for its next try: done, it is done for good.
        before = service(client, FIRST)
        if before is not None and before.state == "backoff":
            client.request("start", service=FIRST, wait=False)
        if service(client, PROOF) is not None:
            client.request("restart", service=PROOF, wait=False)


def last_lines(client: Client, name: str) -> list[str]:
    return [str(line) for line in client.request("logs", service=name, lines=400)["lines"]]
