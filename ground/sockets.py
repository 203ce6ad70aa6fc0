"""A word over a unix socket: to whoever started this process, and one question, one JSON line of answer."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path

LONGEST = 1 << 20


def notify(text: str) -> None:
    """One datagram to whoever started this process (sd_notify), where there is such a one."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if address:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.sendto(text.encode(), f"\0{address[1:]}" if address.startswith("@") else address)


def ask(path: Path, request: Mapping[str, object], within: float) -> Mapping[str, object] | None:
    """None where nobody answers in time, or not with a mapping."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as client:
            client.settimeout(within)
            client.connect(str(path))
            client.sendall(json.dumps(request).encode() + b"\n")
            answer = json.loads(read_line(client, within))
    except (OSError, ValueError, RecursionError):
        return None
    return answer if isinstance(answer, dict) else None


def read_line(source: socket.socket, within: float, longest: int = LONGEST) -> bytes:
    """What comes up to the end of a line, of the stream, or of the time, which is a TimeoutError."""
    text, deadline = b"", time.monotonic() + within
    while not text.endswith(b"\n") and len(text) < longest:
        source.settimeout(max(0.001, deadline - time.monotonic()))
        chunk = source.recv(65536)
        if not chunk:
            break
        text += chunk
    return text
