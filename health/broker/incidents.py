"""GPU incidents: each new problem is one, and a GPU with too many is out for good. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from health.broker.decide import Seen
from health.broker.inputs import Gpu
from health.policy import BrokerPolicy

DAY_S = 86400.0


@dataclass(frozen=True, slots=True)
class Enter:
    """Request to enter an incident into a GPU's file of the ledger; the answer is the number of incidents."""

    check: str
    uuid: str
    event: Mapping[str, object]
    since: float
    most: int
    serial: str = ""
    model: str = ""


def entry(
    check: str, seen: Seen, evidence: str, node: str, gpus: tuple[Gpu, ...], policy: BrokerPolicy, now: float
) -> Enter | None:
    """Build the request; None if the problem concerns no GPU or has class user."""
    gpu = next((item for item in gpus if item.is_called(seen.subject)), None)
    uuid = gpu.uuid if gpu else seen.subject if seen.subject.startswith("GPU-") else ""
    if not uuid or seen.class_ == "user":
        return None
    event = {
        "at": now,
        "check": check,
        "class": seen.class_,
        "reason": seen.reason,
        "node": node,
        "evidence": evidence,
    }
    serial, model = (gpu.serial, gpu.model) if gpu else ("", "")
    since = now - policy.offender_days * DAY_S
    return Enter(check, uuid, event, since, policy.offender_incidents, serial, model)


def judged(seen: Seen, entered: Enter, count: int) -> Seen:
    """Return the problem, with class rma if its GPU has had too many incidents."""
    if count < entered.most:
        return seen
    return replace(seen, class_="rma", reason=f"{seen.reason} (incident {count} of {entered.uuid})")
