"""Measure commands from a login pod while the controller's pod is replaced on Kubernetes (tests/kubernetes).

`python -m bench controller`. Needs root, Debian 12, and the images of `make images`.
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

from bench.cluster import row
from tests.callers import Calls, calling
from tests.kubernetes.__main__ import names
from tests.kubernetes.kubectl import Kubernetes
from tests.kubernetes.lab import kept
from tests.kubernetes.world import IMAGES, Release
from tests.waiting import until

NODES = 2
TURNS = 10


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="minivm-bench-") as keys, kept(NODES, names(IMAGES), lambda _: None) as lab:
        release = Release(Kubernetes(lab.programs.bin / "kubectl", lab.kubeconfig, lab), Path(keys))
        try:
            return measure(release)
        finally:
            release.shut()


def measure(release: Release) -> int:
    release.install()
    release.wait_ready()
    turns = [replaced(release) for _ in range(TURNS)]
    calls = [calls for _, calls in turns]
    failed = [text for each in calls for text in each.failed]
    row(f"{TURNS} times the controller's pod deleted, to all ready, the slowest", max(seconds for seconds, _ in turns))
    row(f"  the slowest of {sum(each.count for each in calls)} commands meanwhile", max(each.slowest for each in calls))
    print(f"  failed: {len(failed)}, reset: {sum(each.reset for each in calls)}; load {os.getloadavg()[0]:.1f}")
    print(*failed[:5], sep="\n")
    return 1 if failed else 0


def replaced(release: Release) -> tuple[float, Calls]:
    """Replace the controller's pod while alice runs commands in the login pod."""
    into_login = (*release.kubernetes.client, "-n", release.namespace, "exec", "-i", f"{release.name}-login-0", "--")
    with calling(into_login, "alice") as calls:
        until(lambda: release.slurm("squeue", "-h", "-u", "alice"), "commands are run")
        begun = time.monotonic()
        release.kubectl("delete", "pod", f"{release.name}-controller-0")
        release.wait_ready()
        seconds = time.monotonic() - begun
    release.slurm("scancel", "-u", "alice")
    until(lambda: not release.slurm("squeue", "-h", "-u", "alice"), "the held jobs are gone")
    return seconds, calls
