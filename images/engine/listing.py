"""List the engine's images over its socket without docker's library, whose import takes half of a no-op build.

`build.py` asks here first. The answer is None, or "" for the architecture, when the engine is remote, does not answer,
or answers in another form: then the caller uses docker's library (`images.engine.docker`), which explains the problem.
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
class ListedImage:
    """One image that the engine has."""

    id: str
    size: int
    references: tuple[str, ...]


def list_images() -> list[ListedImage] | None:
    """Return the engine's images; None if only docker's library can ask."""
    return parse_images(get_json("/images/json"))


def read_architecture() -> str:
    """Return the engine's architecture; "" if only docker's library can ask."""
    version = get_json("/version")
    architecture = version.get("Arch") if isinstance(version, dict) else None
    return architecture if isinstance(architecture, str) else ""


def parse_images(answer: Any) -> list[ListedImage] | None:
    """Parse the engine's list of images; None if any part of it has another form."""
    if not isinstance(answer, list):
        return None
    images = []
    for item in answer:
        image = parse_image(item)
        if image is None:
            return None
        images.append(image)
    return images


def parse_image(item: Any) -> ListedImage | None:
    if not isinstance(item, dict):
        return None
    image_id, size, references = item.get("Id"), item.get("Size"), item.get("RepoTags") or []
    if not (isinstance(image_id, str) and isinstance(size, int) and isinstance(references, list)):
        return None
    return ListedImage(image_id, size, tuple(map(str, references)))


def get_json(path: str) -> Any:
    """Return the engine's answer to a GET; None if it is no JSON, or the engine has no local socket."""
    try:
        address, _ = chosen_engine(os.environ)
        if not address.startswith("unix://"):
            return None
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(DEADLINE)
            connection.connect(address.removeprefix("unix://"))
            # HTTP/1.0: the engine closes the connection at the end of its answer.
            connection.sendall(f"GET {path} HTTP/1.0\r\nHost: engine\r\n\r\n".encode())
            answer = b"".join(iter(lambda: connection.recv(1 << 16), b""))
        head, _, body = answer.partition(b"\r\n\r\n")
        return json.loads(body) if head.split(b" ")[1:2] == [b"200"] else None
    except (HostError, OSError, ValueError, RecursionError):
        return None
