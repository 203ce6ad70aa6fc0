"""WorkerPools at a real API server."""

from __future__ import annotations

from fleet import crd

POOLS = f"/apis/{crd.GROUP}/{crd.VERSION}/namespaces/default/{crd.POOL_PLURAL}"
KIND = {"apiVersion": f"{crd.GROUP}/{crd.VERSION}", "kind": crd.POOL_KIND}
