"""Unix socket clients: sd_notify to the service manager, and one JSON request with a one-line JSON reply."""

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
    """Send one sd_notify datagram to the service manager; do nothing without $NOTIFY_SOCKET."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if address:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.sendto(text.encode(), f"\0{address[1:]}" if address.startswith("@") else address)


def ask(
    path: Path, request: Mapping[str, object], within: float, longest: int = LONGEST
) -> Mapping[str, object] | None:
    """Send a JSON request and return the reply; None without a reply in time, or when it is not an object."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as client:
            client.settimeout(within)
            client.connect(str(path))
            client.sendall(json.dumps(request).encode() + b"\n")
            answer = json.loads(read_line(client, within, longest))
    except (OSError, ValueError, RecursionError):
        return None
    return answer if isinstance(answer, dict) else None


def read_line(source: socket.socket, within: float, longest: int = LONGEST) -> bytes:
    """Read up to a newline, the end of the stream or `longest` bytes. Raises TimeoutError after `within` seconds."""
    text, deadline = bytearray(), time.monotonic() + within
    while not text.endswith(b"\n") and len(text) < longest:
        source.settimeout(max(0.001, deadline - time.monotonic()))
        chunk = source.recv(65536)
        if not chunk:
            break
        text += chunk
    return bytes(text)
