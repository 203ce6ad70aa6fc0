"""Reports of pods about themselves: their page `/conditions`, deep checks, and which controller acts.

Root in a pod can show anything on its page. So only these four types count, in a form and length that Kubernetes
accepts; any other page counts as no answer.

Each controller pod says in the message of `minivm.io/Ready` whether it acts or stands by (init/view/conditions.py). The
condition of a dead machine's pod is old: of two controllers that act, the fleet shows the one of the higher term. No
decision reads that.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from fleet import FleetError, crd
from fleet.world.fields import Fields
from fleet.world.kubernetes import CONTROLLER, KubeCondition, KubePod, KubernetesView, is_true
from fleet.world.snapshot import Worker
from ground.errors import one_line

# The deep check of a machine since its boot, as its workers report it: it decides whether a reboot has helped.
#
# A report counts only for the boot that it names, so a report of the remedy's boot is newer than the remedy,
# independently of clocks. Root in a pod can forge it, as root can write any verdict into Slurm.
CONDITION = "minivm.io/DeepCheck"
# "BOOT NUMBER-OF-CHECKS TEXT": init/helpers/conditions.py writes it.
_MESSAGE = re.compile(r"(\S{1,64}) ([0-9]{1,4})(?: (.*))?", re.DOTALL)
ASK = "minivm health --run --when deep"


@dataclass(frozen=True, slots=True)
class DeepResult:
    passed: bool | None  # None: not known
    text: str


def deep_result(workers: Sequence[Worker], boot: str, gpus: Sequence[str] = ()) -> DeepResult:
    """Combine the reports of all workers on a machine; the worst counts.

    `gpus`: the machine's known GPUs. If it has some, a report of zero checks proves nothing.
    """
    if not workers:
        return DeepResult(None, "waits for a worker that runs its deep checks")
    order = (False, None, True)
    results = (_worker_result(worker, boot, bool(gpus)) for worker in workers)
    return min(results, key=lambda result: order.index(result.passed))


def _worker_result(worker: Worker, boot: str, has_gpus: bool) -> DeepResult:
    condition = worker.pod.conditions.get(CONDITION)
    parts = _MESSAGE.fullmatch(condition.message) if condition else None
    if condition is None or parts is None or not boot or parts[1] != boot:
        return DeepResult(
            None, f"{worker.name} has reported no deep check since: run `{ASK}` in its pod, or set the goal up"
        )
    text = one_line(parts[3] or "")[: crd.TEXT].strip()
    match condition.status:
        case "True" if has_gpus and not int(parts[2]):
            return DeepResult(None, f"{worker.name} has checked nothing deeply, although the machine has GPUs")
        case "True":
            return DeepResult(True, text)
        case "False":
            return DeepResult(False, text)
    return DeepResult(
        None, f"the deep check of {worker.name} has no result: {one_line(condition.reason)[:32]} {text}".strip()
    )


READY = "minivm.io/Ready"
GPUS = "minivm.io/Gpus"
ACTIVE_CHECKS = "minivm.io/ActiveChecks"
TYPES = (READY, GPUS, CONDITION, ACTIVE_CHECKS)
STATUSES = ("True", "False", "Unknown")
MOST_BYTES = 65536
# 64 UUIDs of GPUs are 2.6 KB.
MESSAGE = 4096
# What the API server takes as a condition's reason.
_REASON = re.compile(r"[A-Za-z]([A-Za-z0-9_,:]{0,62}[A-Za-z0-9_])?")


def parse_page(body: bytes, pod: str) -> tuple[KubeCondition, ...]:
    """Parse the page of this pod; raise FleetError for another pod's page, such as a new pod at the same address."""
    try:
        fields = Fields(json.loads(body), "the page /conditions")
    except (ValueError, RecursionError) as error:
        raise FleetError("read the page /conditions", f"it is no JSON: {type(error).__name__}") from None
    if (name := fields.text("pod")) != pod:
        fields.fail("pod", f"it is of {one_line(name)[:64]!r}")
    conditions = tuple(_condition(item) for item in fields.subs("conditions"))
    if [condition.type for condition in conditions] != [
        type_ for type_ in TYPES if any(condition.type == type_ for condition in conditions)
    ]:
        fields.fail("conditions", f"wanted at most one of each of {', '.join(TYPES)}, in this order")
    return conditions


def _condition(item: Fields) -> KubeCondition:
    status, reason = item.text("status", needed=True), item.text("reason", needed=True)
    if status not in STATUSES:
        item.fail("status", f"wanted one of {', '.join(STATUSES)}")
    if not _REASON.fullmatch(reason):
        item.fail("reason", "wanted a word")
    return KubeCondition(item.text("type", needed=True), status, reason, one_line(item.text("message"))[:MESSAGE])


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
    pods = [pod for _, pod in sorted(kubernetes.others.items()) if pod.component == CONTROLLER]
    reports = [_controller(pod) for pod in pods]
    newest = max((report.term for report in reports), default=0)
    return [
        ControllerPod(report.pod) if report.role == ACTIVE and report.term < newest else report for report in reports
    ]


def _controller(pod: KubePod) -> ControllerPod:
    condition = pod.conditions.get(READY)
    if condition is None or not is_true(condition) or pod.ended:
        return ControllerPod(pod)
    if match := _ACTIVE.match(condition.message):
        takeover = LastTakeover(match[2], match[3], float(match[4]), match[5]) if match[2] else None
        return ControllerPod(pod, ACTIVE, int(match[1]), takeover)
    if match := _STANDBY.match(condition.message):
        return ControllerPod(pod, STANDBY, waits_for=match[1])
    return ControllerPod(pod)
