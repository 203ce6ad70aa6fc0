"""The deep check of a machine since its boot, as its workers report it: it decides whether a reboot has helped.

A report counts for the boot that it names and no other, so a report after the remedy's boot began after the remedy,
whatever clocks say. Root in a pod can write it, as root can write any verdict into Slurm.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from fleet import crd
from fleet.world.snapshot import Worker
from ground.errors import one_line

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
