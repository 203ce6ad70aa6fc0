"""Signatures of HTTP bodies with a shared secret: of webhooks, and of nodes' reports to the ring."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from pathlib import Path


def signature(body: bytes, secret: bytes) -> str:
    """Compute the value of X-Hub-Signature-256 for a body."""
    return "sha256=" + hmac.new(secret, body, hashlib.sha256).hexdigest()


def authentic(headers: Mapping[str, str], body: bytes, secret: bytes) -> bool:
    """Verify a request: GitHub and Gitea sign the body, GitLab sends the secret itself. Pure."""
    if not secret:
        return False
    given = headers.get("x-hub-signature-256", "")
    if given:
        return hmac.compare_digest(given.encode(), signature(body, secret).encode())
    token = headers.get("x-gitlab-token", "")
    return bool(token) and hmac.compare_digest(token.encode(), secret)


def read_secret(path: Path | None) -> bytes:
    """Read the secret; empty without one. Called at each use, so that a rotated secret takes effect at once."""
    try:
        return path.read_bytes().strip() if path else b""
    except OSError:
        return b""
