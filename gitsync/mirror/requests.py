"""What the mirror takes from the network: a request has a deadline as a whole, and asks only for what was verified."""

from __future__ import annotations

import gzip
import io
import socket
import time
import zlib

# Nothing comes for so long, or the request is not whole by then: somebody else gets the thread.
IDLE = 5.0
REQUEST = 10.0
# A connection is closed with the first answer after this.
CONNECTION = 30.0
# A fetch's request is a list of hashes; a report is a sentence.
LARGEST = 1 << 20


class DeadlineReader(io.RawIOBase):
    """A socket's bytes until a deadline. A socket's own timeout begins anew with each byte."""

    def __init__(self, source: socket.socket) -> None:
        self._source = source
        self.until = time.monotonic() + REQUEST

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]  # what BufferedReader gives
        left = self.until - time.monotonic()
        if left <= 0:
            raise TimeoutError("the request is not whole yet")
        self._source.settimeout(min(IDLE, left))
        try:
            return self._source.recv_into(buffer)
        finally:
            self._source.settimeout(IDLE)


def unpack(body: bytes) -> bytes | None:
    """None where it is no gzip, or larger unpacked than a request may be."""
    try:
        unpacked = gzip.GzipFile(fileobj=io.BytesIO(body)).read(LARGEST + 1)
    except (OSError, EOFError, zlib.error):
        return None
    return unpacked if len(unpacked) <= LARGEST else None


def wants(body: bytes) -> set[str] | None:
    """The hashes that a request to upload-pack asks for; None where it is no row of packet lines. Pure.

    git itself, in protocol 2, gives whatever object it is asked for by its hash.
    """
    found, at = set(), 0
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
            found.add(line.split()[1].decode("ascii", "replace") if len(line.split()) > 1 else "")
        at += max(size, 4)
    return found
