"""The port of this machine for ssh to a login pod."""

from __future__ import annotations

import contextlib
import socket

from cluster.errors import ClusterError


def choose(requested: int, *, default: int, own: int) -> int:
    """Choose the requested port, else `own` (the pod's current one), else the default for a new cluster.

    A port taken by another program is replaced by the next free one; requesting it again changes nothing.
    """
    return own if own and not requested else free_port(requested or default, own=own)


def free_port(wanted: int, *, own: int = 0) -> int:
    """Return the port, or the next free one of this machine."""
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
