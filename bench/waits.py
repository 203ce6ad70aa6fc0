"""Measure what users wait for slurmctld (`python -m bench waits`), and for `minivm job` (`python -m bench why`).

`waits` measures each of the chart's profiles: short jobs, a prompt, a large and a small job. MINIVM_BENCH_SCRIPTS=on
runs prolog, epilog and task prolog as usual; without it they are off, and only Slurm's own part is left.

`why` measures `minivm job` with 100,000 jobs of history, and slurmctld's requests while 200 people run it.
"""

from __future__ import annotations

import os
import re
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path

import yaml

from bench.cluster import running_cluster, ssh
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
                start_with_profile(cluster, profile, scripts=scripts)
                measure(cluster, profile)
        finally:
            cluster.down()
    return 0


def start_with_profile(cluster: LocalCluster, profile: str, *, scripts: bool) -> None:
    values = {"slurm": {"profile": profile, "scripts": {"enabled": scripts}}}
    first = not cluster.kubelet.list_pods()
    cluster.options = replace(cluster.options, overrides=values)
    cluster.up(port=free_port(22400) if first else 0)
    ssh(cluster, "srun -N2 true")


def measure(cluster: LocalCluster, profile: str) -> None:
    for what, (script, divisor) in SHAPES.items():
        values = [int(line) for line in ssh(cluster, CLOCK + script).split()]
        print(f"{profile:<12} {what:<52} {statistics.median(values) / divisor:8.2f}", flush=True)
    print(f"{profile:<12} load {os.getloadavg()[0]:.1f}", flush=True)


# `minivm job`

CONTROLLER, WORKER = "slurm-controller-0", "slurm-worker-0"
BOXES = "/var/log/minivm/boxes"
HISTORY = 100_000
WHY_TURNS = 9
PEOPLE, JOBS, EVERY, SECONDS = 200, 20, 10, 60
# Fill the history with copies of one ended job, doubled each time. Copies differ in id and time of submission.
COPIES = """
table=$(mariadb -N slurm_acct_db -e "show tables like '%\\_job\\_table'")
columns=$(mariadb -N slurm_acct_db -e "select group_concat(char(96), column_name, char(96))
    from information_schema.columns
    where table_name = '$table' and column_name not in ('job_db_inx', 'id_job', 'time_submit')")
mariadb slurm_acct_db -e "delete from $table where id_job != $1"
n=1
while [ $n -lt $2 ]; do
    mariadb slurm_acct_db -e "insert into $table (id_job, time_submit, $columns)
        select id_job + $n, time_submit - $n, $columns from $table"
    n=$((n * 2))
done
mariadb -N slurm_acct_db -e "select count(*), max(id_job) from $table"
"""
TIMES = """for i in $(seq {turns}); do
    sleep {pause}; t=$(date +%s%N); minivm job {job} >/dev/null; echo $(( $(date +%s%N) - t ))
done"""
PAUSE_S = 2  # for reading: the login pod asks slurmctld five times at once, then every 1.1 s
# One thread for each person: 200 interpreters would saturate two cores. Each thread asks as the command does.
ASKS = """
import os, pathlib, sys, threading, time
from health.jobs.ask import Asker, find_pages
from health.jobs.shared import SOCKET, Shared
from init.errors import InitError
from init.slurm import client
controller = client.address(os.environ)
direct = lambda argv: client.run(argv, controller)
path = SOCKET if sys.argv[1] == "shared" else pathlib.Path("/nowhere")
people, every, seconds, jobs = int(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4]), sys.argv[5:]
until, done, failed, slowest = time.monotonic() + seconds, [], [], []
def person(number):
    time.sleep(every * number / people)
    while (begun := time.monotonic()) < until:
        try:
            page, = find_pages(Asker(Shared(direct, path), "alice", False, time.time()), jobs[number % len(jobs)])
            done.append(page.answer.headline)
        except InitError as error:
            failed.append(str(error))
        slowest.append(time.monotonic() - begun)
        time.sleep(max(0, begun + every - time.monotonic()))
threads = [threading.Thread(target=person, args=(number,)) for number in range(people)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print(len(done), len(failed), max(slowest), failed[:1])
"""


def why() -> int:
    """Measure `minivm job` with a long history, and with 200 people who run it (`python -m bench why`)."""
    with running_cluster("bench-why") as cluster:
        measure_job_command(cluster)
    return 0


