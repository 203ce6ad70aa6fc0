"""Room in cgroups below /sys/fs/cgroup, where the pod may write there: what it may, not what it should, is found here.

cgroup v2 allows no processes beside delegated controllers ("no internal processes"), so what runs already moves to
a leaf of its own. In v1 each hierarchy stands for itself, and who needs it makes his directories there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path

from init.pod.pod import Pod, writable

ROOT = "/sys/fs/cgroup"
LEAF = "minivm"
CONTROLLERS = "cgroup.controllers"
V1 = ("freezer", "memory", "cpuset", "devices", "cpuacct", "cpu", "pids")


def run(pod: Pod) -> str:
    """For a worker: what Slurm can have."""
    found = granted(pod)
    version = "none" if not ({"freezer", "unified"} & set(found)) else "v2" if "unified" in found else "v1"
    pod.publish("cgroup", {"MINIVM_CGROUP": version})
    return summary(pod, found)


def granted(pod: Pod) -> Mapping[str, Path]:
    """Controller -> where this pod may make directories for it; with v2 also `unified`, their common place."""
    root = pod.path(ROOT)
    if not (root / CONTROLLERS).exists():
        return {name: root / name for name in V1 if (root / name).is_dir() and writable(root / name)}
    if not writable(root):
        return {}
    leave(root)
    return dict.fromkeys(["unified", *delegate(root)], root)


def summary(pod: Pod, found: Mapping[str, Path]) -> str:
    names = " ".join(name for name in found if name != "unified")
    if "unified" in found:
        return f"cgroup v2, delegated: {names or 'no controllers'}"
    if found:
        return f"cgroup v1, writable: {names}"
    version = "v2" if (pod.path(ROOT) / CONTROLLERS).exists() else "v1"
    return f"cgroup {version}, read-only: no containment by cgroups"


def leave(root: Path) -> None:
    """Out of the place that is to delegate."""
    leaf = root / LEAF
    leaf.mkdir(exist_ok=True)
    for pid in (root / "cgroup.procs").read_text().split():
        with contextlib.suppress(OSError):  # it has exited, or is a kernel thread
            (leaf / "cgroup.procs").write_text(pid)


def delegate(directory: Path) -> list[str]:
    """Hand a v2 directory's controllers to those below it; in v1 there is nothing to hand on."""
    if not (directory / CONTROLLERS).exists():
        return []
    handed = []
    for name in (directory / CONTROLLERS).read_text().split():
        with contextlib.suppress(OSError):  # one that the parent holds back does not cost the others
            (directory / "cgroup.subtree_control").write_text(f"+{name}")
            handed.append(name)
    return handed
