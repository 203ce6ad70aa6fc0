"""Machines that look dead: asked in every way that there is; and what giving one up, and taking it back, tells the API
server."""

from __future__ import annotations

import asyncio
import random
import socket
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from ipaddress import IPv4Address, IPv6Address, ip_address
from urllib.parse import urlsplit

from fleet.act.api_client import ApiClient, Object
from fleet.act.clock import steady
from fleet.decide.causes import silent_for
from fleet.decide.fencing import pods_on, suspects
from fleet.errors import FleetError
from fleet.policy import Policy
from fleet.world import fields
from fleet.world.kubernetes import Kubernetes, Node, Pod
from fleet.world.snapshot import Proof

LEASES = "kube-node-lease"
# What a machine that is well answers in; so many are asked at a look, and the others when these are over.
WITHIN_S = 3.0
MOST = 8
WITNESSES = 3
# Of the daemon that a pod is there for.
PORTS: Mapping[str, int] = {"worker": 6818, "controller": 6817, "login": 22}


class LeaseAges:
    """For how long kubelets' leases have stood as they are, by our own clock since we saw it: their times are the
    kubelets' words, and a kubelet's clock may be an hour behind."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[str, float]] = {}

    async def follow(self, api: ApiClient, kubernetes: Kubernetes, policy: Policy) -> None:
        """Of all that are silent, so that it is known when one looks dead."""
        silent = suspects(kubernetes, replace(policy, dead_s=0.0), steady())[: 4 * MOST]
        self._seen = {node.name: self._seen[node.name] for node in silent if node.name in self._seen}
        await asyncio.gather(*(self.age(api, node.name) for node in silent))

    async def age(self, api: ApiClient, node: str) -> float | None:
        found = await lease(api, node)
        if found is None:
            return None
        version, now = str(fields.mapping(found.get("metadata"), "metadata").get("resourceVersion")), time.monotonic()
        if self._seen.get(node, ("", 0.0))[0] != version:
            self._seen[node] = (version, now)
        return now - self._seen[node][1]


async def prove(
    api: ApiClient, kubernetes: Kubernetes, policy: Policy, leases: LeaseAges | None = None
) -> Mapping[str, Proof]:
    """Without `leases` for whoever looks once: the age of a lease is what its own time says."""
    if leases:
        await leases.follow(api, kubernetes, policy)
    nodes = suspects(kubernetes, policy, steady())[:MOST]
    if not nodes:
        return {}
    on = pods_on(kubernetes)
    witness = asyncio.create_task(_witnessed(api, kubernetes.nodes.values()))
    found = await asyncio.gather(*(_of(api, node, on[node.name], leases) for node in nodes))
    seen = await witness
    return {
        node.name: Proof(lease, kubelet, pods, seen) for node, (lease, kubelet, pods) in zip(nodes, found, strict=True)
    }


async def _witnessed(api: ApiClient, nodes: Iterable[Node]) -> bool:
    """Most of some that nobody can foresee: one kubelet's word for where it is may be a lie."""
    nodes = list(nodes)
    claimed = Counter(node.address for node in nodes)
    server = urlsplit(api.server).hostname
    well = [
        node
        for node in nodes
        if silent_for(node, steady()) < 0 and claimed[node.address] == 1 and elsewhere(node.address, server)
    ]
    asked = random.sample(well, min(WITNESSES, len(well)))
    return sum(await asyncio.gather(*(answers(node.address, node.port) for node in asked))) * 2 > len(asked)


def elsewhere(address: str, server: str | None) -> bool:
    """Neither the API server, which answers us in any case, nor we ourselves."""
    ip = _ip(address)
    if ip is None or ip.is_loopback or ip.is_unspecified or ip.is_link_local or ip.is_multicast or address == server:
        return False
    with socket.socket(socket.AF_INET if ip.version == 4 else socket.AF_INET6, socket.SOCK_DGRAM) as way:
        try:
            way.connect((address, 9))  # sends nothing: it chooses the address that we would have
        except OSError:
            return False
        return bool(ip_address(way.getsockname()[0]) != ip)


async def _of(
    api: ApiClient, node: Node, pods: Iterable[Pod], leases: LeaseAges | None
) -> tuple[float | None, bool | None, tuple[str, ...]]:
    known = [pod for pod in pods if pod.address]
    ports = [(node.address, node.port), *((pod.address, PORTS.get(pod.component, 6818)) for pod in known)]
    age = asyncio.create_task(leases.age(api, node.name) if leases else lease_age(api, node.name))
    kubelet, *found = await asyncio.gather(*(answers(host, port) for host, port in ports))
    there = tuple(pod.name for pod, up in zip(known, found, strict=True) if up)
    return await age, kubelet if _asked(node) else None, there


def _asked(node: Node) -> bool:
    """Whether what it says of itself is somewhere: that nobody answers nowhere is no sign of death."""
    return _ip(node.address) is not None and 0 < node.port < 1 << 16


def _ip(address: str) -> IPv4Address | IPv6Address | None:
    """One that is the same seen from anywhere; a kubelet may call any words its address."""
    try:
        return None if "%" in address else ip_address(address)
    except ValueError:
        return None


async def lease(api: ApiClient, node: str) -> Object | None:
    """None: it cannot be read, or was never renewed."""
    try:
        found = await api.ask(f"read the lease of {node}", (api.leases.read_namespaced_lease, _named(node, LEASES)))
        return found if renewed(found) else None
    except FleetError:
        return None


def renewed(found: Object) -> float:
    return fields.moment(fields.mapping(found.get("spec"), "spec").get("renewTime"), "spec.renewTime")


async def lease_age(api: ApiClient, node: str) -> float | None:
    found = await lease(api, node)
    return None if found is None else time.time() - renewed(found)


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
    except (OSError, TimeoutError, OverflowError, ValueError):  # no such port, no such name
        return False
    return True


def _named(name: str, namespace: str) -> Object:
    return {"name": name, "namespace": namespace}
