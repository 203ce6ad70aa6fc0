"""Bounds on the mirror's requests: a deadline for the whole request, a limit on its size, and only verified hashes."""

from __future__ import annotations

import gzip
import io
import socket
import time
import zlib

# Seconds without a byte, and seconds for a whole request, after which the thread serves the next connection.
IDLE = 5.0
REQUEST = 10.0
# Seconds after which a connection is closed with its next reply.
CONNECTION = 30.0
# Largest request body: a fetch sends a list of hashes, a report is a sentence.
LARGEST = 1 << 20


class DeadlineReader(io.RawIOBase):
    """Read a socket until a deadline. A socket's own timeout would start again with each byte."""

    def __init__(self, source: socket.socket) -> None:
        self._source = source
        self.until = time.monotonic() + REQUEST

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]  # what BufferedReader gives
        left = self.until - time.monotonic()
        if left <= 0:
            raise TimeoutError("the request exceeded its deadline")
        self._source.settimeout(min(IDLE, left))
        try:
            return self._source.recv_into(buffer)
        finally:
            self._source.settimeout(IDLE)


def unpack(body: bytes) -> bytes | None:
    """Decompress a gzip body; None when it is not gzip or too large."""
    try:
        unpacked = gzip.GzipFile(fileobj=io.BytesIO(body)).read(LARGEST + 1)
    except (OSError, EOFError, zlib.error):
        return None
    return unpacked if len(unpacked) <= LARGEST else None


def wants(body: bytes) -> set[str] | None:
    """Return the hashes that a request to upload-pack wants; None when it is not a sequence of packet lines. Pure.

    git itself, in protocol 2, serves any object by its hash, so the mirror must check them.
    """
    hashes, at = set(), 0
    while at < len(body):
        head = body[at : at + 4]
        if len(head) < 4 or not head.isalnum():
            return None
        try:
            size = int(head, 16)
        except ValueError:
            return None
        if size == 3 or at + size > len(body):
            return None
        line = body[at + 4 : at + size]
        if line.startswith(b"want "):
            hashes.add(line.split()[1].decode("ascii", "replace") if len(line.split()) > 1 else "")
        at += max(size, 4)
    return hashes
