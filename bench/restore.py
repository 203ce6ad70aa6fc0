"""Measure the loss and the return of a controller with 100,000 jobs of history and 2,000 waiting ones.

`python -m bench restore`. slurmctld's state and the embedded database are deleted, and come back from a copy by the
commands of docs/how-to/restore-the-controller.md. Fails if squeue or sacct prints anything else than before.
"""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from bench.cluster import ssh
from bench.waits import fill_history, on_controller, print_row
from cluster.local import LocalCluster
from cluster.names import free_port
from cluster.values import Options
from images.engine.docker import DockerEngine
from tests.waiting import until

WAITING, ARRAY = 2000, 1000  # an array has at most MaxArraySize - 1 jobs
STATE = "/var/spool/slurmctld"
QUEUE = "squeue --all --noheader --array --sort=i --format='%i|%T|%u|%j|%l'"
RECORDS = (
    "sacct --allusers --allocations --duplicates --noheader --parsable2 --starttime=2000-01-01 "
    "--format=jobidraw,user,account,state,submit,start,end,exitcode,nodelist"
)
LOSE = f"""minivm stop slurmctld && minivm stop slurmdbd
find {STATE} -mindepth 1 -delete && mariadb -e "DROP DATABASE slurm_acct_db"
"""
RESTORE = 'minivm state restore "$1" --with-accounting'
START = "minivm start slurmdbd && minivm start slurmctld && until scontrol ping > /dev/null; do sleep 0.1; done"
WITHIN_S = 300.0


def main() -> int:
    options = Options(name="bench-restore", workers=1, repository=os.environ.get("MINIVM_BUILD_PREFIX", "minivm"))
    with tempfile.TemporaryDirectory(prefix="minivm-bench-") as root:
        cluster = LocalCluster(DockerEngine().client, options, root=Path(root))
        cluster.down()
        try:
            cluster.up(port=free_port(22400))
            return measure(cluster)
        finally:
            cluster.down()


def measure(cluster: LocalCluster) -> int:
    count, _ = fill_history(cluster)
    for _ in range(WAITING // ARRAY):
        ssh(cluster, f"sbatch --parsable --hold --array=1-{ARRAY} -o /dev/null --wrap true")
    running = ssh(cluster, "sbatch --parsable -n1 -o /dev/null --wrap 'sleep 3600'").strip()
    ssh(cluster, f'until [ "$(squeue -h -j {running} -o %T)" = RUNNING ]; do sleep 0.1; done')
    print(f"{count} jobs of history, {WAITING} waiting, 1 runs, load {os.getloadavg()[0]:.1f}", flush=True)
    ssh(cluster, f"until sacct -X -n -P -j {running} -o state | grep -qx RUNNING; do sleep 0.2; done")
    before = lists(cluster)

    timed("minivm state save, s", lambda: on_controller(cluster, "minivm state save"))
    name = newest(cluster)
    timed("minivm state verify, s", lambda: on_controller(cluster, 'minivm state verify "$1"', name))
    on_controller(cluster, LOSE)
    timed("minivm state restore --with-accounting, s", lambda: on_controller(cluster, RESTORE, name))
    timed("both daemons start and answer, s", lambda: on_controller(cluster, START))
    timed("the waiting and running jobs are the same, s", lambda: same(cluster, QUEUE, before[QUEUE]))
    timed("the records of all jobs are the same, s", lambda: same(cluster, RECORDS, before[RECORDS]))
    print_row("jobs lost, doubled or changed", 0, "by squeue and sacct")
    return 0


def lists(cluster: LocalCluster) -> dict[str, str]:
    return {command: digest(cluster, command) for command in (QUEUE, RECORDS)}


def digest(cluster: LocalCluster, command: str) -> str:
    return hashlib.sha256(on_controller(cluster, command).encode()).hexdigest()


def same(cluster: LocalCluster, command: str, expected: str) -> None:
    until(lambda: digest(cluster, command) == expected, f"the same answer as before: {command}", within=WITHIN_S,
          seen=lambda: on_controller(cluster, f"{command} | head -n 20"))  # fmt: skip


def newest(cluster: LocalCluster) -> str:
    return on_controller(cluster, "minivm state list | awk 'NR == 2 {print $1}'").strip()


def timed(what: str, act: Callable[[], object]) -> None:
    began = time.monotonic()
    act()
    print_row(what, time.monotonic() - began, f"load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    sys.exit(main())
