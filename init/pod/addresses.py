"""The controller's address: a name, or a name and a port. Pure."""

from __future__ import annotations

from init.fields import number

PORT = 6817
CONTROLLER = "slurm-controller"


def host_and_port(value: str, default: int = PORT) -> tuple[str, int]:
    """Split host and port. A bare IPv6 address has colons and no port; [::1]:6817 has a port."""
    host, colon, port = value.rpartition(":")
    parsed = number(port)
    if colon and parsed is not None and (":" not in host or host.startswith("[")):
        return host.strip("[]"), parsed
    return value.strip("[]"), default


def joined(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
