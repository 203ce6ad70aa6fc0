"""Requests to the broker, the only process that talks to Slurm about this node.

As a program (`python3 -I -m health.ask`) it is Slurm's UnkillableStepProgram: it tells the broker of a step that Slurm
could not kill, right before slurmstepd drains the node. slurmstepd gives it SLURM_JOB_ID and waits for its end. Its
drain replaces the reason of an earlier drain, so the broker must learn now which reason the node has.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from health.places import Places

UNKILLABLE_WAIT_S = 120.0  # the broker asks slurmctld meanwhile, and again; slurmstepd would wait for 300 s


def ask_broker(request: Mapping[str, object], wait_s: float) -> Mapping[str, object] | None:
    """Send one request and return the one-line answer; None if the broker does not answer in time."""
    from ground.sockets import ask  # imported late: the prolog of a healthy node never asks the broker

    return ask(Places.from_environment().broker, request, wait_s)


def main() -> int:
    from init.fields import number

    job = number(os.environ.get("SLURM_JOB_ID", ""))
    if job is None:
        print("SLURM_JOB_ID is not set; slurmstepd runs this as UnkillableStepProgram")
        return 1
    return 0 if ask_broker({"ask": "unkillable", "job": job, "pid": os.getpid()}, UNKILLABLE_WAIT_S) is not None else 1


if __name__ == "__main__":
    raise SystemExit(main())
