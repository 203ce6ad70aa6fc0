"""Paths and names that several parts of init use. Strings, because PID 1 does not load pathlib."""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

PLAN = "/etc/minivm/plan.json"
SOCKET = "/run/minivm/control.sock"
PEOPLE_FILE = "people.yaml"
# A copy newer than the mounted file: a login pod that leaves reads it from the API server.
LATEST_PEOPLE = "/run/minivm/people/latest.yaml"
REFUSED = "refused: "  # prefix of a line by the drop-ins' reader about a file that it ignored


def pod_name(env: Mapping[str, str]) -> str:
    """Return the pod's name from Kubernetes, or the host's name, which is the same without its domain."""
    return env.get("MINIVM_POD_NAME") or os.uname().nodename.split(".")[0]
