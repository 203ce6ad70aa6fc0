"""A problem that begins is an incident of its GPU; a GPU that has had too many is out for good."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from health.broker.decide import Seen
from health.broker.inputs import Gpu
from health.ledger import Ledger
from health.policy import BrokerPolicy


def incident(check: str, seen: Seen, now: float, node: str, evidence: str) -> dict[str, object]:
    return {
        "at": now,
        "check": check,
        "class": seen.class_,
        "reason": seen.reason,
        "node": node,
        "evidence": evidence,
    }


def enter(
    ledger: Ledger,
    seen: Seen,
    event: Mapping[str, object],
    gpus: tuple[Gpu, ...],
    policy: BrokerPolicy,
    say: Callable[[str], None],
) -> Seen:
    """Into the GPU's ledger, if it is about one; what stands against the node afterwards."""
    gpu = next((item for item in gpus if item.is_called(seen.subject)), None)
    uuid = gpu.uuid if gpu else seen.subject if seen.subject.startswith("GPU-") else ""
    if not uuid or seen.class_ == "user":
        return seen
    serial, model = (gpu.serial, gpu.model) if gpu else ("", "")
    since, most = float(str(event["at"])) - policy.offender_days * 86400, policy.offender_incidents
    try:
        count = ledger.enter(uuid, event, since, most, serial=serial, model=model)
    except OSError as error:
        say(f"cannot keep the ledger: {error}")
        return seen
    if count < most:
        return seen
    return replace(seen, class_="rma", reason=f"{seen.reason} (incident {count} of {uuid})")
