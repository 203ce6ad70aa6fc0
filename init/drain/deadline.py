"""Time limit of a drain, and its progress in the log and in `minivm status`."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from ground.sockets import notify
from init.engine.order import ENDING, REQUEUE, drain_budget, kill_margin, read_wished_drain_time
from init.errors import InitError

LEAST, MOST = 1.0, 10.0
PROC = Path("/proc")


class Deadline:
    """The remaining budget. The clock is monotonic: a pod's wall clock may jump."""

    __slots__ = ("end",)

    def __init__(self, budget: float) -> None:
        self.end = time.monotonic() + budget

    @property
    def left(self) -> float:
        return max(0.0, self.end - time.monotonic())

    def shorten(self, seconds: float) -> None:
        """End `seconds` from now, unless the end is earlier."""
        self.end = min(self.end, time.monotonic() + seconds)

    def within(self, kept: float = 0.0) -> float:
        """Return the time for one request to slurmctld that leaves `kept` for later steps; never too short.

        This holds even if the operator leaves the drain no time to wait.
        """
        return max(LEAST, min(MOST, self.left - kept))

    def pause(self, seconds: float) -> bool:
        """Wait briefly between two looks; False when the budget is spent."""
        time.sleep(min(seconds, self.left))
        return self.left > 0


def budget(env: Mapping[str, str], allowed: Callable[[float], float]) -> float:
    """Return the seconds for the whole drain: PID 1's limit before a stop, or less if the operator configured that.

    A preStop hook calls `minivm drain` before TERM comes, and Kubernetes counts both against the same grace period.
    """
    grace = seconds(env, "MINIVM_GRACE_SECONDS", 30.0)
    most, wished = allowed(grace - kill_margin(grace)), read_wished_drain_time(env)
    if wished is not None and wished > most:
        jobs = max(0.0, most - ENDING - REQUEUE)
        report(f"{env['MINIVM_DRAIN_SECONDS']} s for jobs do not fit into MINIVM_GRACE_SECONDS={grace:g}: {jobs:.0f} s")
    return max(0.0, min(most, most if wished is None else wished) - ENDING)


def compute_budget_of_pid_1(total: float) -> float:
    """Return the budget after which PID 1 would end this child, computed from the running plan as PID 1 does."""
    from init.plan.compile import plan_from_json
    from init.pod.client import Client

    try:
        with Client() as client:
            plan = plan_from_json(json.dumps(client.request("plan")["plan"]), "the plan that runs")
    except (InitError, EOFError):
        return total / 2
    return (
        drain_budget(plan.drain, plan.services, total, read_wished_drain_time(os.environ)) if plan.drain else total / 2
    )


def seconds(env: Mapping[str, str], name: str, default: float) -> float:
    try:
        return max(0.0, float(env.get(name) or default))
    except ValueError:
        return default


def read_status(directory: Path) -> Mapping[str, str]:
    """Read a process's status from /proc/PID."""
    lines = (directory / "status").read_text(errors="replace").splitlines()
    return {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}


def is_own(directory: Path, fits: Callable[[Mapping[str, str]], bool]) -> bool:
    """Tell if a process lives, belongs to this pod itself, not to a container in it, and has a fitting status."""
    with contextlib.suppress(OSError, KeyError):
        status = read_status(directory)
        # One number: not in a nested container.
        return len(status["NSpid"].split()) == 1 and not status["State"].startswith("Z") and fits(status)
    return False


def list_own_processes(fits: Callable[[Mapping[str, str]], bool]) -> list[int]:
    return [int(directory.name) for directory in PROC.glob("[0-9]*") if is_own(directory, fits)]


def report(text: str) -> None:
    """Report progress to the log, and to `minivm status` during the drain."""
    print(text, flush=True)
    notify(f"STATUS={text}")
