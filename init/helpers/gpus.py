"""The pod's GPUs by UUID, as a condition of the pod: the fleet identifies a machine by them (docs/fleet.md).

The driver is asked until it answers; its first answer holds while the pod lives, since within one boot no GPU comes or
goes.
"""

from __future__ import annotations

import re
from typing import Any

from init.helpers import links

TYPE_CHECKING = False
if TYPE_CHECKING:
    from init.pod.pod import Pod

TYPE = "minivm.io/Gpus"
MOST = 64
# GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-041a6be2-04b9-910d-91ab-94883a0ad281)
LISTED = re.compile(r"^GPU [0-9]+: .*\(UUID: (GPU-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})\)$", re.MULTILINE)


def present(pod: Pod) -> bool:
    return any(True for _ in pod.path("/dev").glob("nvidia[0-9]*"))


def uuids(pod: Pod) -> tuple[str, ...]:
    """Return the UUIDs in order; none if the driver does not answer."""
    return tuple(sorted(set(LISTED.findall(links.said_of_gpus(pod, "-L"))))[:MOST])


def condition(ids: tuple[str, ...], now: str) -> dict[str, Any]:
    message = " ".join(ids)
    return {"type": TYPE, "status": "True", "reason": "Known", "message": message, "lastTransitionTime": now}
