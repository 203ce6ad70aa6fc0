"""The pod's conditions in Kubernetes: readiness with reasons, its GPUs, the results of deep and active checks.

The service `conditions` patches them into the pod's status. Where the fleet runs, it reads the page `/conditions` and
writes them: then no pod has a token (docs/decisions/fleet-writes-pod-conditions.md).
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

from ground.errors import one_line
from ground.files import read_plain
from init.view import reasons

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from typing import Any

    from init.engine.engine import Engine

TYPE = "minivm.io/Ready"
# Kubernetes' limit for a message is 32 KiB; a person reads less.
MESSAGE = 1024


def ready_condition(reply: Mapping[str, Any]) -> dict[str, Any]:
    """Build the condition, without its time, from PID 1's reply to `watch`."""
    ready = bool(reply["ready"])
    texts = [str(reason) for reason in reply["reasons"] or reply["degraded"]]
    reason = "Ready" if ready and not texts else "Degraded" if ready else str(reply["phase"]).capitalize()
    # The place of a controller among several comes first, since the rest may be cut off.
    text = "; ".join([*filter(None, [str(reply.get("turn", "")) if ready else ""]), *texts])
    message = text if len(text) <= MESSAGE else f"{text[: MESSAGE - 3]}..."
    return {"type": TYPE, "status": "True" if ready else "False", "reason": reason, "message": message}


# Result of this boot's deep checks: by it the fleet takes a machine back after a reboot. See docs/fleet.md. The health
# service writes the file; nothing is reported from another boot, or in another form.
DEEP_TYPE = "minivm.io/DeepCheck"
DEEP_NAME = "health/deep/said.json"
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
MOST_BYTES, SAID, CHECKS = 65536, 240, 9999
# States in the file -> status and reason.
DEEP_STATES = {
    "ok": ("True", "Passed"),
    "problem": ("False", "Failed"),
    "unknown": ("Unknown", "Unknown"),
    "running": ("Unknown", "Running"),
}


def read_results(file: Path) -> dict[str, Any]:
    """Read a file of the health service; empty if it is absent, no plain file, too long or no JSON object."""
    try:
        data = json.loads(read_plain(file, MOST_BYTES) or b"{}")
    except (ValueError, RecursionError):
        return {}
    return data if isinstance(data, dict) else {}


def deep_condition(data: dict[str, Any], boot: str) -> dict[str, Any] | None:
    """Build the condition without its time.

    The message starts with the boot, since the pod may have existed before it, and with the number of GPU checks that
    ran.
    """
    ran = data.get("ran")
    status, reason = DEEP_STATES.get(str(data.get("state")), ("", ""))
    if not boot or data.get("boot_id") != boot or not status or type(ran) is not int or not 0 <= ran <= CHECKS:
        return None
    message = f"{boot} {ran} {one_line(str(data.get('said', '')))[:SAID]}".strip()
    return {"type": DEEP_TYPE, "status": status, "reason": reason, "message": message}


# Last result of each active check on this node: the fleet keeps them with the machine. The health service writes the
# file: check -> [time, if it passed].
ACTIVE_TYPE = "minivm.io/ActiveChecks"
ACTIVE_NAME = "health/active/said.json"
ACTIVE_CHECK = re.compile(r"[A-Za-z0-9_.-]{1,64}")
MOST_ACTIVE, LATEST = 16, 10**11


def active_condition(data: Mapping[str, Any]) -> dict[str, Any] | None:
    """Build the condition without its time; None without a result. The message has "CHECK passed|failed TIME; ..."."""
    results = [
        (name, at, passed)
        for name, (at, passed) in sorted((name, item) for name, item in data.items() if _is_pair(item))
        if ACTIVE_CHECK.fullmatch(name) and type(at) is int and 0 < at < LATEST and type(passed) is bool
    ][:MOST_ACTIVE]
    if not results:
        return None
    passed = all(passed for _, _, passed in results)
    message = "; ".join(f"{name} {'passed' if passed else 'failed'} {at}" for name, at, passed in results)
    status, reason = ("True", "Passed") if passed else ("False", "Failed")
    return {"type": ACTIVE_TYPE, "status": status, "reason": reason, "message": message}


def _is_pair(item: object) -> bool:
    return isinstance(item, list) and len(item) == 2


# The pod's GPUs by UUID: the fleet identifies a machine by them (docs/fleet.md). The service `gpus` writes the file,
# one UUID a line.
GPU_TYPE = "minivm.io/Gpus"
GPU_NAME = "gpus"


def gpu_condition(ids: Iterable[str]) -> dict[str, Any]:
    return {"type": GPU_TYPE, "status": "True", "reason": "Known", "message": " ".join(ids)}


def read_conditions(engine: Engine, now: float, run: str) -> list[dict[str, Any]]:
    """Return the conditions for the page `/conditions`. The page is public, so it quotes no service."""
    causes = reasons.pod_reasons(engine, now, quoting=False)
    degraded = reasons.list_degradations(engine, now, quoting=False)
    turn, phase = reasons.role_among_pods(engine, quoting=False), engine.phase.value
    reply = {"ready": not causes, "phase": phase, "reasons": causes, "degraded": degraded, "turn": turn}
    conditions = [ready_condition(reply)]
    directory = Path(run)
    if ids := (read_plain(directory / GPU_NAME, MOST_BYTES) or b"").decode("ascii", "replace").split():
        conditions.append(gpu_condition(ids))
    if (data := read_results(directory / DEEP_NAME)) and (deep := deep_condition(data, read_boot())):
        conditions.append(deep)
    if active := active_condition(read_results(directory / ACTIVE_NAME)):
        conditions.append(active)
    return conditions


def read_boot(file: Path = BOOT_ID) -> str:
    return os.fsdecode(file.read_bytes()).strip()