def measure_job_command(cluster: LocalCluster) -> None:
    count, last = fill_history(cluster)
    measure_black_boxes(cluster)
    ids = ssh(cluster, f"for i in $(seq {JOBS}); do sbatch --parsable -H --wrap true; done").split()
    print(f"{count} jobs of history, load {os.getloadavg()[0]:.1f}", flush=True)
    subjects = {  # with the seconds between two questions
        "an ended job of the history": (last, 0),
        "each time another ended job": (f"$(({last} - $i))", PAUSE_S),  # the login pod asks slurmctld for each
        "the same without a pause": (f"$(({last} - {WHY_TURNS} - $i))", 0),
        "a waiting job": (ids[0], 0),
        "the list": ("", 0),
    }
    for what, (subject, pause) in subjects.items():
        script = TIMES.format(turns=WHY_TURNS, job=subject, pause=pause)
        times = [int(line) / 1e9 for line in ssh(cluster, script).split()]
        target = "median" if "pause" in what else "median; target 0.3"
        print_row(f"minivm job, {what}, s", statistics.median(times), target)
    measure_people(cluster, "shared", PEOPLE, ids)
    measure_people(cluster, "each for itself", PEOPLE // 10, ids)  # all of them would saturate two cores


def fill_history(cluster: LocalCluster) -> tuple[int, int]:
    """Fill accounting with the records of one failed job; return their count and the highest number."""
    job = ssh(cluster, "sbatch --parsable --wait -o /dev/null --wrap 'exit 3' || true").strip()
    ssh(cluster, f"until sacct -X -n -P -j {job} -o state | grep -qx FAILED; do sleep 0.2; done")
    count, last = on_controller(cluster, COPIES, job, str(HISTORY)).split()
    return int(count), int(last)


def measure_black_boxes(cluster: LocalCluster) -> None:
    """Report the bytes that a job leaves on its node, of jobs that end well and of jobs that fail."""
    for what, script in (("that ends well", "true"), ("that fails", "srun false")):
        line = f"sbatch --parsable --wait -o /dev/null --array=1-{JOBS} --wrap '{script}' || true"
        array = ssh(cluster, line).split()[0]
        ids = ssh(cluster, f"squeue -h -t all -j {array} -o %A").split()
        code, output = cluster.exec(
            WORKER, ["sh", "-c", f"cd {BOXES} && wc -c {' '.join(f'{id_}.*.jsonl' for id_ in ids)}"]
        )
        assert code == 0, output
        sizes = [int(row.split()[0]) for row in output.splitlines() if not row.endswith(" total")]
        print_row(f"black box of a job {what}, bytes", statistics.median(sizes), f"median of {len(sizes)}; most 65536")


def measure_people(cluster: LocalCluster, how: str, number: int, ids: list[str]) -> None:
    """Run `minivm job` for many people, and report slurmctld's request rate above its idle rate."""
    idle = requests(cluster)
    ssh(cluster, f"sleep {SECONDS / 2}")
    before = requests(cluster)
    line = f"/opt/minivm/bin/python3 -I - {how.split(maxsplit=1)[0]} {number} {EVERY} {SECONDS} {' '.join(ids)}"
    output = ssh(cluster, f"{line} <<'END'\n{ASKS}\nEND")
    after = requests(cluster)
    rate = (after - before) / SECONDS - (before - idle) / (SECONDS / 2)
    print_row(
        f"{number} people, {how}: requests to slurmctld a second", rate, f"answers, failed, slowest s: {output.strip()}"
    )


def requests(cluster: LocalCluster) -> int:
    """Count the requests that slurmctld has had, by sdiag."""
    part = on_controller(cluster, "sdiag -t").partition("by message type")[2].partition("by user")[0]
    return sum(int(number) for number in re.findall(r"count:(\d+)", part))


def on_controller(cluster: LocalCluster, script: str, *arguments: str) -> str:
    code, output = cluster.exec(CONTROLLER, ["sh", "-c", script, "sh", *arguments])
    assert code == 0, output
    return output


def print_row(what: str, value: float, more: str) -> None:
    print(f"{what:<60} {value:8.2f}  {more}", flush=True)


if __name__ == "__main__":
    main()
