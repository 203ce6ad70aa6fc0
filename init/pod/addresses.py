"""Host and port of a setting, and the remote addresses of the connections to a port of this pod."""

from __future__ import annotations

from collections import Counter

from init.fields import number

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

PORT = 6817
CONTROLLER = "slurm-controller"


def host_and_port(value: str, default: int = PORT) -> tuple[str, int]:
    """Split host and port. A bare IPv6 address has colons and no port; [::1]:6817 has a port."""
    host, colon, port = value.rpartition(":")
    parsed = number(port)
    if colon and parsed is not None and (":" not in host or host.startswith("[")):
        return host.strip("[]"), parsed
    return value.strip("[]"), default


def join_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


TABLES = ("/proc/net/tcp", "/proc/net/tcp6")
ESTABLISHED = "01"
FEW = 50  # below this, connections explain nothing


def count_sources(lines: Iterable[str], port: int) -> Counter[str]:
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
    import ipaddress  # imported late: boot steps need host and port only

    words = [bytes.fromhex(text[start : start + 8])[::-1] for start in range(0, len(text), 8)]
    address = ipaddress.ip_address(b"".join(words))
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)


def describe_crowd(counts: Counter[str], port: int) -> str:
    """Describe an unusual number of connections; "" for a usual one."""
    total = counts.total()
    if total < FEW:
        return ""
    ((address, most),) = counts.most_common(1)
    return f"{total:,} connections are open to port {port}, {most:,} of them from {address}"


def find_crowd(port: int) -> str:
    """Describe the connections to the pod's port as the kernel lists them now."""
    counts: Counter[str] = Counter()
    for table in TABLES:
        try:
            with open(table, encoding="ascii") as stream:  # noqa: PTH123 - pathlib costs 8 ms of boot
                counts += count_sources(stream, port)
        except OSError:
            continue  # without IPv6
    return describe_crowd(counts, port)
