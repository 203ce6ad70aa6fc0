"""Which address a new pod gets: never the one it had before, as on Kubernetes. Pure."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable

from cluster.errors import ClusterError


def allocate(subnet: str, *, gateway: str, used: Iterable[str], last: str, count: int) -> list[str]:
    """`count` free addresses after `last`, around the end of the subnet to its beginning."""
    network = ipaddress.ip_network(subnet)
    taken = {*used, gateway}
    size = network.num_addresses
    start = int(ipaddress.ip_address(last)) - int(network.network_address) if last else 1
    found: list[str] = []
    for step in range(1, size):
        offset = (start + step) % size
        # The first is the network, the last is everybody.
        if offset in (0, size - 1):
            continue
        address = str(network.network_address + offset)
        if address not in taken:
            found.append(address)
        if len(found) == count:
            return found
    raise ClusterError(f"find {count} addresses", f"{subnet} has {len(found)} left")
