"""Probes of machines that look dead: lease, kubelet, pods, and healthy kubelets as witnesses of the network."""

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
from fleet.world.fields import Fields
from fleet.world.kubernetes import Kubernetes, Node, Pod
from fleet.world.snapshot import Proof

LEASES = "kube-node-lease"
# The time in which a healthy machine answers; and the machines and witnesses that are probed in one pass.
WITHIN_S = 3.0
MOST = 8
WITNESSES = 3
# The port of each component's daemon.
PORTS: Mapping[str, int] = {"worker": 6818, "controller": 6817, "login": 22}


class LeaseAges:
    """Time since each kubelet's lease last changed, by the fleet's clock: the times in them are the kubelets' own."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[str, float]] = {}

    async def follow(self, api: ApiClient, kubernetes: Kubernetes, policy: Policy) -> None:
        """Watch the leases of all silent Nodes, so that their age is known when one looks dead."""
        silent = suspects(kubernetes, replace(policy, dead_s=0.0), steady())[: 4 * MOST]
        self._seen = {node.name: self._seen[node.name] for node in silent if node.name in self._seen}
        await asyncio.gather(*(self.age(api, node.name) for node in silent))

    async def age(self, api: ApiClient, node: str) -> float | None:
        lease = await read_lease(api, node)
        if lease is None:
            return None
        version, now = str(Fields(lease).sub("metadata").data.get("resourceVersion")), time.monotonic()
        if self._seen.get(node, ("", 0.0))[0] != version:
            self._seen[node] = (version, now)
        return now - self._seen[node][1]


async def prove(
    api: ApiClient, kubernetes: Kubernetes, policy: Policy, leases: LeaseAges | None = None
) -> Mapping[str, Proof]:
    """Probe the machines that look dead. Without `leases`, for a single look, a lease's own time tells its age."""
    if leases:
        await leases.follow(api, kubernetes, policy)
    nodes = suspects(kubernetes, policy, steady())[:MOST]
    if not nodes:
        return {}
    on = pods_on(kubernetes)
    witness = asyncio.create_task(_is_witnessed(api, kubernetes.nodes.values()))
    results = await asyncio.gather(*(_probe(api, node, on[node.name], leases) for node in nodes))
    seen = await witness
    return {
        node.name: Proof(age, kubelet, pods, seen) for node, (age, kubelet, pods) in zip(nodes, results, strict=True)
    }


async def _is_witnessed(api: ApiClient, nodes: Iterable[Node]) -> bool:
    """Return whether most of a few random healthy kubelets answer. One kubelet could lie about its address."""
    nodes = list(nodes)
    claimed = Counter(node.address for node in nodes)
    server = urlsplit(api.server).hostname
    healthy = [
        node
        for node in nodes
        if silent_for(node, steady()) < 0 and claimed[node.address] == 1 and is_elsewhere(node.address, server)
    ]
    chosen = random.sample(healthy, min(WITNESSES, len(healthy)))
    return sum(await asyncio.gather(*(answers(node.address, node.port) for node in chosen))) * 2 > len(chosen)


def is_elsewhere(address: str, server: str | None) -> bool:
    """Return whether a kubelet there can be a witness: exclude the API server's machine and the fleet's own."""
    ip = _ip(address)
    if ip is None or ip.is_loopback or ip.is_unspecified or ip.is_link_local or ip.is_multicast or address == server:
        return False
    with socket.socket(socket.AF_INET if ip.version == 4 else socket.AF_INET6, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))  # sends nothing; chooses the own address for this destination
        except OSError:
            return False
        return bool(ip_address(probe.getsockname()[0]) != ip)


async def _probe(
    api: ApiClient, node: Node, pods: Iterable[Pod], leases: LeaseAges | None
) -> tuple[float | None, bool | None, tuple[str, ...]]:
    known = [pod for pod in pods if pod.address]
    ports = [(node.address, node.port), *((pod.address, PORTS.get(pod.component, 6818)) for pod in known)]
    age = asyncio.create_task(leases.age(api, node.name) if leases else lease_age(api, node.name))
    kubelet, *found = await asyncio.gather(*(answers(host, port) for host, port in ports))
    alive = tuple(pod.name for pod, up in zip(known, found, strict=True) if up)
    # Silence at an unusable address is no sign of death.
    usable = _ip(node.address) is not None and 0 < node.port < 1 << 16
    return await age, kubelet if usable else None, alive


def _ip(address: str) -> IPv4Address | IPv6Address | None:
    """Parse an address that means the same everywhere; a kubelet may report any text as its address."""
    try:
        return None if "%" in address else ip_address(address)
    except ValueError:
        return None


async def read_lease(api: ApiClient, node: str) -> Object | None:
    """Read a kubelet's lease; None: it cannot be read, or was never renewed."""
    words = {"name": node, "namespace": LEASES}
    try:
        lease = await api.ask(f"read the lease of {node}", (api.leases.read_namespaced_lease, words))
        return lease if renewed_at(lease) else None
    except FleetError:
        return None


def renewed_at(lease: Object) -> float:
    return Fields(lease).sub("spec").moment("renewTime")


async def lease_age(api: ApiClient, node: str) -> float | None:
    lease = await read_lease(api, node)
    return None if lease is None else time.time() - renewed_at(lease)


async def answers(host: str, port: int) -> bool:
    """Return whether a connection is accepted or refused: both prove life."""
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
