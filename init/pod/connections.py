"""Which addresses hold the connections to a TCP port of this pod: the kernel's table, in a sentence."""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

TABLES = ("/proc/net/tcp", "/proc/net/tcp6")
ESTABLISHED = "01"
FEW = 50  # connections that explain nothing


def sources(lines: Iterable[str], port: int) -> Counter[str]:
    """Established connections to the port, counted by remote address."""
    ending = f":{port:04X}"
    found: Counter[str] = Counter()
    for line in lines:
        fields = line.split(maxsplit=4)
        if len(fields) > 3 and fields[3] == ESTABLISHED and fields[1].endswith(ending):
            found[fields[2].partition(":")[0]] += 1
    return Counter({_address(text): number for text, number in found.items()})


def _address(text: str) -> str:
    """The kernel writes an address as 32-bit words in the machine's byte order."""
    words = [bytes.fromhex(text[start : start + 8])[::-1] for start in range(0, len(text), 8)]
    address = ipaddress.ip_address(b"".join(words))
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)


def crowd(found: Counter[str], port: int) -> str:
    """A sentence for an unusual number of connections; empty for a usual one."""
    total = found.total()
    if total < FEW:
        return ""
    ((address, most),) = found.most_common(1)
    return f"{total:,} connections are open to port {port}, {most:,} of them from {address}"


def crowd_at(port: int, tables: Iterable[str] = TABLES) -> str:
    """The same for the port of this pod, as the kernel lists it now."""
    found: Counter[str] = Counter()
    for table in tables:
        try:
            with Path(table).open(encoding="ascii") as stream:
                found += sources(stream, port)
        except OSError:
            continue  # without IPv6
    return crowd(found, port)
