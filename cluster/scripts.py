"""A tree of scripts, tried on the cluster of this machine: it becomes the newest commit of the demo's repository, and
each pod tells what became of it.

The demo's git server takes no push: whatever is in that repository runs as root on every node, unsigned, and every job
can reach the port. Who may write to it is who may use the engine.
"""

from __future__ import annotations

import io
import json
import os
import tarfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from cluster.errors import ClusterError
from cluster.local import LocalCluster
from cluster.values import RELEASE

DEMO = f"{RELEASE}-demo-0"
NOBODY = 65534
POLL = 0.2
# What lies beside scripts on a developer's machine.
LEFT_OUT = frozenset({".git", "__pycache__", ".pytest_cache", ".ruff_cache", ".mypy_cache"})


@dataclass(frozen=True, slots=True)
class Fate:
    """What became of a commit in one pod; `why` it was refused, or empty."""

    pod: str
    why: str


def packed(tree: Path, name: str) -> bytes:
    """The tree under `name`, as nobody's: plain files, directories and links."""

    def keep(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        if LEFT_OUT & set(member.name.split("/")) or not (member.isreg() or member.isdir() or member.issym()):
            return None
        member.uid = member.gid = NOBODY
        member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
        return member

    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        archive.add(tree, arcname=name, filter=keep)
    return out.getvalue()


def commit(cluster: LocalCluster, tree: Path) -> str:
    """The hash of the commit that holds the tree; of the newest one where it holds the tree already."""
    there = cluster.kubelet.running()
    if DEMO not in there:
        raise ClusterError("try the scripts", f"there is no pod {DEMO} whose repository they could become")
    name = f"scripts-{os.urandom(6).hex()}"
    cluster.kubelet.api.put_archive(there[DEMO].container, "/tmp", packed(tree, name))
    code, said = cluster.exec(DEMO, ["/usr/libexec/minivm/demo-commit", f"/tmp/{name}"], user="nobody")
    if code != 0:
        raise ClusterError("try the scripts", said.strip() or f"demo-commit ended with {code}")
    return said.split()[-1]


def judged(status: str, wanted: str) -> str | None:
    """From `gitsync status --json`: why the commit was refused, empty for a published one, None while it is neither."""
    try:
        found = json.loads(status)
    except ValueError:
        return None
    if found.get("current") == wanted:
        return ""
    refused = found.get("quarantine") or {}
    return str(refused.get("reason")) if refused.get("commit") == wanted else None


def follow(cluster: LocalCluster, wanted: str, timeout: float) -> Iterable[Fate]:
    """Each pod that runs scripts, as it takes or refuses the commit."""
    waiting = [pod.name for pod in cluster.manifests().pods if pod.role != "demo"]
    deadline = time.monotonic() + timeout
    for pod in waiting:
        cluster.exec(pod, ["gitsync", "now"])
    while waiting:
        for pod in list(waiting):
            _, said = cluster.exec(pod, ["gitsync", "status", "--json"])
            why = judged(said, wanted)
            if why is not None:
                waiting.remove(pod)
                yield Fate(pod, why)
        if waiting and time.monotonic() > deadline:
            why = f"after {timeout:.0f} s neither taken nor refused by {', '.join(waiting)}"
            raise ClusterError("try the scripts", why, hint="gitsync why, in the pod")
        time.sleep(POLL)
