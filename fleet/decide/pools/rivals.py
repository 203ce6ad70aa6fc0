"""Pools that want the same pods: the older one is the pool."""

from __future__ import annotations

from collections.abc import Mapping

from fleet.world.kubernetes import Kubernetes
from fleet.world.pool import WorkerPool


def refusals(kubernetes: Kubernetes) -> Mapping[str, str]:
    """Pools that are in an older one's way, and why. One that is about to go still has its pods."""
    labels: dict[str, str] = {}
    names: dict[str, str] = {}
    refused: dict[str, str] = {}
    elastic: list[WorkerPool] = []
    for pool in sorted((kubernetes.pools or {}).values(), key=lambda one: (one.created, one.uid)):
        wanted = kubernetes.wanted.get(pool.name, {})
        if pool.label in labels:
            refused[pool.name] = f"none of its pods is touched: {labels[pool.label]}, older, has its label {pool.label}"
        elif both := next((name for name in wanted if name in names), "") or next(filter(pool.may_have, names), ""):
            refused[pool.name] = f"none of its pods is touched: {names[both]}, older, has {both} too"
        elif other := next((one for one in elastic if any(map(one.may_have, wanted))), None):
            refused[pool.name] = f"none of its pods is touched: {other.name}, older, may have one of their names"
        else:
            elastic += [pool] if pool.elastic else []
            labels[pool.label] = pool.name
            names |= dict.fromkeys(wanted, pool.name)
    return refused
