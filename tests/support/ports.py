"""Ports of this machine for servers that a test starts later."""

from __future__ import annotations

import itertools
import os
import socket

# Below the ports that the kernel gives to outgoing connections, one of which may have such a port before its server
# starts, and apart from those that a cluster takes by itself.
FIRST, COUNT = 24_000, 8_000
_turns = itertools.count(os.getpid() * 61)


def free_port() -> int:
    """Return a port that nobody has and that no other test of this process is given soon."""
    for turn in itertools.islice(_turns, COUNT):
        port = FIRST + turn % COUNT
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
    raise AssertionError("no port is free")
