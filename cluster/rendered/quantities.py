"""Kubernetes' ways to write an amount. Pure."""

from __future__ import annotations

import re

from cluster.errors import ClusterError


def quantity(text: str | int) -> int:
    """Kubernetes' 256Gi or 1500M in bytes."""
    found = re.fullmatch(r"([0-9.]+)([KMGTPE]i?|k|m)?", str(text))
    if not found:
        raise ClusterError(f"read the quantity {text!r}", "expected a number and a unit such as Gi")
    number, unit = float(found[1]), found[2] or ""
    if unit == "m":
        return int(number / 1000)
    power = "KMGTPE".find(unit[0].upper()) + 1 if unit else 0
    return int(number * (1024 if unit.endswith("i") else 1000) ** power)


def cpus(text: str | int | float) -> float:
    return float(str(text).removesuffix("m")) / 1000 if str(text).endswith("m") else float(text)
