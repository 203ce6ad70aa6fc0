"""Measure what users wait for slurmctld, by the chart's profile: short jobs, a prompt, a large and a small job.

MINIVM_BENCH_SCRIPTS=on runs prolog, epilog and task prolog as usual; without it they are off, and only Slurm's own
part is left.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path

import yaml

from bench.cluster import ssh
from cluster.local import LocalCluster
from cluster.names import free_port
from cluster.render import CHART
from cluster.values import Options
from images.engine.docker import DockerEngine

SHORT, PROMPTS, LARGE, TURNS = 200, 20, 8, 3
CLOCK = """ms() { echo $(( $(date +%s%N) / 1000000 )); }
gone() { until [ -z "$(squeue --me -h)" ]; do sleep 0.1; done; }
"""
BATCH = "sbatch -Q -D /tmp -o /dev/null"
# Each prints milliseconds, one value a line.
SHAPES = {
    f"an array of {SHORT} jobs, all done, s": (
        f"t=$(ms); {BATCH} --array=1-{SHORT} -n1 --wrap true; gone; echo $(( $(ms) - t ))",
        1000,
    ),
    f"{SHORT} submissions, one after the other, s": (
        f"t=$(ms); for i in $(seq {SHORT}); do {BATCH} -n1 --wrap true; done; echo $(( $(ms) - t )); gone",
        1000,
    ),
    "srun true, ms": (f"for i in $(seq {PROMPTS}); do t=$(ms); srun -Q true; echo $(( $(ms) - t )); done", 1),
    "a job on all nodes after the other, ms each": (
        f"t=$(ms); for i in $(seq {LARGE}); do {BATCH} -N2 --exclusive --wrap true; done; gone;"
        f" echo $(( ($(ms) - t) / {LARGE} ))",
        1,
    ),
    "srun true beside a large job that waits, s": (
        f"for i in $(seq {TURNS}); do a=$(sbatch --parsable -D /tmp -t 5 -n1 -o /dev/null --wrap 'sleep 300');"
        ' until [ "$(squeue -h -j $a -o %T)" = RUNNING ]; do sleep 0.05; done;'
        " b=$(sbatch --parsable -D /tmp -t 5 -N2 --exclusive -o /dev/null --wrap true);"
        " t=$(ms); srun -Q -t 1 true; echo $(( $(ms) - t )); scancel $a $b; gone; done",
        1000,
    ),
}


def main() -> int:
    scripts = os.environ.get("MINIVM_BENCH_SCRIPTS") == "on"
    repository = os.environ.get("MINIVM_BUILD_PREFIX", "minivm")
    options = Options(name="bench-waits", workers=2, repository=repository)
    with tempfile.TemporaryDirectory(prefix="minivm-bench-") as root:
        cluster = LocalCluster(DockerEngine().client, options, root=Path(root))
        cluster.down()
        try:
            for profile in yaml.safe_load((CHART / "files/profiles.yaml").read_text()):
                become(cluster, profile, scripts=scripts)
                measure(cluster, profile)
        finally:
            cluster.down()
    return 0


def become(cluster: LocalCluster, profile: str, *, scripts: bool) -> None:
    values = {"slurm": {"profile": profile, "scripts": {"enabled": scripts}}}
    first = not cluster.kubelet.running()
    cluster.options = replace(cluster.options, overrides=values)
    cluster.up(port=free_port(22400) if first else 0)
    ssh(cluster, "srun -N2 true")


def measure(cluster: LocalCluster, profile: str) -> None:
    for what, (script, divisor) in SHAPES.items():
        values = [int(line) for line in ssh(cluster, CLOCK + script).split()]
        print(f"{profile:<12} {what:<52} {statistics.median(values) / divisor:8.2f}", flush=True)
    print(f"{profile:<12} load {os.getloadavg()[0]:.1f}", flush=True)


if __name__ == "__main__":
    main()
