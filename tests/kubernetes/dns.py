"""The lab's DNS: Services, headless Services, the hosts of StatefulSets, and who an address is.

`python -m tests.kubernetes.dns KEYS ADDRESS`; it asks the API server each second, and knows no other names.
"""

from __future__ import annotations

import socket
import struct
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.kubernetes.api import ERRORS, Api

DOMAIN = "svc.cluster.local"
A, PTR = 1, 12
TTL = 5
OK, NO_SUCH_NAME = 0, 3


@dataclass(frozen=True, slots=True)
class Zone:
    addresses: Mapping[str, list[str]] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)


def zone(services: Iterable[Mapping[str, Any]], slices: Iterable[Mapping[str, Any]]) -> Zone:
    addresses: dict[str, list[str]] = {}
    known = {}
    for service in services:
        meta, spec = service["metadata"], service["spec"]
        name = f"{meta['name']}.{meta['namespace']}.{DOMAIN}"
        known[meta["namespace"], meta["name"]] = name, spec
        own = spec.get("clusterIP")
        addresses[name] = [own] if own and own != "None" else []
    for item in slices:
        meta = item["metadata"]
        of = meta["namespace"], meta.get("labels", {}).get("kubernetes.io/service-name")
        if of not in known:
            continue
        name, spec = known[of]
        for endpoint in item.get("endpoints") or []:
            if not (spec.get("publishNotReadyAddresses") or endpoint.get("conditions", {}).get("ready")):
                continue
            if spec.get("clusterIP") == "None":
                addresses[name] += endpoint["addresses"]
            if host := endpoint.get("hostname"):
                addresses.setdefault(f"{host}.{name}", []).extend(endpoint["addresses"])
    names: dict[str, str] = {}
    for name, owned in addresses.items():
        for address in owned:
            key = ".".join(reversed(address.split("."))) + ".in-addr.arpa"
            # A host's own name rather than that of all of them.
            names[key] = max(names.get(key, ""), name, key=len)
    return Zone(addresses, names)


def answer(question: bytes, known: Zone) -> bytes:
    """Answer one question. Names are compared without case and returned as the client wrote them."""
    at, labels = 12, []
    while length := question[at]:
        labels.append(question[at + 1 : at + 1 + length].decode().lower())
        at += 1 + length
    name, (kind,) = ".".join(labels), struct.unpack(">H", question[at + 1 : at + 3])
    asked = question[12 : at + 5]
    records: list[bytes] = []
    code = OK
    if kind == PTR and name in known.names:
        labels = known.names[name].split(".")
        records = [b"".join(bytes([len(label)]) + label.encode() for label in labels) + b"\0"]
    elif name in known.addresses:
        records = [socket.inet_aton(address) for address in known.addresses[name]] if kind == A else []
    elif not any(other.endswith(f".{name}") for other in known.addresses):
        code = NO_SUCH_NAME
    header = question[:2] + struct.pack(">HHHHH", 0x8580 | code, 1, len(records), 0, 0)
    return header + asked + b"".join(record(kind, data) for data in records)


def record(kind: int, data: bytes) -> bytes:
    """Of the name that was asked for, which begins at the twelfth byte."""
    return b"\xc0\x0c" + struct.pack(">HHIH", kind, 1, TTL, len(data)) + data


class Responder:
    def __init__(self, keys: str) -> None:
        self.zone = Zone()
        self.api = Api(keys)

    def follow(self) -> None:
        while True:
            try:
                # The newest version that this release serves: v1beta1 before 1.21, only v1 since 1.25.
                group = self.api.call("/apis/discovery.k8s.io")["preferredVersion"]["groupVersion"]
                slices = self.api.items(f"/apis/{group}/endpointslices")
                self.zone = zone(self.api.items("/api/v1/services"), slices)
            except ERRORS as error:
                # An API server that is away: the names stay as they were.
                print(error, flush=True)
            time.sleep(1)

    def streams(self, address: str) -> None:
        with socket.create_server((address, 53)) as server:
            while True:
                caller, _ = server.accept()
                with caller:
                    try:
                        caller.settimeout(3)
                        reply = answer(caller.recv(4096)[2:], self.zone)
                        caller.sendall(struct.pack(">H", len(reply)) + reply)
                    except (OSError, IndexError, struct.error, UnicodeDecodeError) as error:
                        print(error, flush=True)

    def packets(self, address: str) -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
            server.bind((address, 53))
            while True:
                question, caller = server.recvfrom(4096)
                try:
                    server.sendto(answer(question, self.zone), caller)
                except (OSError, IndexError, struct.error, UnicodeDecodeError) as error:
                    print(error, flush=True)


def main(keys: str, address: str) -> None:
    responder = Responder(keys)
    threading.Thread(target=responder.follow, daemon=True).start()
    threading.Thread(target=responder.streams, args=(address,), daemon=True).start()
    responder.packets(address)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
