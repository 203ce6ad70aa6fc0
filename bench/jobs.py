"""Measure what job scripts cost: short jobs one after the other, many at once, and many that end together.

Each runs without scripts, with /bin/true as each script (Slurm's own part), and with minivm's, in turn in one cluster.
Jobs that end together also run in a second cluster: a job in cgroups (if this machine has them) has two daemons, a
job with the chart's defaults has one.

The bench changes slurm.conf on the controller and reconfigures: the pods and the machine stay the same.
MINIVM_BENCH_HOOKS=on adds runs with each of the three scripts alone as /bin/true. MINIVM_BENCH_FAST_SCRIPTS=on measures
with slurm.fastScripts, which is off otherwise.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from bench.cluster import ssh
from cluster.local import LocalCluster
from cluster.names import free_port
from cluster.values import Options
from images.engine.docker import DockerEngine

TURNS = int(os.environ.get("MINIVM_BENCH_TURNS", "3"))
# Two arrays are as large as slurmctld lets one be. They come last and once: slurmctld keeps their records for minutes.
SHORT, MANY = 200, 2000
LARGEST_ARRAY = 1000
SRUNS, BY_HAND, CROWD = 15, 200, 64
CONTROLLER, WORKERS = "slurm-controller-0", ("slurm-worker-0", "slurm-worker-1")
PROGRAMS = {"Prolog": "prolog", "Epilog": "epilog", "TaskProlog": "task_prolog"}
OURS = {key: f"/usr/libexec/minivm/{program}" for key, program in PROGRAMS.items()}
WAYS = {"without scripts": {}, "with /bin/true": dict.fromkeys(PROGRAMS, "/bin/true"), "with": OURS}
# In which mode: slurm.fastScripts, off as the chart's default is.
FAST = os.environ.get("MINIVM_BENCH_FAST_SCRIPTS") == "on"
if os.environ.get("MINIVM_BENCH_HOOKS") == "on":
    WAYS |= {f"/bin/true {key}": {key: "/bin/true"} for key in PROGRAMS}
BASE = "without scripts"
Measure = Callable[[LocalCluster], Iterator[tuple[str, float]]]
WIDTH = 68  # of what a line is about
USAGE = "cd /sys/fs/cgroup; cat cpuacct/cpuacct.usage 2>/dev/null || awk '/usage_usec/ {print $2 * 1000}' cpu.stat"
# In a worker, by hand: what slurmd starts for a job, from start to end, and what the runner and its forks spend on it.
STARTS = """
import json, os, pwd, time
user = pwd.getpwnam("alice")
def text(pid, name):
    try:
        return open(f"/proc/{pid}/{name}").read()
    except OSError:
        return ""  # one that has just ended
(runner,) = [pid for pid in os.listdir("/proc") if pid.isdigit() and text(pid, "cmdline").endswith("health.runner\\0")
             and text(pid, "stat").rpartition(")")[2].split()[1:2] == ["1"]]
def ticks(pid):
    return sum(map(int, text(pid, "stat").rpartition(")")[2].split()[11:15]))
def used():
    forks = open(f"/proc/{runner}/task/{runner}/children").read().split()
    return sum(map(ticks, (runner, *forks))) * 1000 / os.sysconf("SC_CLK_TCK")
