"""Measure the loss and the return of a controller with 100,000 jobs of history and 2,000 waiting ones.

`python -m bench restore`. slurmctld's state and the embedded database are deleted, and come back from a copy by the
commands of docs/how-to/restore-the-controller.md. Fails if squeue or sacct prints anything else than before.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable

from bench.cluster import row, running_cluster, ssh, timed
from bench.waits import fill_history, on_controller
from cluster.local import LocalCluster
from tests.waiting import until

WAITING, ARRAY = 2000, 1000  # an array has at most MaxArraySize - 1 jobs
STATE = "/var/spool/slurmctld"
QUEUE = "squeue --all --noheader --array --sort=i --format='%i|%T|%u|%j|%l'"
RECORDS = (
    "sacct --allusers --allocations --duplicates --noheader --parsable2 --starttime=2000-01-01 "
    "--format=jobidraw,user,account,state,submit,start,end,exitcode,nodelist"
)
LOSE = f"""set -e; minivm stop slurmctld && minivm stop slurmdbd
find {STATE} -mindepth 1 -delete && mariadb -e "DROP DATABASE slurm_acct_db"
"""
RESTORE = 'minivm state restore "$1" --with-accounting'
START = "minivm start slurmdbd && minivm start slurmctld && until scontrol ping > /dev/null; do sleep 0.1; done"
WITHIN_S = 300.0


def main() -> int:
    with running_cluster("bench-restore") as cluster:
        measure(cluster)
    return 0


def measure(cluster: LocalCluster) -> None:
    count, _ = fill_history(cluster)
    for _ in range(WAITING // ARRAY):
        ssh(cluster, f"sbatch --parsable --hold --array=1-{ARRAY} -o /dev/null --wrap true")
    running = ssh(cluster, "sbatch --parsable -n1 -o /dev/null --wrap 'sleep 3600'").strip()
    ssh(cluster, f'until [ "$(squeue -h -j {running} -o %T)" = RUNNING ]; do sleep 0.1; done')
    print(f"{count} jobs of history, {WAITING} waiting, 1 runs, load {os.getloadavg()[0]:.1f}", flush=True)
    ssh(cluster, f"until sacct -X -n -P -j {running} -o state | grep -qx RUNNING; do sleep 0.2; done")
    before = {command: digest(cluster, command) for command in (QUEUE, RECORDS)}

    print_time("minivm state save", lambda: on_controller(cluster, "minivm state save"))
    name = newest(cluster)
    print_time("minivm state verify", lambda: on_controller(cluster, 'minivm state verify "$1"', name))
    on_controller(cluster, LOSE)
    print_time("minivm state restore --with-accounting", lambda: on_controller(cluster, RESTORE, name))
    print_time("both daemons start and answer", lambda: on_controller(cluster, START))
    print_time("the waiting and running jobs are the same", lambda: same(cluster, QUEUE, before[QUEUE]))
    print_time("the records of all jobs are the same", lambda: same(cluster, RECORDS, before[RECORDS]))


def digest(cluster: LocalCluster, command: str) -> str:
    return hashlib.sha256(on_controller(cluster, command).encode()).hexdigest()


def same(cluster: LocalCluster, command: str, expected: str) -> None:
    until(lambda: digest(cluster, command) == expected, f"the same answer as before: {command}", within=WITHIN_S,
          seen=lambda: on_controller(cluster, f"{command} | head -n 20"))  # fmt: skip


def newest(cluster: LocalCluster) -> str:
    return on_controller(cluster, "minivm state list | awk 'NR == 2 {print $1}'").strip()


def print_time(what: str, act: Callable[[], object]) -> None:
    row(what, timed(act), f"load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    sys.exit(main())
