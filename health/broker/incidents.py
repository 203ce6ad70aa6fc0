"""GPU incidents: each new problem is one, and a GPU with too many is out for good. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from ground.files import read_json
from health.broker.decide import Seen
from health.policy import BrokerPolicy

# The node's GPUs, from the memory of the check that counts them.


@dataclass(frozen=True, slots=True)
class Gpu:
    uuid: str
    serial: str
    bus: str
    model: str

    def is_called(self, subject: str) -> bool:
        """Match a subject by UUID or bus: "00000000:3B:00.0" for nvidia-smi, "0000:3b:00" for the kernel."""
        bus = subject.lower()
        return subject == self.uuid or (len(bus) >= 10 and bus in self.bus.lower())


def read_gpus(memory: Path, boot_id: str) -> tuple[Gpu, ...]:
    """Return the GPUs that answered at the last count."""
    data = read_json(memory)
    if data.get("boot_id") != boot_id or not isinstance(data.get("state"), dict):
        return ()
    listed = data["state"].get("gpus", [])
    if not isinstance(listed, list) or not all(isinstance(item, dict) for item in listed):
        return ()
    return tuple(Gpu(*(str(item.get(key, "")) for key in ("uuid", "serial", "bus", "model"))) for item in listed)


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
