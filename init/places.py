"""Paths and names that several parts of init use. Text, because PID 1 goes without pathlib."""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

PLAN = "/etc/minivm/plan.json"
SOCKET = "/run/minivm/control.sock"
REFUSED = "refused: "  # a line of the drop-ins' reader about a file that it left out


def pod_name(env: Mapping[str, str]) -> str:
    """As Kubernetes says, or the host's name, which is the same but for a domain."""
    return env.get("MINIVM_POD_NAME") or os.uname().nodename.split(".")[0]
