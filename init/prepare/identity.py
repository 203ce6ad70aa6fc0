"""The pod's name and addresses, for services that need them; nothing here waits for the network."""

from __future__ import annotations

import os
import socket

from init.pod.addresses import joined
from init.pod.pod import Pod


def run(pod: Pod) -> str:
    name = pod.name
    host, port = pod.controller
    address = pod.setting("MINIVM_POD_IP") or own_address()
    pod.publish(
        "pod",
        {
            "MINIVM_POD_NAME": name,
            "MINIVM_POD_IP": address,
            "MINIVM_CONTROLLER_ADDRESS": joined(host, port),
        },
    )
    notes = [f"{name} at {address or 'no address'}"]
    if os.uname().nodename.split(".")[0] != name:
        notes.append(f"host name is {os.uname().nodename}")
    if address and not _named(pod, address):
        notes.append(f"/etc/hosts does not name {address}")
    return ", ".join(notes)


def own_address() -> str:
    """Return the source address of outgoing packets; sends no packet."""
    for family, target in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((target, 9))
                return str(probe.getsockname()[0])
        except OSError:
            continue
    return ""


def _named(pod: Pod, address: str) -> bool:
    return any(line.split()[:1] == [address] for line in (pod.text("/etc/hosts") or "").splitlines())
