"""`python3 -I -m init.drain ROLE [--resume]`: what a role does before its pod stops, run by PID 1 as a child.

It may be asked twice (preStop calls `minivm drain`, then TERM comes) and it may be cut at any moment: every step looks
first and does what is left. What it says is in the log, and in `minivm status` as long as it runs.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from init import slurm_client
from init.errors import InitError
from init.sd_notify import notify
from init.stop import drain_budget, margin

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

ENDING = 0.5  # to say how it went before PID 1 would end it
PROC = Path("/proc")
USAGE = "usage: python3 -I -m init.drain worker|login [--resume]"


class Deadline:
    """How much of the budget is left. The clock is monotonic: a pod's wall clock may jump."""

    __slots__ = ("clock", "end")

    def __init__(self, budget: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.end = clock() + budget

    @property
    def left(self) -> float:
        return max(0.0, self.end - self.clock())

    def pause(self, seconds: float) -> bool:
        """Wait a little between two looks; False when the budget is spent."""
        time.sleep(min(seconds, self.left))
        return self.left > 0


def budget(env: Mapping[str, str], allowed: Callable[[float], float]) -> float:
    """Seconds for the whole drain: what PID 1 allows before a stop, or less where the operator says so.

    A preStop hook calls `minivm drain` before TERM comes, and Kubernetes counts both against the same grace.
    """
    grace = _seconds(env, "MINIVM_GRACE_SECONDS", 30.0)
    most = allowed(grace - margin(grace)) - ENDING
    return max(0.0, min(most, _seconds(env, "MINIVM_DRAIN_SECONDS", most)))


def allowed_by_pid_1(total: float) -> float:
    """The budget after which PID 1 would end this child: the same sum over the plan that runs."""
    from init.client import Client
    from init.plan import plan_from_json

    try:
        with Client() as client:
            plan = plan_from_json(json.dumps(client.request("plan")["plan"]), "the plan that runs")
    except (InitError, EOFError):
        return total / 2
    return drain_budget(plan.drain, plan.services, total) if plan.drain else total / 2


def _seconds(env: Mapping[str, str], name: str, default: float) -> float:
    try:
        return max(0.0, float(env.get(name) or default))
    except ValueError:
        return default


def status_of(directory: Path) -> Mapping[str, str]:
    """What the kernel says of a process, by /proc/PID."""
    lines = (directory / "status").read_text(errors="replace").splitlines()
    return {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}


def say(text: str) -> None:
    """For the log, and for `minivm status` as long as the drain lasts."""
    print(text, flush=True)
    notify(f"STATUS={text}")


def main(arguments: Sequence[str]) -> int:
    # The controller has none: slurmctld saves its state when it is stopped, and jobs run on without it.
    roles = {"worker": "init.drain_worker", "login": "init.drain_login"}
    if not arguments or arguments[0] not in roles or arguments[1:] not in ([], ["--resume"]):
        print(USAGE, file=sys.stderr)
        return 2
    import importlib

    module = importlib.import_module(roles[arguments[0]])
    deadline = Deadline(budget(os.environ, allowed_by_pid_1))
    controller = slurm_client.address(os.environ)
    try:
        if arguments[1:]:
            module.resume(controller)
        else:
            module.drain(controller, deadline)
    except InitError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
