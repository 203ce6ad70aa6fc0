"""UnkillableStepProgram: tell the broker of a step that Slurm could not kill, right before slurmstepd drains the node.

slurmstepd gives it SLURM_JOB_ID and waits for its end. Its drain replaces the reason of an earlier drain, so the broker
must learn now how the node stands.
"""

from __future__ import annotations

import os

from health.ask import ask_broker
from init.fields import number

WAIT_S = 30.0  # the broker asks slurmctld meanwhile


def main() -> int:
    job = number(os.environ.get("SLURM_JOB_ID", ""))
    if job is None:
        print("no SLURM_JOB_ID: slurmstepd runs this as UnkillableStepProgram")
        return 1
    return 0 if ask_broker({"ask": "unkillable", "job": job}, WAIT_S) is not None else 1


if __name__ == "__main__":
    raise SystemExit(main())
