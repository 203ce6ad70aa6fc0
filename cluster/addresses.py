"""Which address a new pod gets, and which one a Service has. Pure.

Never the one it had before, as on Kubernetes. A pod that is alone behind a Service with an address of its own gets that
address each time: there is no kube-proxy here to lead from one to the other.
"""

from __future__ import annotations

import ipaddress
import zlib
from collections.abc import Iterable

from cluster.errors import ClusterError


def of_services(subnet: str, names: Iterable[str]) -> dict[str, str]:
    """An address in the subnet's last quarter for each Service, by its name alone.

    Nothing is stored for that. Pods, and docker itself, count from the subnet's beginning.
    """
    network = ipaddress.ip_network(subnet)
    quarter = max(network.num_addresses // 4, 1)
    last = int(network.broadcast_address) - 1
    found: dict[str, str] = {}
    for name in sorted(names):
        start = zlib.crc32(name.encode())
        free = (str(ipaddress.ip_address(last - (start + step) % quarter)) for step in range(quarter))
        address = next((one for one in free if one not in found.values()), None)
        if address is None:
            raise ClusterError(f"find an address for {name}", f"{subnet} has none left")
        found[name] = address
    return found


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
