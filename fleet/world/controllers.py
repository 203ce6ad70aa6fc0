"""The controllers' pods: which one acts, which one stands by, and how the last one took over.

Each says so in the message of its condition `minivm.io/Ready` (init/view/conditions.py). Root in such a pod can write
anything there, so it is for display only. The condition of a dead machine's pod is old: of two that act, the one of the
higher term does.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from fleet.world.kubernetes import CONTROLLER, KubePod, KubernetesView
from fleet.world.pod_page import READY

ACTIVE, STANDBY = "active", "standby"
_ACTIVE = re.compile(
    r"active, term ([0-9]{1,9})"
    r"(?:: (handed over by|took over from) (\S{1,253}) in ([0-9]{1,6}\.[0-9]) s, ([0-9: -]{19} UTC))?(?:; |$)"
)
_STANDBY = re.compile(r"standby: ([^;]{1,200})")


@dataclass(frozen=True, slots=True)
class LastTakeover:
    """Report of the acting controller about the take-over that began its term."""

    how: str  # "handed over by", "took over from"
    former: str
    seconds: float
    at: str

    def text(self) -> str:
        return f"{self.how} {self.former} in {self.seconds:.1f} s, {self.at}"


@dataclass(frozen=True, slots=True)
class ControllerPod:
    pod: KubePod
    role: str = ""  # ACTIVE, STANDBY; "": not known, or the only controller
    term: int = 0
    takeover: LastTakeover | None = None
    waits_for: str = ""  # of a standby

    def text(self) -> str:
        """Return what it is among several controllers, for people."""
        if self.role == ACTIVE:
            return f"active, term {self.term}{f': {self.takeover.text()}' if self.takeover else ''}"
        return f"standby: {self.waits_for}" if self.role == STANDBY else ""


def controllers(kubernetes: KubernetesView) -> list[ControllerPod]:
    """Return the controllers by name; at most one of them acts."""
    found = [_controller(pod) for _, pod in sorted(kubernetes.others.items()) if pod.component == CONTROLLER]
    newest = max((each.term for each in found), default=0)
    return [ControllerPod(each.pod) if each.role == ACTIVE and each.term < newest else each for each in found]


def _controller(pod: KubePod) -> ControllerPod:
    condition = pod.conditions.get(READY)
    if condition is None or condition.status != "True" or pod.ended:
        return ControllerPod(pod)
    if match := _ACTIVE.match(condition.message):
        takeover = LastTakeover(match[2], match[3], float(match[4]), match[5]) if match[2] else None
        return ControllerPod(pod, ACTIVE, int(match[1]), takeover)
    if match := _STANDBY.match(condition.message):
        return ControllerPod(pod, STANDBY, waits_for=match[1])
    return ControllerPod(pod)
