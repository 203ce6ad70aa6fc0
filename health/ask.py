"""A question to the broker, which alone speaks to Slurm about this node."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping

from health.places import Places


def ask_broker(request: Mapping[str, object], wait_s: float) -> Mapping[str, object] | None:
    """One question, one line of answer; None where the broker does not answer in time."""
    # A healthy node's prolog asks nobody, and does not pay for this import.
    import socket

    path = Places.from_environment().broker
    deadline = time.monotonic() + wait_s
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as client:
            client.settimeout(wait_s)
            client.connect(str(path))
            client.sendall(json.dumps(request).encode() + b"\n")
            text = b""
            while not text.endswith(b"\n"):
                client.settimeout(max(0.001, deadline - time.monotonic()))
                chunk = client.recv(65536)
                if not chunk:
                    return None
                text += chunk
        answer = json.loads(text)
    except (OSError, ValueError):
        return None
    return answer if isinstance(answer, dict) else None
