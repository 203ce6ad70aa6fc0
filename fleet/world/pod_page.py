"""Parse the conditions of a pod's page `/conditions`, its deep check among them; they go into the pod's status.

Root in a pod can show anything on its page. So only these three types count, in a form and length that Kubernetes
accepts; any other page counts as no answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from fleet import crd
from fleet.errors import FleetError
from fleet.world.fields import Fields
from fleet.world.kubernetes import KubeCondition
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
        return DeepResult(None, "waits for a worker that checks it deeply")
    order = (False, None, True)
    results = (_worker_result(worker, boot, bool(gpus)) for worker in workers)
    return min(results, key=lambda result: order.index(result.passed))


def _worker_result(worker: Worker, boot: str, has_gpus: bool) -> DeepResult:
    condition = worker.pod.conditions.get(CONDITION)
    parts = _MESSAGE.fullmatch(condition.message) if condition else None
    if condition is None or parts is None or not boot or parts[1] != boot:
        return DeepResult(None, f"{worker.name} has reported no deep check since: {ASK} there, or goal up")
    text = one_line(parts[3] or "")[: crd.TEXT].strip()
    match condition.status:
        case "True" if has_gpus and not int(parts[2]):
            return DeepResult(None, f"{worker.name} has checked nothing deeply, and it has GPUs")
        case "True":
            return DeepResult(True, text)
        case "False":
            return DeepResult(False, text)
    return DeepResult(None, f"{worker.name} does not know: {one_line(condition.reason)[:32]} {text}".strip())


READY = "minivm.io/Ready"
GPUS = "minivm.io/Gpus"
TYPES = (READY, GPUS, CONDITION)
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
