"""Room in cgroups below /sys/fs/cgroup, where the pod may write there: what it may, not what it should, is found here.

cgroup v2 allows no processes beside delegated controllers ("no internal processes"), so what runs already moves to
a leaf of its own. In v1 each hierarchy stands for itself, and who needs it makes his directories there.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

from init.pod.pod import Pod, writable

ROOT = "/sys/fs/cgroup"
LEAF = "minivm"
CONTROLLERS = "cgroup.controllers"
TURNS = 20  # looks at who is in a place: some are born while the others are moved
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
    _move(root, leaf)


def gather(pod: Pod) -> str:
    """Before slurmd starts: the pod's own processes back in their leaf. At each start of its slurmd Slurm 24.11 moves
    all that it finds beside it, PID 1 too, into a directory below, and the next time into one below that, until a path
    is too long for it. It takes them down one step again, and never further.
    """
    leaf = pod.path(f"{ROOT}/{LEAF}")
    below = [Path(name) for name, _, _ in os.walk(leaf, topdown=False)][:-1]  # the deepest first
    if not below or not writable(leaf):
        return "all in one place"
    for directory in (*below, leaf):
        _withhold(directory)
    for directory in below:
        _move(directory, leaf)
        with contextlib.suppress(OSError):  # a child was born there in this moment: the next start takes it along
            directory.rmdir()
    return f"all back in {leaf}, from below it"


def _move(place: Path, to: Path) -> None:
    for _ in range(TURNS):
        with contextlib.suppress(OSError):  # the place has gone
            if not (pids := (place / "cgroup.procs").read_text().split()):
                return
            for pid in pids:
                with contextlib.suppress(OSError):  # it has exited, or is a kernel thread
                    (to / "cgroup.procs").write_text(pid)


def _withhold(directory: Path) -> None:
    """Who hands controllers on may have no processes."""
    with contextlib.suppress(OSError):
        for name in (directory / "cgroup.subtree_control").read_text().split():
            (directory / "cgroup.subtree_control").write_text(f"-{name}")


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
