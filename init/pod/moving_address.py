"""An address that moves to the active pod, on a network whose pods share one link, as on one machine.

The holder adds the address to its interface and announces it by ARP. A former holder that is stopped still has it: the
announcement is repeated, so that the pods of the link send to the active one. Needs NET_ADMIN and NET_RAW.
"""

from __future__ import annotations

import socket
import struct
from contextlib import suppress
from errno import EADDRNOTAVAIL, EEXIST
from os import strerror
from pathlib import Path

# linux/netlink.h, linux/rtnetlink.h, linux/if_addr.h
NEW_ADDRESS, DELETE_ADDRESS, ERROR = 20, 21, 2
REQUEST, ACKNOWLEDGE, CREATE, EXCLUSIVE = 1, 4, 0x400, 0x200
LOCAL, ADDRESS, HOST_BITS = 2, 1, 32
ARP, ETHERNET, IPV4, ASK = 0x0806, 1, 0x0800, 1
EVERYBODY = b"\xff" * 6
INTERFACE = "eth0"


class MovingAddress:
    def __init__(self, address: str, interface: str = INTERFACE) -> None:
        self.address, self.interface = socket.inet_aton(address), interface

    def take(self) -> None:
        """Add the address, and announce it."""
        self._change(NEW_ADDRESS, CREATE | EXCLUSIVE, harmless=EEXIST)
        self.announce()

    def leave(self) -> None:
        """Remove the address; do nothing without it."""
        self._change(DELETE_ADDRESS, 0, harmless=EADDRNOTAVAIL)

    def announce(self) -> None:
        """Tell the link where the address is; a lost announcement is made good by the next one."""
        with suppress(OSError), socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ARP)) as link:
            link.bind((self.interface, ARP))
            own = bytes.fromhex(Path(f"/sys/class/net/{self.interface}/address").read_text().strip().replace(":", ""))
            link.send(announcement(own, self.address))

    def _change(self, kind: int, flags: int, harmless: int) -> None:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as kernel:
            kernel.send(request(kind, flags, socket.if_nametoindex(self.interface), self.address))
            answer = kernel.recv(4096)
        code = -struct.unpack_from("=i", answer, 16)[0] if struct.unpack_from("=H", answer, 4)[0] == ERROR else 0
        if code not in (0, harmless):
            raise OSError(code, f"{self.interface}: {strerror(code)}")


def request(kind: int, flags: int, interface: int, address: bytes) -> bytes:
    body = struct.pack("=BBBBI", socket.AF_INET, HOST_BITS, 0, 0, interface)
    body += b"".join(struct.pack("=HH4s", 8, name, address) for name in (LOCAL, ADDRESS))
    return struct.pack("=IHHII", 16 + len(body), kind, REQUEST | ACKNOWLEDGE | flags, 1, 0) + body


def announcement(own: bytes, address: bytes) -> bytes:
    """Return a gratuitous ARP request: every pod of the link corrects the entry that it has of this address."""
    head = EVERYBODY + own + struct.pack("!H", ARP) + struct.pack("!HHBBH", ETHERNET, IPV4, 6, 4, ASK)
    return head + own + address + bytes(6) + address
