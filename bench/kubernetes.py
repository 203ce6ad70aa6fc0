"""Measure the chart on a Kubernetes of three machines (tests/kubernetes): the waits of operators and of jobs.

`python -m bench kubernetes`. Needs root, Debian 12, and the images of `make images`. The machines are those of the
tests: Kubernetes notices a lost one after 20 s and its pods go 30 s later; its own defaults are 50 s and 300 s.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from bench.cluster import row, timed
from tests.callers import Calls, calling
from tests.kubernetes.__main__ import names
from tests.kubernetes.kubectl import Kubernetes
from tests.kubernetes.lab import Lab, kept
from tests.kubernetes.world import IMAGES, Release
from tests.waiting import until

NODES = 3
WORKERS = 4
TURNS = 3
CONTROLLER_NODES, CONTROLLER_TURNS = 2, 10


def main() -> int:
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="minivm-bench-") as keys, kept(NODES, names(IMAGES), lambda _: None) as lab:
        row(f"a Kubernetes of {NODES} machines, its images unpacked", time.monotonic() - begun)
        release = Release(Kubernetes(lab.programs.bin / "kubectl", lab.kubeconfig, lab), Path(keys))
        try:
            measure(release, lab)
        finally:
            release.shut()
    return 0


def measure(release: Release, lab: Lab) -> None:
    row("helm install to all ready: 5 pods, nothing there before", took(release, release.install))
    row("a worker without jobs deleted, to all ready, median", median(lambda _: deleted(release, "worker-0")))
    row("the controller deleted, to all ready, median", median(lambda _: deleted(release, "controller-0")))
    row("helm upgrade with another partition, to live, median", median(lambda turn: configured(release, turn)))
    more = {"pools": {"worker": {"replicas": WORKERS}}}
    row(f"{WORKERS} workers in place of 2, to all ready", took(release, lambda: release.upgrade(workers=more)))
    row(f"helm upgrade of {WORKERS} workers without jobs, one by one", rolled(release))
    lost(release, lab)
    release.shut()
    release.uninstall()
    row("helm uninstall, to no pod left", timed(lambda: until(lambda: not release.pods(), "no pod", within=180)))
    row("helm install with keys and volumes kept, to all ready", took(release, release.install))


def median(act: Callable[[int], float]) -> float:
    return statistics.median(act(turn) for turn in range(TURNS))


def took(release: Release, act: Callable[[], object]) -> float:
    begun = time.monotonic()
    act()
    release.wait_ready()
    return time.monotonic() - begun


def deleted(release: Release, pod: str) -> float:
    return took(release, lambda: release.kubectl("delete", "pod", f"{release.name}-{pod}"))


def configured(release: Release, turn: int) -> float:
    def live() -> bool:
        return f"PartitionName=night{turn}" in release.slurm("scontrol", "show", "partition")

    begun = time.monotonic()
    release.upgrade(slurm={"partitions": {f"night{turn}": {"pools": ["worker"]}}})
    until(live, "the partition is live", within=180)
    return time.monotonic() - begun


def rolled(release: Release) -> float:
    before = release.lives()

    def new() -> bool:
        after = release.lives()
        return all(after.get(f"worker-{n}", before[f"worker-{n}"]) != before[f"worker-{n}"] for n in range(WORKERS))

    begun = time.monotonic()
    release.upgrade(workers={"defaults": {"env": {"MINIVM_USER_ROLLED": "yes"}}})
    until(new, "every worker is another", within=600)
    release.wait_ready()
    return time.monotonic() - begun


def lost(release: Release, lab: Lab) -> None:
    """Cut the power of a machine with a worker and its job, and without the controller."""
    victim = release.away()
    node = release.node_of(victim)
    job = release.submit("alice", "-w", f"{release.name}-{victim}", script="sleep 6000")
    release.wait_for(job, "RUNNING")
    release.shut()
    begun = time.monotonic()
    lab.power_cut(node)
    row("a machine lost, to its pods taken for gone", since(begun, lambda: victim in release.leaving()))
    row("  to its job requeued (SlurmdTimeout is 120)", since(begun, lambda: release.restarts(job) == 1))
    release.slurm("scancel", job)
    lab.power_back(node)
    row("the machine is back, to all ready", timed(release.wait_ready))


def since(begun: float, look: Callable[[], bool]) -> float:
    until(look, "it happens", within=400)
    return time.monotonic() - begun


# The controller's pod replaced.


def controller() -> int:
    """Measure commands from a login pod while the controller's pod is replaced (`python -m bench controller`)."""
    with (
        tempfile.TemporaryDirectory(prefix="minivm-bench-") as keys,
        kept(CONTROLLER_NODES, names(IMAGES), lambda _: None) as lab,
    ):
        release = Release(Kubernetes(lab.programs.bin / "kubectl", lab.kubeconfig, lab), Path(keys))
        try:
            return measure_controller(release)
        finally:
            release.shut()


def measure_controller(release: Release) -> int:
    release.install()
    release.wait_ready()
    turns = [replace_controller(release) for _ in range(CONTROLLER_TURNS)]
    calls = [calls for _, calls in turns]
    failed = [text for each in calls for text in each.failed]
    row(
        f"{CONTROLLER_TURNS} times the controller's pod deleted, to all ready, the slowest",
        max(seconds for seconds, _ in turns),
    )
    row(f"  the slowest of {sum(each.count for each in calls)} commands meanwhile", max(each.slowest for each in calls))
    print(f"  failed: {len(failed)}, reset: {sum(each.reset for each in calls)}; load {os.getloadavg()[0]:.1f}")
    print(*failed[:5], sep="\n")
    return 1 if failed else 0


def replace_controller(release: Release) -> tuple[float, Calls]:
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


if __name__ == "__main__":
    main()
