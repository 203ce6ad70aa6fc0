"""Spread periodic work over the fleet: each pod gets its own offset within an interval."""

from __future__ import annotations

import hashlib


def share(name: str) -> float:
    """Return a number in [0, 1) from the pod's name: the same at each start, and spread over the fleet."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") / 2**32
