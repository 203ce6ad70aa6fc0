"""What a machine's deep checks have said since its boot, as its workers tell it: by that a reboot has helped or not.

The word counts for the boot that it names and for no other: of another boot than the one before the remedy it can only
have begun after it, whatever clocks say. Who has root in a pod may write it, as he may write any verdict into Slurm.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from fleet import crd
from fleet.world.snapshot import Worker
from ground.errors import one_line

CONDITION = "minivm.io/DeepCheck"
# "BOOT HOW-MANY WORDS": see init/helpers/deep.py.
_SAID = re.compile(r"(\S{1,64}) ([0-9]{1,4})(?: (.*))?", re.DOTALL)
ASK = "minivm health --run --when deep"


@dataclass(frozen=True, slots=True)
class DeepResult:
    passed: bool | None  # None: nobody can say
    text: str


def deep(workers: Sequence[Worker], boot: str, gpus: Sequence[str] = ()) -> DeepResult:
    """Of all workers there. `gpus`: what the machine had: where nothing of it was checked, nothing has passed."""
    if not workers:
        return DeepResult(None, "waits for a worker that checks it deeply")
    order = (False, None, True)
    return min((_of(one, boot, bool(gpus)) for one in workers), key=lambda one: order.index(one.passed))


def _of(worker: Worker, boot: str, has_gpus: bool) -> DeepResult:
    said = worker.pod.conditions.get(CONDITION)
    parts = _SAID.fullmatch(said.message) if said else None
    if said is None or parts is None or not boot or parts[1] != boot:
        return DeepResult(None, f"{worker.name} has told no deep check since: {ASK} there, or goal up")
    text = one_line(parts[3] or "")[: crd.TEXT].strip()
    match said.status:
        case "True" if has_gpus and not int(parts[2]):
            return DeepResult(None, f"{worker.name} has checked nothing deeply, and it has GPUs")
        case "True":
            return DeepResult(True, text)
        case "False":
            return DeepResult(False, text)
    return DeepResult(None, f"{worker.name} does not know: {one_line(said.reason)[:32]} {text}".strip())
