"""How long a drain may take, and what it says meanwhile: in the log, and in `minivm status` as long as it runs."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from ground.sockets import notify
from init.engine.order import drain_budget, margin
from init.errors import InitError

LEAST, MOST = 1.0, 10.0
ENDING = 0.5  # to say how it went before PID 1 would end it
PROC = Path("/proc")


class Deadline:
    """How much of the budget is left. The clock is monotonic: a pod's wall clock may jump."""

    __slots__ = ("end",)

    def __init__(self, budget: float) -> None:
        self.end = time.monotonic() + budget

    @property
    def left(self) -> float:
        return max(0.0, self.end - time.monotonic())

    def within(self, kept: float = 0.0) -> float:
        """For one question to slurmctld, so that `kept` is left for what follows. Never so little that no answer comes,
        also where the operator leaves a drain no time to wait."""
        return max(LEAST, min(MOST, self.left - kept))

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
    from init.plan.compile import plan_from_json
    from init.pod.client import Client

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


def report(text: str) -> None:
    """For the log, and for `minivm status` as long as the drain lasts."""
    print(text, flush=True)
    notify(f"STATUS={text}")
