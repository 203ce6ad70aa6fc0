"""A poke for the loop that sleeps: its next cycle is now."""

from __future__ import annotations

import socket

from gitsync.settings import Settings


def poke(settings: Settings) -> bool:
    """Hurry a running loop; False where none listens."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as out:
            out.sendto(b"now", str(settings.layout.wake))
    except OSError:
        return False
    return True
