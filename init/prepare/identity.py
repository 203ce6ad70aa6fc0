"""The pod's name and addresses, for services that need them; nothing here waits for the network."""

from __future__ import annotations

import os
import shlex
import socket
from collections.abc import Mapping

from init.pod.addresses import joined
from init.pod.pod import Pod, writable, write


def run(pod: Pod) -> str:
    name = pod.name
    host, port = pod.controller
    address = pod.setting("MINIVM_POD_IP") or own_address()
    pod.publish(
        "pod", {"MINIVM_POD_NAME": name, "MINIVM_POD_IP": address, "MINIVM_CONTROLLER_ADDRESS": joined(host, port)}
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


# The pod's environment for users: a login shell starts clean and would miss Kubernetes' variables.


# Variables that jobs and shells may see. All others, Kubernetes' tokens above all, stay in PID 1.
PREFIXES = ("NCCL_", "UCX_", "OMPI_MCA_", "PMIX_MCA_", "NVIDIA_", "CUDA_", "MINIVM_USER_")
NAMES = ("TZ", "LANG", "LC_ALL", "http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")
CUDA = "/usr/local/cuda"
FILE = "/run/minivm/profile.sh"
# Every login shell reads this file. It is the same in every pod, so an image may contain it for a read-only root.
HOOK = "/etc/profile.d/minivm.sh"
HOOK_TEXT = b"[ ! -r /run/minivm/profile.sh ] || . /run/minivm/profile.sh\n"


def write_profile(pod: Pod) -> str:
    values = chosen(pod.env)
    lines = ["# Written at boot by minivm from the pod's environment.\n"]
    lines += [f"export {name}={shlex.quote(value)}\n" for name, value in sorted(values.items())]
    if pod.has(f"{CUDA}/bin"):
        lines.append(f'case ":$PATH:" in *:{CUDA}/bin:*) ;; *) export PATH="$PATH:{CUDA}/bin" ;; esac\n')
    write(pod.path(FILE), "".join(lines).encode(), mode=0o644, owner=(0, 0))
    hook = pod.path(HOOK)
    if not hook.exists():
        if not writable(hook.parent):
            return f"{len(values)} variables, and a read-only root without {HOOK}: users' shells miss them"
        write(hook, HOOK_TEXT, mode=0o644, owner=(0, 0))
    return f"{len(values)} variables for users' shells"


def chosen(env: Mapping[str, str]) -> dict[str, str]:
    """Select the variables: MINIVM_USER_X=1 reaches users as X=1, others under their own names."""
    selected = {}
    for name, value in env.items():
        if name in NAMES or name.startswith(PREFIXES):
            own_name = name.removeprefix("MINIVM_USER_")
            if own_name.replace("_", "a").isalnum() and not own_name[:1].isdecimal():
                selected[own_name] = value
    return selected
