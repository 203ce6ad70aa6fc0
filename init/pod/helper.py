"""Shared parts of PID 1's helpers: a log line, a condition of the pod, a service's view, work as another user."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from init.pod.client import Client
from init.view.snapshot import ServiceView

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

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


def run_as(user: int, group: int, work: Callable[[], object], *, unused: int, within: int = 0) -> None:
    """Run the work as the user and group in a child that this user cannot signal, and wait for it.

    The child is killed after `within` seconds, 0 for never. For a signal the kernel compares the sender with the
    target's real user: that is `unused`, a reserved id as which no process runs. It is not root, whose processes a
    `kill(-1)` would reach.
    """
    child = os.fork()
    if child == 0:
        try:
            signal.alarm(within)
            os.setgroups([])
            os.setresgid(group, group, group)
            os.setresuid(unused, user, unused)
            if os.getresuid() == (unused, user, unused):
                work()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
