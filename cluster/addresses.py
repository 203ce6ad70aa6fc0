"""Addresses of new pods and Services. Pure.

As on Kubernetes, a new pod never gets its previous address. A pod alone behind a Service with an address gets the
Service's address each time, since no kube-proxy forwards here.
"""

from __future__ import annotations

import ipaddress
import zlib
from collections.abc import Iterable

from cluster.errors import ClusterError


def of_services(subnet: str, names: Iterable[str]) -> dict[str, str]:
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
    taken = {*used, gateway}
    size = network.num_addresses
    start = int(ipaddress.ip_address(last)) - int(network.network_address) if last else 1
    free: list[str] = []
    for step in range(1, size):
        offset = (start + step) % size
        # The first is the network's address, the last the broadcast address.
        if offset in (0, size - 1):
            continue
        address = str(network.network_address + offset)
        if address not in taken:
            free.append(address)
        if len(free) == count:
            return free
    raise ClusterError(f"find {count} addresses", f"{subnet} has {len(free)} left")
