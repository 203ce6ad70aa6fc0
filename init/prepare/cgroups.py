"""Room for Slurm below /sys/fs/cgroup, where the pod may write there: what it may, not what it should, is found here.

cgroup v2 allows no processes beside delegated controllers ("no internal processes"), so what runs already moves to
a leaf of its own. In v1 Slurm makes its directories itself, per controller.
"""

from __future__ import annotations

from pathlib import Path

from init.prepare.pod import Pod, writable

ROOT = "/sys/fs/cgroup"
LEAF = "minivm"
V1 = ("freezer", "memory", "cpuset", "devices", "cpuacct")


def run(pod: Pod) -> str:
    root = pod.path(ROOT)
    if (root / "cgroup.controllers").exists():
        text, usable = _v2(root)
    else:
        found = [name for name in V1 if (root / name).is_dir() and writable(root / name)]
        usable = "freezer" in found
        text = f"cgroup v1, writable: {' '.join(found) or 'none'}"
    version = "none" if not usable else "v2" if (root / "cgroup.controllers").exists() else "v1"
    pod.publish("cgroup", {"MINIVM_CGROUP": version})
    return text


def _v2(root: Path) -> tuple[str, bool]:
    if not writable(root):
        return "cgroup v2, read-only: no containment of jobs by cgroups", False
    leaf = root / LEAF
    leaf.mkdir(exist_ok=True)
    moved = 0
    for pid in (root / "cgroup.procs").read_text().split():
        try:
            (leaf / "cgroup.procs").write_text(pid)
            moved += 1
        except OSError:
            continue  # it has exited, or is a kernel thread
    available = (root / "cgroup.controllers").read_text().split()
    enabled = []
    for name in available:
        try:
            (root / "cgroup.subtree_control").write_text(f"+{name}")
            enabled.append(name)
        except OSError:
            continue  # one that the parent holds back does not cost the others
    return f"cgroup v2, moved {moved} processes, delegated: {' '.join(enabled) or 'no controllers'}", True
