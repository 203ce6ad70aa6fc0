"""Measure a new user's path from `make images` to the first job in sacct, login crowds, job bursts, a restart.

With MINIVM_BENCH_COLD=1 the path begins at a clean clone and builds every image from nothing: some minutes more.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from cluster.local import LocalCluster
from cluster.names import free_port
from cluster.values import Options
from images.engine.docker import DockerEngine

ROOT = Path(__file__).resolve().parents[1]
COLD = "MINIVM_BENCH_COLD"
# Images from nothing have names of their own, so that they replace no other image.
PREFIX = "minivm-bench-path"
LOGINS = 200
BURST = 1000
QUEUED = 50
TARGET = 15.0


def main() -> int:
    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="minivm-bench-")))
        begun = time.monotonic()
        repository = from_nothing(root / "clone", stack) if os.environ.get(COLD) else present()
        options = Options(name="bench", workers=2, repository=repository, port=free_port(22400))
        cluster = LocalCluster(DockerEngine().client, options, root=root)
        cluster.down()
        stack.callback(cluster.down)
        measure(cluster, begun)
    return 0


@contextmanager
def running_cluster(name: str, workers: int = 1, **values: Any) -> Iterator[LocalCluster]:
    """Start a cluster of the images of MINIVM_BUILD_PREFIX; remove it, and first what an earlier run left of it."""
    repository = os.environ.get("MINIVM_BUILD_PREFIX", "minivm")
    options = Options(name=name, workers=workers, repository=repository, overrides=values)
    with tempfile.TemporaryDirectory(prefix="minivm-bench-") as root:
        cluster = LocalCluster(DockerEngine().client, options, root=Path(root))
        cluster.down()
        try:
            cluster.up(port=free_port(22400))
            yield cluster
        finally:
            cluster.down()


def present() -> str:
    """Run `make images` with nothing left to build; return the images' prefix."""
    row("make images, what was left to build", timed(lambda: make(ROOT, "images")))
    row("make images, nothing to build", timed(lambda: make(ROOT, "images")))
    return Options().repository


def from_nothing(clone: Path, stack: ExitStack) -> str:
    """Measure the path from a clean clone; return the images' prefix."""
    row("git clone", timed(lambda: subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True)))
    row("make images: the virtual environment", timed(lambda: make(clone, ".venv/ready")))
    stack.callback(forget_images)
    row("make images: every image, from nothing", timed(lambda: make(clone, "images", MINIVM_BUILD_PREFIX=PREFIX)))
    return PREFIX


def make(directory: Path, target: str, **settings: str) -> None:
    subprocess.run(["make", "-s", target], cwd=directory, env={**os.environ, **settings}, check=True, stdout=2)


def forget_images() -> None:
    engine = DockerEngine()
    for image in engine.images():
        for reference in image.references:
            if reference.startswith(f"{PREFIX}/"):
                engine.remove(reference)


def measure(cluster: LocalCluster, begun: float) -> None:
    up = timed(cluster.up)
    first = timed(lambda: ssh(cluster, "true"))
    job = timed(lambda: two_nodes(cluster))
    for stage, seconds in cluster.stages.spent.items():
        row(f"make up: {stage}", seconds)
    row("make up, all pods ready", up)
    row("make ssh, the first login, home made", first)
    row("2-node job, submitted to output in the shared home", job)
    row("from `make up` to the first 2-node job done", up + first + job, f"target {TARGET:.0f} s")
    row("  and until sacct shows it", timed(lambda: accounted(cluster)))
    row("the whole path, from `make images` on", time.monotonic() - begun)
    crowd(cluster)
    burst(cluster)
    restart(cluster)


def ssh(cluster: LocalCluster, command: str) -> str:
    line = cluster.ssh_command("alice", command)
    line[1:1] = ["-o", "BatchMode=yes", "-o", "ConnectTimeout=60"]
    return subprocess.run(line, check=True, capture_output=True, text=True, timeout=900).stdout


def two_nodes(cluster: LocalCluster) -> None:
    script = "sbatch --parsable -N2 -o first.txt --wrap 'srun hostname' >/dev/null; until [ $(wc -l < first.txt) = 2 ]"
    ssh(cluster, f"touch first.txt; {script}; do sleep 0.05; done")


def accounted(cluster: LocalCluster) -> None:
    ssh(cluster, "until sacct -X -n -P -o state,nnodes | grep -qx 'COMPLETED|2'; do sleep 0.05; done")


def crowd(cluster: LocalCluster) -> None:
    def enter(_: int) -> float | None:
        begun = time.monotonic()
        try:
            ssh(cluster, "true")
        except subprocess.SubprocessError:
            return None
        return time.monotonic() - begun

    begun = time.monotonic()
    with ThreadPoolExecutor(LOGINS) as people:
        done = list(people.map(enter, range(LOGINS)))
    whole = time.monotonic() - begun
    times = sorted(seconds for seconds in done if seconds is not None)
    row(f"{LOGINS} logins at once, the last one in", whole, f"{done.count(None)} failed")
    row("  median login", statistics.median(times))


def burst(cluster: LocalCluster) -> None:
    loop = f"for i in $(seq {BURST}); do sbatch -Q --hold -o /dev/null --wrap true || echo failed; done"
    begun = time.monotonic()
    failed = ssh(cluster, loop).count("failed")
    seconds = time.monotonic() - begun
    row(f"{BURST} jobs submitted one by one", seconds, f"{BURST / seconds:.0f} a second, {failed} failed")
    queued = len(ssh(cluster, "squeue --me -h -o %i").split())
    row("  squeue of all of them", timed(lambda: ssh(cluster, "squeue --me -h >/dev/null")), f"{queued} queued")
    ssh(cluster, "scancel --me")


def restart(cluster: LocalCluster) -> None:
    """Restart the controller under two running and fifty queued jobs."""
    batch = "sbatch -Q -N1 --exclusive -D /tmp -o /dev/null"
    start = f"for i in 1 2; do {batch} -J running --wrap 'sleep 600'; done; {batch} -J queued --array=1-{QUEUED}"
    ssh(cluster, f"{start} --wrap true; until [ $(squeue -h -t R -n running | wc -l) = 2 ]; do sleep 0.1; done")
    manifests, begun = cluster.manifests(), time.monotonic()
    cluster.delete("slurm-controller-0", known=manifests)
    ssh(cluster, f"until {batch} -J after --wrap true 2>/dev/null; do sleep 0.1; done")
    outage = time.monotonic() - begun
    counts = ssh(cluster, "squeue -h -t R -n running | wc -l; squeue -h -r -t PD -n queued | wc -l").split()
    what = f"controller restarted under {QUEUED} queued and 2 running jobs: no submissions for"
    row(what, outage, f"{counts[0]} run on, {counts[1]} are queued")
    cluster.wait_ready(manifests, timeout=60)
    ssh(cluster, "scancel --me")


def timed(call: Callable[[], object]) -> float:
    begun = time.monotonic()
    call()
    return time.monotonic() - begun


def row(what: str, seconds: float, more: str = "") -> None:
    print(f"{what:<72} {seconds:8.2f} s  {more}".rstrip(), flush=True)
