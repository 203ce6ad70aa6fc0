"""What the scripts of jobs cost those who wait for jobs: short ones, one after the other and many, with scripts and
without, in one cluster and in turn.

The scripts are taken out of slurm.conf by a value of the chart, and put back: the pods, the machine and the hour stay.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from bench.cluster import row, ssh
from cluster.local import LocalCluster
from cluster.ports import free_port
from cluster.values import Options
from images.engine.docker import Engine

TURNS = 3
SHORT = (200, 2000)
SRUNS = 15


def main() -> int:
    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="minivm-bench-")))
        options = Options(name="benchjobs", workers=2, repository=Options().repository, port=free_port(22400))
        cluster = LocalCluster(Engine().client, options, root=root)
        cluster.down()
        stack.callback(cluster.down)
        cluster.up()
        measure(cluster)
    return 0


def measure(cluster: LocalCluster) -> None:
    found: dict[tuple[str, bool], list[float]] = {}
    for turn in range(TURNS):
        for with_scripts in (False, True):
            scripts(cluster, enabled=with_scripts)
            for what, seconds in figures(cluster, largest=turn == 0):
                found.setdefault((what, with_scripts), []).append(seconds)
    for what in dict.fromkeys(what for what, _ in found):
        without, within = (statistics.median(found[what, enabled]) for enabled in (False, True))
        row(f"{what}, without scripts", without)
        row(f"{what}, with", within, f"{within / without:.2f} times, {(within - without) * 1000:+.0f} ms")


def scripts(cluster: LocalCluster, *, enabled: bool) -> None:
    """In the controller's own file, read anew; the nodes have it from there."""
    names = "Prolog|Epilog|TaskProlog"
    edit = f"s/^#?({names})=/\\1=/" if enabled else f"s/^({names})=/#\\1=/"
    for command in (["sed", "-E", "-i", edit, "/etc/slurm/slurm.conf"], ["scontrol", "reconfigure"]):
        code, output = cluster.exec("slurm-controller-0", command)
        if code:
            raise RuntimeError(f"{command}: {output}")


def figures(cluster: LocalCluster, *, largest: bool) -> Iterator[tuple[str, float]]:
    yield "srun true", statistics.median(float(ssh(cluster, srun())) for _ in range(SRUNS))
    for count in SHORT if largest else SHORT[:1]:
        yield f"an array of {count} one-CPU `true` jobs", float(ssh(cluster, array(count)))


def srun() -> str:
    return "a=$(date +%s%N); srun true; b=$(date +%s%N); echo $(((b - a) / 1000000))e-3"


def array(count: int) -> str:
    """Asked by squeue, whose own second is not in it."""
    wait = "while squeue -h -r -n burst -o %i | grep -q .; do sleep 0.1; done"
    submit = f"sbatch -Q -J burst -n1 -o /dev/null --array=1-{count} --wrap true"
    return f"cd /tmp; a=$(date +%s%N); {submit}; {wait}; b=$(date +%s%N); echo $(((b - a) / 1000000))e-3"


if __name__ == "__main__":
    raise SystemExit(main())
