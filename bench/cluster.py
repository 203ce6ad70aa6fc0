"""From `make up` to the first job, a crowd at the door, and a burst of jobs: on a cluster of this machine."""

from __future__ import annotations

import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from cluster.local import LocalCluster, free_port
from cluster.values import Options
from images.engine import Engine

LOGINS = 200
BURST = 1000
TARGET = 15.0


def main() -> int:
    root = Path(tempfile.mkdtemp(prefix="minivm-bench-"))
    options = Options(name="bench", workers=2, port=free_port(22400))
    cluster = LocalCluster(Engine().client, options, root=root)
    cluster.down()
    try:
        return measure(cluster)
    finally:
        cluster.down()
        shutil.rmtree(root, ignore_errors=True)


def measure(cluster: LocalCluster) -> int:
    begun = time.monotonic()
    cluster.up()
    up = time.monotonic() - begun
    first = timed(lambda: ssh(cluster, "true"))
    job = timed(lambda: two_nodes(cluster))
    total = time.monotonic() - begun
    for stage, seconds in cluster.stages.spent.items():
        row(f"up: {stage}", seconds)
    row("up, all pods ready", up)
    row("first login, home made", first)
    row("2-node job, submitted to output in the shared home", job)
    row("from `make up` to the first 2-node job done", total, f"target {TARGET:.0f} s")
    crowd(cluster)
    burst(cluster)
    restart(cluster)
    return 0


def ssh(cluster: LocalCluster, command: str) -> str:
    line = cluster.ssh_command("alice", command)
    line[1:1] = ["-o", "BatchMode=yes", "-o", "ConnectTimeout=60"]
    return subprocess.run(line, check=True, capture_output=True, text=True, timeout=300).stdout


def two_nodes(cluster: LocalCluster) -> None:
    script = "sbatch --parsable -N2 -o first.txt --wrap 'srun hostname' >/dev/null; until [ $(wc -l < first.txt) = 2 ]"
    ssh(cluster, f"touch first.txt; {script}; do sleep 0.05; done")


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
    times = sorted(one for one in done if one is not None)
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
    known, begun = cluster.manifests(), time.monotonic()
    cluster.delete("slurm-controller-0", known=known)
    ssh(cluster, "until sbatch -Q -o /dev/null --wrap true 2>/dev/null; do sleep 0.1; done")
    row("controller pod deleted: until a job can be submitted again", time.monotonic() - begun)
    cluster.wait_ready(known, timeout=60)


def timed(call: Callable[[], object]) -> float:
    begun = time.monotonic()
    call()
    return time.monotonic() - begun


def row(what: str, seconds: float, more: str = "") -> None:
    print(f"{what:<60} {seconds:8.2f} s  {more}".rstrip(), flush=True)
