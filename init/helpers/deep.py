"""Result of this boot's deep checks, as a condition of the pod: by it the fleet takes a machine back after a reboot.

See docs/fleet.md. The health service writes the file; nothing is reported from another boot, or in another form.
"""

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
# States in the file -> status and reason.
STATES = {
    "ok": ("True", "Passed"),
    "problem": ("False", "Failed"),
    "unknown": ("Unknown", "Unknown"),
    "running": ("Unknown", "Running"),
}


def read(file: Path = FILE) -> dict[str, Any]:
    try:
        data = json.loads(read_plain(file, MOST) or b"{}")
    except (ValueError, RecursionError):
        return {}
    return data if isinstance(data, dict) else {}


def condition(data: dict[str, Any], boot: str) -> dict[str, Any] | None:
    """Build the condition without its time.

    The message starts with the boot, since the pod may have existed before it, and with the number of GPU checks that
    ran.
    """
    ran = data.get("ran")
    status, reason = STATES.get(str(data.get("state")), ("", ""))
    if not boot or data.get("boot_id") != boot or not status or type(ran) is not int or not 0 <= ran <= CHECKS:
        return None
    message = f"{boot} {ran} {one_line(str(data.get('said', '')))[:SAID]}".strip()
    return {"type": TYPE, "status": status, "reason": reason, "message": message}
