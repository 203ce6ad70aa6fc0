"""Requests to the broker, the only process that talks to Slurm about this node."""

from __future__ import annotations

from collections.abc import Mapping

from health.places import Places


def ask_broker(request: Mapping[str, object], wait_s: float) -> Mapping[str, object] | None:
    """Send one request and return the one-line answer; None if the broker does not answer in time."""
    from ground.sockets import ask  # imported late: the prolog of a healthy node never asks the broker

    path = Places.from_environment().broker
    return ask(path, request, wait_s)
