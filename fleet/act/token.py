"""A token for slurmrestd, made from the cluster's own key: Slurm's auth/jwt, HMAC-SHA256 over two JSON texts."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from pathlib import Path

from fleet.errors import FleetError

# Slurm lets its own user, and nobody below an operator, change nodes.
USER = "slurm"
LASTS_S = 300


def token(key: Path, now: float) -> str:
    """The key is read at each use: a Secret may be replaced under us."""
    try:
        secret = key.read_bytes()
    except OSError as error:
        raise FleetError("read the JWT key", error.strerror or str(error), file=str(key)) from error
    if len(secret) < 16:
        raise FleetError("use the JWT key", f"it holds {len(secret)} bytes", file=str(key))
    return signed({"iat": int(now), "exp": int(now) + LASTS_S, "sun": USER}, secret)


def signed(claims: dict[str, object], secret: bytes) -> str:
    parts = b".".join(_text(json.dumps(part).encode()) for part in ({"alg": "HS256", "typ": "JWT"}, claims))
    return b".".join([parts, _text(hmac.digest(secret, parts, hashlib.sha256))]).decode()


def _text(data: bytes) -> bytes:
    return base64.urlsafe_b64encode(data).rstrip(b"=")
