"""A fleet does nothing at one moment: each pod has its own part of an interval."""

from __future__ import annotations

import hashlib


def share(name: str) -> float:
    """In [0, 1), by the pod's name: the same at each start, and spread over the fleet."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") / 2**32
