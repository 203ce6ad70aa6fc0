"""What the deep checks of this boot have said, as a condition of the pod: by it the fleet takes a machine back after a
reboot (docs/fleet.md). The health service keeps it in a file; of another boot, or of another form, nothing is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ground.errors import one_line
from ground.files import read_plain

TYPE = "minivm.io/DeepCheck"
FILE = Path("/run/minivm/health/deep/said.json")
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
MOST, SAID, CHECKS = 65536, 240, 9999
# The file's words -> status and reason.
STATES = {
    "ok": ("True", "Passed"),
    "problem": ("False", "Failed"),
    "unknown": ("Unknown", "Unknown"),
    "running": ("Unknown", "Running"),
}


def read(file: Path = FILE) -> dict[str, Any]:
    try:
        found = json.loads(read_plain(file, MOST) or b"{}")
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def condition(found: dict[str, Any], boot: str) -> dict[str, Any] | None:
    """But for its time. The message begins with the boot, for the pod may have been there before it, and with how many
    checks of GPUs have run."""
    ran = found.get("ran")
    status, reason = STATES.get(str(found.get("state")), ("", ""))
    if not boot or found.get("boot_id") != boot or not status or type(ran) is not int or not 0 <= ran <= CHECKS:
        return None
    message = f"{boot} {ran} {one_line(str(found.get('said', '')))[:SAID]}".strip()
    return {"type": TYPE, "status": status, "reason": reason, "message": message}
