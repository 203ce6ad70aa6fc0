"""The port of this machine at which a login pod is reached by ssh."""

from __future__ import annotations

import contextlib
import socket

from cluster.errors import ClusterError


def choose(asked: int, *, default: int, own: int) -> int:
    """As was asked for; else `own`, the one that the pod has, and for a new one the default. What is taken by another
    gives way to the next free one, and to ask for it again changes nothing."""
    return own if own and not asked else free_port(asked or default, own=own)


def free_port(wanted: int, *, own: int = 0) -> int:
    """The port, or the next free one of this machine."""
    for port in range(wanted, min(wanted + 100, 65536)):
        if port == own:
            return port
        with contextlib.closing(socket.socket()) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise ClusterError("publish the login pod's ssh port", f"127.0.0.1:{wanted} and the next 100 are taken")