said = {}
for kind in ("prolog", "task_prolog", "epilog"):
    walls, spent = [], 0.0
    for job in range(9000000, 9000001 + COUNT):
        if job == 9000001:
            # The first one is of a node that no round of checks has looked at, and looks itself.
            walls, spent, before = [], 0.0, used()
        env = {"SLURM_JOB_ID": str(job), "SLURM_JOB_UID": str(user.pw_uid), "SLURM_JOB_GID": str(user.pw_gid)}
        if kind == "task_prolog":
            os.setresgid(user.pw_gid, user.pw_gid, 0); os.setresuid(user.pw_uid, user.pw_uid, 0)
        begun = time.monotonic()
        null = [(os.POSIX_SPAWN_OPEN, fd, "/dev/null", os.O_RDWR, 0) for fd in (1, 2)]
        pid = os.posix_spawn(f"/usr/libexec/minivm/{kind}", [kind], env, file_actions=null)
        _, status, usage = os.wait4(pid, 0)
        walls.append((time.monotonic() - begun) * 1000)
        os.setresuid(0, 0, 0); os.setresgid(0, 0, 0)
        spent += (usage.ru_utime + usage.ru_stime) * 1000
        assert status == 0
    time.sleep(0.2)
    walls.sort()
    said[kind] = walls[COUNT // 2], walls[COUNT * 99 // 100], walls[-1], (spent + used() - before) / COUNT
print(json.dumps(said))
"""
# Runs in a worker: holds all jobs at a gate until a signal comes, then prints when it released them.
KEEPER = """
rm -f /run/gate /run/word; touch /run/gate; chmod 644 /run/gate; mkfifo /run/word
exec 9>/run/gate; flock -x 9; (read word < /run/word; date +%s%N > /run/opened) &
"""


def main() -> int:
    figures = Figures()
    with cluster_of("") as cluster:
        measure(cluster, figures)
        by_cgroup = tracking(cluster) == "cgroup"
    if by_cgroup:
        with cluster_of("linuxproc") as cluster:
            figures.turns(cluster, crowd)
    figures.tell()
    print(f"load {os.getloadavg()[0]:.1f}, {os.getloadavg()[1]:.1f}")
    return 0


@contextmanager
def cluster_of(proctrack: str) -> Iterator[LocalCluster]:
    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="minivm-bench-")))
        repository = os.environ.get("MINIVM_BUILD_PREFIX", Options().repository)
        # Where 64 jobs run beside each other on two processors.
        shared: dict[str, Any] = {
            "slurm": {
                "fastScripts": FAST,
                "partitions": {"crowd": {"pools": ["worker"], "options": {"OverSubscribe": "FORCE:64"}}},
            }
        }
        options = Options(
            "benchjobs", repository=repository, port=free_port(22400), proctrack=proctrack, overrides=shared
        )
        cluster = LocalCluster(DockerEngine().client, options, root=root)
        cluster.down()
        stack.callback(cluster.down)
        cluster.up()
        yield cluster


class Figures:
    """Figures by measure, then by way, one for each turn."""

    def __init__(self) -> None:
        self.figures: dict[str, dict[str, list[float]]] = {}

    def turns(self, cluster: LocalCluster, *measures: Measure, count: int = TURNS) -> None:
        for _ in range(count):
            for way in WAYS:
                become(cluster, way)
                for what, figure in (each for measure in measures for each in measure(cluster)):
                    self.figures.setdefault(what, {}).setdefault(way, []).append(figure)
                    # Said when it is known: a run that is cut has given what it had.
                    print(f"{what:<{WIDTH}} {way:<16} {figure:8.2f}   (one turn)", flush=True)

    def tell(self) -> None:
        for what, ways in self.figures.items():
            without = statistics.median(ways[BASE])
            for way in ways:
                median = statistics.median(ways[way])
                print(
                    f"{what:<{WIDTH}} {way:<16} {median:8.2f}   {median / without:5.2f} times, {median - without:+.2f}"
                )


def measure(cluster: LocalCluster, figures: Figures) -> None:
    by_hand(cluster)
    begun = time.time()
    figures.turns(cluster, steps, partial(burst, count=SHORT), crowd)
    figures.turns(cluster, partial(burst, count=MANY), count=1)
    for kind in ("prolog", "epilog"):
        seconds = sorted(entry["seconds"] * 1000 for entry in records(cluster, begun) if entry["kind"] == kind)
        p99 = seconds[len(seconds) * 99 // 100]
        summary = f"{statistics.median(seconds):.1f}, p99 {p99:.1f}, worst {seconds[-1]:.1f} ms of {len(seconds)}"
        print(f"{kind}, by its record: {summary}")


def by_hand(cluster: LocalCluster) -> None:
    output = run(cluster, WORKERS[0], "/usr/bin/python3", "-c", STARTS.replace("COUNT", str(BY_HAND)))
    for kind, (median, p99, worst, cpu) in json.loads(output).items():
        summary = f"median {median:.1f} ms, p99 {p99:.1f}, worst {worst:.1f}, processor time {cpu:.1f}"
        print(f"{kind}, by hand: {summary}", flush=True)


def become(cluster: LocalCluster, way: str) -> None:
    """Change the controller's slurm.conf and reconfigure; wait until the nodes have it."""
    edits = []
    for key in PROGRAMS:
        program = WAYS[way].get(key)
        edits += ["-e", f"s,^#?{key}=.*,{key}={program}," if program else f"s,^#?{key}=.*,#{key}=,"]
    run(cluster, CONTROLLER, "sed", "-E", "-i", *edits, "/etc/slurm/slurm.conf")
    run(cluster, CONTROLLER, "scontrol", "reconfigure")
    lines = f"^#?({'|'.join(PROGRAMS)})="
    settings = run(cluster, CONTROLLER, "grep", "-E", lines, "/etc/slurm/slurm.conf")
    for worker in WORKERS:
        while cluster.exec(worker, ["grep", "-E", lines, "/run/slurm/conf/slurm.conf"])[1] != settings:
            time.sleep(0.1)
    # Warm up each node with a job that is not timed.
    ssh(cluster, "srun -N2 true")


def steps(cluster: LocalCluster) -> Iterator[tuple[str, float]]:
    yield "srun true, ms", statistics.median(float(ssh(cluster, srun())) for _ in range(SRUNS)) * 1000


def burst(cluster: LocalCluster, count: int) -> Iterator[tuple[str, float]]:
    before = used(cluster)
    yield f"{count} one-CPU `true` jobs in arrays, s", float(ssh(cluster, arrays(count)))
    yield f"processor time of the workers for each of {count}, ms", (used(cluster) - before) / count


def used(cluster: LocalCluster) -> float:
    """Return the processor milliseconds of the workers' pods. Retries once: docker may lose a command's output."""

    def ask(worker: str) -> str:
        return run(cluster, worker, "sh", "-c", USAGE)

    return sum(int(ask(worker) or ask(worker)) for worker in WORKERS) / 1e6


def srun() -> str:
    return "a=$(date +%s%N); srun true; b=$(date +%s%N); echo $(((b - a) / 1000000))e-3"


def arrays(count: int) -> str:
    """Return the command that measures a burst of jobs.

    It asks squeue for their end only once the nodes are idle: squeue lists every record, of finished jobs too, and that
    cost belongs to no job.
    """
    idle = f'[ "$(sinfo -h -t idle -o %D)" = {len(WORKERS)} ]'
    wait = f"until {idle} && ! squeue -h -r -n burst -o %i | grep -q .; do sleep 0.2; done"
    each = min(count, LARGEST_ARRAY)
    submit = f"sbatch -Q -J burst -n1 --mem=50M -o /dev/null --array=1-{each} --wrap true || exit; " * (count // each)
    return f"cd /tmp; a=$(date +%s%N); {submit} {wait}; b=$(date +%s%N); echo $(((b - a) / 1000000))e-3"


def crowd(cluster: LocalCluster) -> Iterator[tuple[str, float]]:
    """Measure from the moment in which all jobs may end until slurmctld has none of them on the node.

    The observer starts before they end and asks every 50 ms: started later and asking every 20 ms, it took an eighth of
    the processors.
    """
    node = WORKERS[0]
    run(cluster, node, "bash", "-c", f"{KEEPER} exec 9>&-")
    submit = f"sbatch -Q -J crowd -p crowd -w {node} -n1 --mem=1M -o /dev/null --array=1-{CROWD}"
    running = f'until [ "$(squeue -h -r -n crowd -t R -o %i | wc -l)" = {CROWD} ]; do sleep 0.2; done'
    ssh(cluster, f"cd /tmp; {submit} --wrap 'exec flock -s /run/gate true' && {running}")
    while int(run(cluster, node, "sh", "-c", "ps -C flock -o user= | grep -c alice || true")) < CROWD:
        time.sleep(0.2)
    looks = f'echo > /run/looks; while [ -n "$(squeue -h -w {node} -o %i)" ]; do sleep 0.05; done; date +%s%N'
    with ThreadPoolExecutor(1) as pool:
        free = pool.submit(run, cluster, CONTROLLER, "sh", "-c", looks)
        run(cluster, CONTROLLER, "sh", "-c", "until rm /run/looks 2> /dev/null; do sleep 0.05; done")
        run(cluster, node, "sh", "-c", "echo go > /run/word")
    took = (int(free.result()) - int(run(cluster, node, "cat", "/run/opened"))) / 1e9
    yield f"{CROWD} jobs end on a node at once ({tracking(cluster)}), until it is free, s", took


def tracking(cluster: LocalCluster) -> str:
    """Return how Slurm tracks jobs."""
    return run(cluster, CONTROLLER, "sh", "-c", "scontrol show config | sed -n 's,^ProctrackType.*/,,p'").strip()


def records(cluster: LocalCluster, since: float) -> Iterator[dict[str, Any]]:
    for worker in WORKERS:
        for line in run(cluster, worker, "cat", "/var/log/minivm/runs.jsonl").splitlines():
            entry = json.loads(line)
            if entry["at"] >= since:
                yield entry


def run(cluster: LocalCluster, pod: str, *command: str) -> str:
    code, output = cluster.exec(pod, command)
    if code:
        raise RuntimeError(f"{pod}: {command}: {output}")
    return output


if __name__ == "__main__":
    raise SystemExit(main())
