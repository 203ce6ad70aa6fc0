"""The conditions that a pod's page `/conditions` shows, which the fleet writes into the pod's status.

The page is the pod's own word, as the same conditions were when the pod wrote them: root in a pod can show anything. So
only these three types count, in form and length that Kubernetes takes; anything else is no answer.
"""

from __future__ import annotations

import json
import re

from fleet.errors import FleetError
from fleet.world.deep_check import CONDITION as DEEP
from fleet.world.fields import Fields
from fleet.world.kubernetes import KubeCondition
from ground.errors import one_line

READY = "minivm.io/Ready"
GPUS = "minivm.io/Gpus"
TYPES = (READY, GPUS, DEEP)
STATUSES = ("True", "False", "Unknown")
MOST_BYTES = 65536
# 64 UUIDs of GPUs are 2.6 KB.
MESSAGE = 4096
# What the API server takes as a condition's reason.
_REASON = re.compile(r"[A-Za-z]([A-Za-z0-9_,:]{0,62}[A-Za-z0-9_])?")


def parse_page(body: bytes, pod: str) -> tuple[KubeCondition, ...]:
    """Parse the page of this pod; raise FleetError for any other, such as that of a new pod at the same address."""
    try:
        fields = Fields(json.loads(body), "the page /conditions")
    except (ValueError, RecursionError) as error:
        raise FleetError("read the page /conditions", f"it is no JSON: {type(error).__name__}") from None
    if (name := fields.text("pod")) != pod:
        fields.fail("pod", f"it is of {one_line(name)[:64]!r}")
    found = tuple(_condition(item) for item in fields.subs("conditions"))
    if [each.type for each in found] != [type_ for type_ in TYPES if any(each.type == type_ for each in found)]:
        fields.fail("conditions", f"wanted at most one of each of {', '.join(TYPES)}, in this order")
    return found


def _condition(item: Fields) -> KubeCondition:
    status, reason = item.text("status", needed=True), item.text("reason", needed=True)
    if status not in STATUSES:
        item.fail("status", f"wanted one of {', '.join(STATUSES)}")
    if not _REASON.fullmatch(reason):
        item.fail("reason", "wanted a word")
    return KubeCondition(item.text("type", needed=True), status, reason, one_line(item.text("message"))[:MESSAGE])
