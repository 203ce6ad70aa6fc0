"""List the engine's images over its socket without docker's library, whose import is half of a no-op build.

If the engine is remote or answers differently, this module returns nothing, and the library asks or explains.
"""

from __future__ import annotations

import json
import os
import socket
from dataclasses import dataclass
from typing import Any

from images.host import HostError, chosen_engine

DEADLINE = 600.0  # the same as docker's library: a busy engine is slow


@dataclass(frozen=True, slots=True)
class Present:
    """One image that the engine has."""

    id: str
    size: int
    references: tuple[str, ...]


def images() -> list[Present] | None:
    return presents(asked("/images/json"))


def presents(answer: Any) -> list[Present] | None:
    """Parse the engine's list of images; None if it is not one."""
    if not isinstance(answer, list):
        return None
    parsed = [present(item) for item in answer if isinstance(item, dict)]
    whole = [image for image in parsed if image is not None]
    return whole if len(whole) == len(answer) else None


def present(item: dict[str, Any]) -> Present | None:
    image_id, size, names = item.get("Id"), item.get("Size"), item.get("RepoTags") or []
    if not (isinstance(image_id, str) and isinstance(size, int) and isinstance(names, list)):
        return None
    return Present(image_id, size, tuple(map(str, names)))


def arch() -> str:
    version = asked("/version")
    arch_name = version.get("Arch") if isinstance(version, dict) else None
    return arch_name if isinstance(arch_name, str) else ""


def asked(path: str) -> Any:
    """Return the engine's reply to a GET; None if it is not JSON, or not reached over a local socket."""
    try:
        where, _ = chosen_engine(os.environ)
        if not where.startswith("unix://"):
            return None
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(DEADLINE)
            connection.connect(where.removeprefix("unix://"))
            # HTTP/1.0: the engine closes the connection at the end of its reply.
            connection.sendall(f"GET {path} HTTP/1.0\r\nHost: engine\r\n\r\n".encode())
            answer = b"".join(iter(lambda: connection.recv(1 << 16), b""))
        head, _, body = answer.partition(b"\r\n\r\n")
        return json.loads(body) if head.split(b" ")[1:2] == [b"200"] else None
    except (HostError, OSError, ValueError, RecursionError):
        return None
