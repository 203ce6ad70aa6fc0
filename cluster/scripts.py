"""Try a tree of scripts on this machine's cluster, as the newest commit of the demo's repository.

Each pod reports its result. The demo's git server accepts no push: everything in that repository runs as root on every
node, unsigned, and every job can reach the port. Only users of the engine may write to it.
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
# Directories beside scripts on a developer's machine.
LEFT_OUT = frozenset({".git", "__pycache__", ".pytest_cache", ".ruff_cache", ".mypy_cache"})


@dataclass(frozen=True, slots=True)
class Fate:
    """Result of a commit in one pod; `why` it was refused, or ""."""

    pod: str
    why: str


def packed(tree: Path, name: str) -> bytes:
    """Pack the tree under `name`, owned by nobody: plain files, directories and links."""

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
    """Commit the tree; return its hash, or the newest commit's if that has the same tree."""
    running = cluster.kubelet.running()
    if DEMO not in running:
        raise ClusterError("try the scripts", f"there is no pod {DEMO} whose repository they could become")
    name = f"scripts-{os.urandom(6).hex()}"
    cluster.kubelet.api.put_archive(running[DEMO].container, "/tmp", packed(tree, name))
    code, output = cluster.exec(DEMO, ["/usr/libexec/minivm/demo-commit", f"/tmp/{name}"], user="nobody")
    if code != 0:
        raise ClusterError("try the scripts", output.strip() or f"demo-commit ended with {code}")
    return output.split()[-1]


def judged(status: str, wanted: str) -> str | None:
    """Evaluate `gitsync status --json`: the reason of a refusal, "" if published, None while neither."""
    try:
        state = json.loads(status)
    except ValueError:
        return None
    if state.get("current") == wanted:
        return ""
    refused = state.get("quarantine") or {}
    return str(refused.get("reason")) if refused.get("commit") == wanted else None


def follow(cluster: LocalCluster, wanted: str, timeout: float) -> Iterable[Fate]:
    """Yield each pod that runs scripts when it takes or refuses the commit."""
    waiting = [pod.name for pod in cluster.manifests().pods if pod.role != "demo"]
    deadline = time.monotonic() + timeout
    for pod in waiting:
        cluster.exec(pod, ["gitsync", "now"])
    while waiting:
        for pod in list(waiting):
            _, output = cluster.exec(pod, ["gitsync", "status", "--json"])
            reason = judged(output, wanted)
            if reason is not None:
                waiting.remove(pod)
                yield Fate(pod, reason)
        if waiting and time.monotonic() > deadline:
            reason = f"after {timeout:.0f} s neither taken nor refused by {', '.join(waiting)}"
            raise ClusterError("try the scripts", reason, hint="gitsync why, in the pod")
        time.sleep(POLL)
