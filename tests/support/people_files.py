"""Entries and files of people for tests."""

from __future__ import annotations

import base64
import struct
from typing import Any

import yaml


def body(kind: str, *parts: bytes) -> str:
    data = b"".join(struct.pack(">I", len(part)) + part for part in (kind.encode(), *parts))
    return f"{kind} {base64.b64encode(data).decode()}"


ED = body("ssh-ed25519", b"\2" * 32)
OTHER = body("ssh-ed25519", b"\1" * 32)
RSA = body("ssh-rsa", b"\1\0\1", b"\0" + b"\xff" * 256)
TOKEN = body("sk-ssh-ed25519@openssh.com", b"\2" * 32, b"ssh:")


def people(*users: Any, groups: Any = ({"name": "lab", "gid": 5000},), **more: Any) -> bytes:
    return yaml.safe_dump({"groups": [*groups], "users": [*users], **more}).encode()


def ada(**changes: Any) -> dict[str, Any]:
    return {"name": "ada", "uid": 5001, "group": "lab", "keys": [ED]} | changes
