"""WorkerPools at a real API server."""

from __future__ import annotations

from fleet import crd, crd_pools

POOLS = f"/apis/{crd.GROUP}/{crd.VERSION}/namespaces/default/{crd_pools.PLURAL}"
KIND = {"apiVersion": f"{crd.GROUP}/{crd.VERSION}", "kind": crd_pools.KIND}
