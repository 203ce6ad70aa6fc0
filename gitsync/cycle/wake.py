"""Wake the loop over its socket, so that its next cycle starts now."""

from __future__ import annotations

import socket

from gitsync.settings import GitsyncSettings


def poke(settings: GitsyncSettings) -> bool:
    """Start the running loop's next cycle now; return False when no loop listens."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as out:
            out.sendto(b"now", str(settings.layout.wake))
    except OSError:
        return False
    return True
