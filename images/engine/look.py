"""What the engine has, asked at its socket by hand: to import docker's library is half of a build with nothing to do.

Where the engine is elsewhere, or does not answer like this, nothing is known here: the library asks, or says why not.
"""

from __future__ import annotations

import json
import os
import socket
from dataclasses import dataclass
from typing import Any

from images.host import HostError, chosen_engine

DEADLINE = 600.0  # as the library has it: a busy engine is slow


@dataclass(frozen=True, slots=True)
class Present:
    """One image that the engine has."""

    id: str
    size: int
    references: tuple[str, ...]


def images() -> list[Present] | None:
    listed = asked("/images/json")
    return None if listed is None else [present(item) for item in listed]


def present(item: Any) -> Present:
    return Present(item["Id"], item["Size"], tuple(item.get("RepoTags") or ()))


def arch() -> str:
    return str((asked("/version") or {}).get("Arch", ""))


def asked(path: str) -> Any:
    """The engine's answer to GET."""
    try:
        where, _ = chosen_engine(os.environ)
        if not where.startswith("unix://"):
            return None
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(DEADLINE)
            connection.connect(where.removeprefix("unix://"))
            # In HTTP's first version an answer ends with the connection.
            connection.sendall(f"GET {path} HTTP/1.0\r\nHost: engine\r\n\r\n".encode())
            answer = b"".join(iter(lambda: connection.recv(1 << 16), b""))
        head, _, body = answer.partition(b"\r\n\r\n")
        return json.loads(body) if head.split(b" ")[1:2] == [b"200"] else None
    except (HostError, OSError, ValueError):
        return None
