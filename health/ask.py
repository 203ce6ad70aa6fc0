"""A question to the broker, which alone speaks to Slurm about this node."""

from __future__ import annotations

from collections.abc import Mapping

from health.places import Places


def ask_broker(request: Mapping[str, object], wait_s: float) -> Mapping[str, object] | None:
    """One question, one line of answer; None where the broker does not answer in time."""
    from ground.sockets import ask  # a healthy node's prolog asks nobody, and does not pay for this import

    path = Places.from_environment().broker
    return ask(path, request, wait_s)
