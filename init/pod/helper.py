"""How a helper of PID 1 speaks: a line for the log, a condition for the pod, and what one of its services shows."""

from __future__ import annotations

from pathlib import Path

from init.pod.client import Client
from init.view.snapshot import ServiceView


def log(text: str) -> None:
    print(text, flush=True)


def condition(control: Path, name: str, text: str, *, expires: float | None = None) -> None:
    """A sentence of our own beside the pod's; an empty one takes it back."""
    with Client(control) as client:
        client.request("condition", name=name, text=text, expires=expires)


def service(client: Client, name: str) -> ServiceView | None:
    return next((view for view in client.snapshot().services if view.name == name), None)


def last_lines(client: Client, name: str, lines: int = 400) -> list[str]:
    """The last lines of a service."""
    return [str(line) for line in client.request("logs", service=name, lines=lines)["lines"]]
