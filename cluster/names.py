"""The clusters on this machine: the directory that owns each, the lock on it, its port, and its pods' addresses."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import socket
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cluster import ClusterError, manifests
from cluster.manifests import Manifests, PodSpec
from cluster.pods import LABEL, STATE_LABEL, Kubelet, write_private


def list_started_here(root: Path) -> set[str]:
    """Return clusters that were started from this directory."""
    return {path.parent.name for path in root.glob("*/options.json")}


def list_in_engine(api: Any) -> set[str]:
    """Return clusters with objects in the engine, from any directory."""
    filters = {"label": LABEL}
    objects: list[dict[str, Any]] = [*api.containers(all=True, filters=filters), *api.networks(filters=filters)]
    objects += api.volumes(filters=filters)["Volumes"] or []
    return {item["Labels"][LABEL] for item in objects}


def hint(known: Iterable[str]) -> str:
    names = sorted(known)
    return f"there {'is' if len(names) == 1 else 'are'} {', '.join(names)}; --name chooses" if names else ""


def check_owner(api: Any, name: str, state: Path, cannot: str) -> None:
    """Refuse a cluster that another directory owns: the engine distinguishes clusters by name alone.

    Keys, ports and files are in the owning directory. If that directory is gone, the cluster has no owner.
    """
    for item in api.containers(all=True, filters={"label": f"{LABEL}={name}"}):
        other = item["Labels"].get(STATE_LABEL, str(state))
        if other != str(state) and (Path(other) / "options.json").exists():
            raise ClusterError(cannot, f"a cluster {name} was brought up from another directory, its state is {other}",
                               hint="--name chooses another name; or go to that directory")  # fmt: skip


@contextlib.contextmanager
def hold_lock(state: Path, cannot: str) -> Iterator[None]:
    """Hold the lock against other commands that change the cluster. The lock is its directory, which `down` removes."""
    lock = _lock(state, cannot)
    try:
        yield
    finally:
        if lock is not None:
            os.close(lock)


def _lock(state: Path, cannot: str) -> int | None:
    while True:
        try:
            lock = os.open(state, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            return None  # nothing exists that a command could change
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(lock), state.stat()):
                return lock
        except BlockingIOError:
            os.close(lock)
            raise ClusterError(cannot, f"another command changes the cluster {state.name} right now",
                               hint="wait for it, or end it with Ctrl-C") from None  # fmt: skip
        except FileNotFoundError:  # a concurrent `down` removed it first
            pass
        os.close(lock)


# The port of this machine for ssh to a login pod.


def choose_port(requested: int, *, default: int, own: int) -> int:
    """Choose the requested port, else `own` (the pod's current one), else the default for a new cluster.

    A port taken by another program is replaced by the next free one; requesting it again changes nothing.
    """
    return own if own and not requested else free_port(requested or default, own=own)


def free_port(first_port: int, *, own: int = 0) -> int:
    """Return the port, or the next free one of this machine."""
    for port in range(first_port, min(first_port + 100, 65536)):
        if port == own:
            return port
        with contextlib.closing(socket.socket()) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise ClusterError("publish the login pod's ssh port", f"127.0.0.1:{first_port} and the next 100 are taken")


# Addresses. As on Kubernetes, a new pod never gets its previous address. A pod alone behind a Service with an address
# gets the Service's address each time, since no kube-proxy forwards here.


def service_addresses(subnet: str, names: Iterable[str]) -> dict[str, str]:
    """Give each Service an address in the subnet's last quarter, derived from its name.

    Nothing is stored. Pods, and docker itself, start from the beginning of the subnet.
    """
    network = ipaddress.ip_network(subnet)
    quarter = max(network.num_addresses // 4, 1)
    last = int(network.broadcast_address) - 1
    assigned: dict[str, str] = {}
    for name in sorted(names):
        start = zlib.crc32(name.encode())
        free = (str(ipaddress.ip_address(last - (start + step) % quarter)) for step in range(quarter))
        address = next((candidate for candidate in free if candidate not in assigned.values()), None)
        if address is None:
            raise ClusterError(f"find an address for {name}", f"{subnet} has none left")
        assigned[name] = address
    return assigned


def allocate(subnet: str, *, gateway: str, used: Iterable[str], last: str, count: int) -> list[str]:
    """Return `count` free addresses after `last`, wrapping around at the end of the subnet."""
    network = ipaddress.ip_network(subnet)
    used_addresses = {*used, gateway}
    size = network.num_addresses
    start = int(ipaddress.ip_address(last)) - int(network.network_address) if last else 1
    free: list[str] = []
    for step in range(1, size):
        offset = (start + step) % size
        # The first is the network's address, the last the broadcast address.
        if offset in (0, size - 1):
            continue
        address = str(network.network_address + offset)
        if address not in used_addresses:
            free.append(address)
        if len(free) == count:
            return free
    raise ClusterError(f"find {count} addresses", f"{subnet} has {len(free)} left")


# Addresses of a cluster's pods: Services keep theirs, and no new pod gets that of an earlier one. docker has no
# Services: a pod behind a Service with an address of its own gets that address, and pods find each other in their
# hosts files (`hosts`) or by docker's aliases.

DIRECTORY = "demo"


class Addresses:
    def __init__(self, kubelet: Kubelet, state: Path) -> None:
        self.kubelet, self.state = kubelet, state

    def assign(self, pods: Sequence[PodSpec], desired: Manifests) -> dict[str, str]:
        """Map these pods, which start now, and every pod behind a Service to an address."""
        kept = self._find_stable(desired)
        without_service = [pod.name for pod in pods if pod.name not in kept]
        reserved = [*kept.values(), *self._map_moving(desired).values()]
        return kept | dict(zip(without_service, self._choose_new(len(without_service), reserved), strict=True))

    def hosts(self, pod: PodSpec, desired: Manifests, assigned: Mapping[str, str]) -> dict[str, str]:
        """Map the names of the Services that the pod must resolve by its hosts file to their addresses."""
        stable = manifests.map_stable_services(desired.pods, desired.services)
        addresses = self._map_moving(desired) | {service.name: assigned[name] for name, service in stable.items()}
        return {
            name: address for service, address in addresses.items()
            for name in manifests.host_names(service, pod.namespace)
        }  # fmt: skip

    def _map_services(self, desired: Manifests) -> dict[str, str]:
        """Map every Service with an address of its own to it."""
        subnet = self.kubelet.ensure_network()["IPAM"]["Config"][0]["Subnet"]
        stable = manifests.map_stable_services(desired.pods, desired.services).values()
        moving = manifests.list_moving_services(desired.services)
        return service_addresses(subnet, {service.name for service in (*stable, *moving)})

    def _find_stable(self, desired: Manifests) -> dict[str, str]:
        """Map pods to the address of the Service in front of them, which outlives the pod.

        The directory's pod too: docker's DNS gives names a lifetime of ten minutes, and sssd uses the old address so
        long. Every pod without a cache would know no user meanwhile.
        """
        by_service = self._map_services(desired)
        stable = manifests.map_stable_services(desired.pods, desired.services)
        kept = {pod: by_service[service.name] for pod, service in stable.items()}
        subnet = self.kubelet.ensure_network()["IPAM"]["Config"][0]["Subnet"]
        for pod in desired.pods:
            address = service_addresses(subnet, [pod.subdomain])[pod.subdomain]
            if pod.role == DIRECTORY and address not in by_service.values():
                kept[pod.name] = address
        return kept

    def _map_moving(self, desired: Manifests) -> dict[str, str]:
        """Map Services to the address that the active one of several pods takes."""
        by_service = self._map_services(desired)
        return {service.name: by_service[service.name] for service in manifests.list_moving_services(desired.services)}

    def _choose_new(self, count: int, reserved: Iterable[str]) -> list[str]:
        """Return addresses that neither present nor previous pods have, so that no peer reaches a wrong pod."""
        if not count:
            return []
        network = self.kubelet.ensure_network()
        config = network["IPAM"]["Config"][0]
        last_file = self.state / "last-address"
        # Includes containers that a person attached to the network, such as a database.
        used = [str(item["IPv4Address"]).partition("/")[0] for item in network["Containers"].values()]
        used += reserved
        last = last_file.read_text() if last_file.exists() else ""
        allocated = allocate(config["Subnet"], gateway=config["Gateway"], used=used, last=last, count=count)
        write_private(last_file, allocated[-1].encode())
        return allocated
