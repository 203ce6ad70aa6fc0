"""Remote addresses of the connections to a TCP port of this pod, from the kernel's table, in a sentence."""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

TABLES = ("/proc/net/tcp", "/proc/net/tcp6")
ESTABLISHED = "01"
FEW = 50  # below this, connections explain nothing


def sources(lines: Iterable[str], port: int) -> Counter[str]:
    """Count established connections to the port by remote address."""
    ending = f":{port:04X}"
    counts: Counter[str] = Counter()
    for line in lines:
        fields = line.split(maxsplit=4)
        if len(fields) > 3 and fields[3] == ESTABLISHED and fields[1].endswith(ending):
            counts[fields[2].partition(":")[0]] += 1
    return Counter({_address(text): number for text, number in counts.items()})


def _address(text: str) -> str:
    """Parse an address, which the kernel writes as 32-bit words in the machine's byte order."""
    words = [bytes.fromhex(text[start : start + 8])[::-1] for start in range(0, len(text), 8)]
    address = ipaddress.ip_address(b"".join(words))
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)


def crowd(counts: Counter[str], port: int) -> str:
    """Describe an unusual number of connections; "" for a usual one."""
    total = counts.total()
    if total < FEW:
        return ""
    ((address, most),) = counts.most_common(1)
    return f"{total:,} connections are open to port {port}, {most:,} of them from {address}"


def crowd_at(port: int, tables: Iterable[str] = TABLES) -> str:
    """Describe the connections to the pod's port as the kernel lists them now."""
    counts: Counter[str] = Counter()
    for table in tables:
        try:
            with Path(table).open(encoding="ascii") as stream:
                counts += sources(stream, port)
        except OSError:
            continue  # without IPv6
    return crowd(counts, port)
