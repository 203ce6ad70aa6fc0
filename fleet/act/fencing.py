"""Machines that look dead: asked in every way that there is; and what giving one up, and taking it back, tells the API
server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping

from fleet.act.kubernetes import CHANGED_MEANWHILE, MERGE, Api, ApiError, Object
from fleet.decide.actions import Delete, Fence, Unfence
from fleet.decide.causes import silent_for
from fleet.decide.fence import pods_on, suspects
from fleet.errors import FleetError
from fleet.policy import Policy
from fleet.world import reading
from fleet.world.kubernetes import FENCED, TAINT, Kubernetes, Node, Pod
from fleet.world.proof import Proof

LEASES = "kube-node-lease"
# Beside our label on a Node that is given up, for people.
WHY = "minivm.io/fenced"
# What a machine that is well answers in; so many are asked at a look, and the others when these are over.
WITHIN_S = 3.0
MOST = 8
WITNESSES = 3
# Of the daemon that a pod is there for.
PORTS: Mapping[str, int] = {"worker": 6818, "controller": 6817, "login": 22}


async def prove(api: Api, kubernetes: Kubernetes, policy: Policy) -> Mapping[str, Proof]:
    nodes = suspects(kubernetes, policy, time.time())[:MOST]
    if not nodes:
        return {}
    on = pods_on(kubernetes)
    witness = asyncio.create_task(_witnessed(kubernetes.nodes.values()))
    found = await asyncio.gather(*(_of(api, node, on[node.name]) for node in nodes))
    seen = await witness
    return {
        node.name: Proof(lease, kubelet, pods, seen) for node, (lease, kubelet, pods) in zip(nodes, found, strict=True)
    }


async def _witnessed(nodes: Iterable[Node]) -> bool:
    well = [node for node in nodes if node.address and silent_for(node, time.time()) < 0][:WITNESSES]
    return any(await asyncio.gather(*(answers(node.address, node.port) for node in well)))


async def _of(api: Api, node: Node, pods: Iterable[Pod]) -> tuple[float | None, bool | None, tuple[str, ...]]:
    known = [pod for pod in pods if pod.address]
    ports = [(node.address, node.port), *((pod.address, PORTS.get(pod.component, 6818)) for pod in known)]
    lease = asyncio.create_task(lease_age(api, node.name))
    kubelet, *found = await asyncio.gather(*(answers(host, port) for host, port in ports))
    there = tuple(pod.name for pod, up in zip(known, found, strict=True) if up)
    return await lease, kubelet if node.address else None, there


async def lease_age(api: Api, node: str) -> float | None:
    try:
        found = await api.ask(f"read the lease of {node}", (api.leases.read_namespaced_lease, _named(node, LEASES)))
        renewed = reading.moment(reading.mapping(found.get("spec"), "spec").get("renewTime"), "spec.renewTime")
    except FleetError:
        return None
    return time.time() - renewed if renewed else None


async def answers(host: str, port: int) -> bool:
    """A refusal is an answer, too."""
    if not host:
        return False
    try:
        async with asyncio.timeout(WITHIN_S):
            _, writer = await asyncio.open_connection(host, port)
        writer.close()
    except ConnectionRefusedError:
        return True
    except (OSError, TimeoutError):
        return False
    return True


async def change(api: Api, act: Fence | Unfence | Delete) -> bool:
    """False: it is no longer the object that was seen, and nothing is done."""
    try:
        match act:
            case Fence(name, uid, version, why):
                return await _taint(api, name, uid, version, why)
            case Unfence(name, uid, version):
                return await _taint(api, name, uid, version, None)
            case Delete():
                return await _delete(api, act)
    except ApiError as error:
        if error.status in CHANGED_MEANWHILE:
            return False
        raise


async def _taint(api: Api, name: str, uid: str, version: str, why: str | None) -> bool:
    """Taints are written as a whole: those of others as they are there, with what we do not read of them."""
    node = await api.ask(f"read {name}", (api.core.read_node, {"name": name}))
    metadata = node.get("metadata") or {}
    if (metadata.get("uid"), metadata.get("resourceVersion")) != (uid, version):
        return False
    others = [taint for taint in (node.get("spec") or {}).get("taints") or [] if taint.get("key") != TAINT]
    ours = [] if why is None else [{"key": TAINT, "value": "nodeshutdown", "effect": "NoExecute"}]
    mark = {"labels": {FENCED: "true" if why else None}, "annotations": {WHY: why}}
    body = {
        "metadata": {"uid": uid, "resourceVersion": version, **mark},
        "spec": {"taints": [*others, *ours]},
    }
    await api.ask(f"taint {name}", (api.core.patch_node, {"name": name, "body": body, "_content_type": MERGE}))
    return True


async def _delete(api: Api, act: Delete) -> bool:
    node = await api.ask(f"read {act.node}", (api.core.read_node, {"name": act.node}))
    if (node.get("metadata") or {}).get("resourceVersion") != act.node_version:
        return False
    body = {"gracePeriodSeconds": 0, "preconditions": {"uid": act.uid}}
    words = {**_named(act.pod, api.namespace), "body": body}
    await api.ask(f"delete {act.pod}", (api.core.delete_namespaced_pod, words))
    return True


def _named(name: str, namespace: str) -> Object:
    return {"name": name, "namespace": namespace}
