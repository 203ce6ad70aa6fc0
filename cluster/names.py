"""The known clusters: the directory that owns each, the lock against concurrent changes, its port and addresses."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import socket
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from cluster import ClusterError
from cluster.pods import LABEL, STATE_LABEL


def saved(root: Path) -> set[str]:
    """Return clusters that were started from this directory."""
    return {path.parent.name for path in root.glob("*/options.json")}


def labelled(api: Any) -> set[str]:
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
def locked(state: Path, cannot: str) -> Iterator[None]:
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
