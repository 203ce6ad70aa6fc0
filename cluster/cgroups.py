"""A pod's writable part of this machine's cgroups.

On Kubernetes a RuntimeClass provides it (containerd's `cgroup_writable`). Docker mounts cgroups read-only, so each
hierarchy that the role writes to is bind-mounted, from the pod's own directory only:

/sys/fs/cgroup/memory/minivm-NAME/POD        the pod's limits, which it cannot change
/sys/fs/cgroup/memory/minivm-NAME/POD/own    /sys/fs/cgroup/memory in the pod; docker puts the container below it
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cluster import ClusterError
from cluster.manifests import PodSpec
from cluster.roles import HIERARCHIES

# The value of the chart's runtimeClassName here.
RUNTIME_CLASS = "cgroup-writable"
ROOT = Path("/sys/fs/cgroup")
# Devices that runc allows every container. Without this list, a process that may write below could allow every device.
DEVICES = (
    *("c *:* m", "b *:* m"),  # creating a node needs a capability, and using it a rule of its own
    *(f"c 1:{minor} rwm" for minor in (3, 5, 7, 8, 9)),  # null, zero, full, random, urandom
    *("c 5:0 rwm", "c 5:1 rwm", "c 5:2 rwm", "c 136:* rwm"),  # terminals
    "c 10:200 rwm",  # tun
)
PATIENCE = 5.0


def explain_refusal(info: Mapping[str, Any], *, root: Path = ROOT) -> str:
    """Return why pods cannot have writable cgroups here, from the engine's info; "" if they can."""
    version, driver = str(info.get("CgroupVersion", "1")), str(info.get("CgroupDriver", ""))
    if version != "1":
        return f"docker keeps cgroup v{version} read-only in a container that is not privileged"
    if driver != "cgroupfs":
        return f"docker leaves cgroups to {driver}"
    missing = sorted({name for names in HIERARCHIES.values() for name in names if not (root / name).is_dir()})
    if missing:
        return f"this machine has no cgroup v1 hierarchy {', '.join(missing)}"
    locked = sorted({name for names in HIERARCHIES.values() for name in names if not writable(root / name)})
    return f"{root}/{locked[0]} is not writable for this user" if locked else ""


def writable(directory: Path) -> bool:
    return os.access(directory, os.W_OK | os.X_OK)


def wants_cgroups(pod: PodSpec) -> bool:
    """Return whether the pod wants writable cgroups; refuse other requests to the runtime."""
    if pod.privileged:
        hint = f"runtimeClassName: {RUNTIME_CLASS}, in place of cgroup: true"
        raise ClusterError(f"start {pod.name}", "no pod is privileged on one machine", hint=hint)
    if pod.runtime_class not in ("", RUNTIME_CLASS):
        problem = f"there is no RuntimeClass {pod.runtime_class} on one machine"
        raise ClusterError(f"start {pod.name}", problem, hint=f"{RUNTIME_CLASS} is")
    return bool(pod.runtime_class)


def name_parent(cluster: str, pod: str) -> str:
    """Return the container's cgroup parent."""
    return f"/minivm-{cluster}/{pod}/own"


def make(cluster: str, pod: str, role: str, *, memory: int, root: Path = ROOT) -> list[dict[str, Any]]:
    """Create the pod's directories; return the mounts for them."""
    if not HIERARCHIES.get(role):
        raise ClusterError(f"give {pod} its own cgroups", f"a {role} has no use for them")
    for hierarchy in HIERARCHIES[role]:
        limits = root / hierarchy / f"minivm-{cluster}" / pod
        if not (limits / "own").is_dir():
            limits.mkdir(parents=True, exist_ok=True)
            if hierarchy == "devices":
                narrow(limits)
            (limits / "own").mkdir()
        if hierarchy == "memory" and memory:
            # The upper limit applies; the pod reads the lower one.
            for directory in (limits, limits / "own"):
                (directory / "memory.limit_in_bytes").write_text(str(memory))
    return [
        {"Type": "bind", "Source": f"{root}/{name}{name_parent(cluster, pod)}", "Target": f"/sys/fs/cgroup/{name}"}
        for name in HIERARCHIES[role]
    ]


def narrow(directory: Path) -> None:
    (directory / "devices.deny").write_text("a")
    for rule in DEVICES:
        (directory / "devices.allow").write_text(rule)


def remove(cluster: str, pod: str = "", *, root: Path = ROOT) -> None:
    """Remove the directories of a deleted pod, or of the whole cluster, in every hierarchy."""
    for top in root.glob(f"*/minivm-{cluster}/{pod}" if pod else f"*/minivm-{cluster}"):
        prune(top)


def prune(top: Path) -> None:
    """Remove a directory tree, leaves first. A directory stays busy for a moment after its last process ended."""
    deadline = time.monotonic() + PATIENCE
    while top.is_dir():
        for directory, _, _ in os.walk(top, topdown=False):
            with contextlib.suppress(OSError):
                Path(directory).rmdir()
        if top.is_dir():
            if time.monotonic() > deadline:
                raise ClusterError(f"remove {top}", "something still runs in it", hint=f"see {top}/**/cgroup.procs")
            time.sleep(0.02)
