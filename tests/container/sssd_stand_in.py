"""Stands in for sssd in a container: answers the request for a user's keys, well or wrongly.

Usage: sssd_stand_in.py SOCKET HOW
"""

from __future__ import annotations

import socket
import struct
import sys
import time
from pathlib import Path

ONE, TWO = b"ssh-ed25519 AAAAone one", b"ssh-rsa AAAAtwo"
VERSION, KEYS_OF = 0x01, 0xE1


def key(text: bytes) -> bytes:
    return struct.pack("<II", 0, 5) + b"nina\0" + struct.pack("<I", len(text)) + text


def result(*keys: bytes, count: int | None = None) -> bytes:
    return struct.pack("<II", len(keys) if count is None else count, 0) + b"".join(keys)


# How it answers -> what stands in the answer.
BODIES = {
    "two": result(key(ONE), key(TWO)),
    "none": result(),
    "fewer than it says": result(key(ONE), count=3),
    "more than it says": result(key(ONE), key(TWO), count=1),
    "a key past its end": result(key(ONE)[:-1]),
    "nothing": b"",
    "two lines in one key": result(key(ONE + b"\nssh-ed25519 AAAAsmuggled")),
    "bytes": result(key(b"\0\0\0\x0bssh-ed25519")),
    "four thousand million": result(count=0xFFFFFFFF),
}


def frame(command: int, body: bytes, *, status: int = 0, size: int | None = None) -> bytes:
    return struct.pack("<IIII", 16 + len(body) if size is None else size, command, status, 0) + body


def question(connection: socket.socket) -> None:
    """Read to its end."""
    (size,) = struct.unpack("<I", connection.recv(4, socket.MSG_WAITALL))
    connection.recv(size - 4, socket.MSG_WAITALL)


def answer(connection: socket.socket, how: str) -> None:
    question(connection)
    if how == "another version":
        connection.sendall(frame(VERSION, struct.pack("<I", 7)))
        return
    connection.sendall(frame(VERSION, struct.pack("<I", 0)))
    question(connection)
    if how == "silence":
        time.sleep(600)
    elif how == "a byte a second":
        for byte in frame(KEYS_OF, BODIES["two"]):
            connection.sendall(bytes([byte]))
            time.sleep(1)
    elif how == "an error":
        connection.sendall(frame(KEYS_OF, b"", status=0x555D004F))
    elif how == "another command":
        connection.sendall(frame(KEYS_OF + 1, BODIES["two"]))
    elif how == "an endless answer":
        connection.sendall(frame(KEYS_OF, b"", size=0xFFFFFFFF))
    elif how == "a header too short":
        connection.sendall(frame(KEYS_OF, b"", size=3))
    elif how != "the end":
        connection.sendall(frame(KEYS_OF, BODIES[how]))


def main(path: str, how: str) -> None:
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(f"{path}.new")
    listening.listen()
    Path(f"{path}.new").rename(path)  # whoever sees it may connect
    while True:
        connection, _ = listening.accept()
        with connection:
            try:
                answer(connection, how)
            except OSError:
                # Who asked has had enough.
                continue


if __name__ == "__main__":
    main(*sys.argv[1:])
