"""One authenticated call to slurmctld at boot: it proves the cluster's key, which `munge | unmunge` cannot.

On a worker the same call proves that slurmctld knows this slurmd: registered since its start, at this address. A failed
proof exits with its reason; the service's backoff with jitter repeats it.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time

from init.errors import InitError
from init.places import pod_name
from init.pod.auth import mode, signing
from init.slurm import client
from init.slurm.node import unproven

TYPE_CHECKING = False
if TYPE_CHECKING:
    from init.slurm.node import Node

# Only a worker has it: its preparation wrote its resources (`environment-files` of the service).
WORKER = "MINIVM_SLURMD_CONF"
BORN = "/run/minivm/env/born"
# slurmd sends READY a moment before its registration arrives: pauses between looks, one second in all.
STEPS = (0.05, 0.1, 0.2, 0.3, 0.35)
ONE_START = 5.0  # seconds that one start of slurmd may take


def main() -> int:
    controller = client.address(os.environ)
    try:
        with signing(controller):
            reason = prove(controller)
    except InitError as error:
        reason = error.why
    if reason:
        print(reason, file=sys.stderr)
        return 1
    print(f"{mode()} key proven by {controller}")
    return 0


def prove(controller: str) -> str:
    if WORKER in os.environ:
        return worker(controller)
    client.run([client.SCONTROL, "--oneliner", "show", "partition"], controller)
    return ""


def worker(controller: str) -> str:
    """Return why the node is not proven, else ""."""
    name = pod_name(os.environ)
    own = os.environ.get("MINIVM_POD_IP", "")
    reason = since = ""
    for step in (0.0, *STEPS):
        time.sleep(step)
        # The controller first: a refused key or a wrong clock also keeps slurmd from answering.
        node = client.node(name, controller)
        since = since or local_start(controller)
        reason = unproven(node, name, [own] if own else []) or _old(node, since)
        if not reason:
            forget_birth()
            break
    return reason


def forget_birth() -> None:
    """Remove the drain for a new pod's slurmd: it applies once, and a later start must not repeat it."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(BORN)  # noqa: PTH108 - pathlib costs 8 ms of boot


def _old(node: Node | None, since: str) -> str:
    """Return an error if the registration is older than this pod's slurmd, hence the last pod's."""
    if node is not None and since and node.started < since and not _same_start(node.started, since):
        return f"slurmctld knows {node.name} as of {node.started}, and slurmd started at {since}: not registered"
    return ""


def _same_start(registered: str, started: str) -> bool:
    """Tell if two times are one start: slurmd reads the clock twice, on a busy machine a second or more apart."""
    from datetime import datetime  # imported late: usually they are equal

    return (datetime.fromisoformat(started) - datetime.fromisoformat(registered)).total_seconds() <= ONE_START


def local_start(controller: str) -> str:
    """Ask slurmd for its start time, in slurmctld's format."""
    try:
        text = client.run([client.SCONTROL, "show", "slurmd"], controller)
    except client.SlurmError:
        raise client.SlurmError("ask slurmd", "slurmd of this pod does not answer") from None
    match = re.search(r"^Boot time\s*=\s*(\S+)", text, re.MULTILINE)
    return match[1] if match else ""


if __name__ == "__main__":
    raise SystemExit(main())
