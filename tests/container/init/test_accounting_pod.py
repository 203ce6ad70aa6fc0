"""slurmdbd and its database in a pod of their own: copies of its records, and the numbers of jobs after a restore."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from docker.types import Mount  # type: ignore[import-untyped]  # it carries no types

from tests.container.init_pods import Pod, World, slurm_conf, world
from tests.waiting import until

pytestmark = [pytest.mark.docker, pytest.mark.cluster]

HOST = "slurm-accounting"
APART = ("AccountingStorageType=accounting_storage/slurmdbd", f"AccountingStorageHost={HOST}")


@pytest.fixture
def apart(tmp_path: Path) -> Iterator[World]:
    with world(tmp_path, "apart") as made:
        made.configure({"slurm.conf": slurm_conf(*APART, accounting=False)})
        yield made


def accounting(made: World) -> Pod:
    return made.pod("accounting", HOST, env={"MINIVM_ACCOUNTING": "embedded", "MINIVM_CONTROLLER": HOST})


def controller(made: World, state: str) -> Pod:
    kept = Mount(target="/var/spool/slurmctld", source=state, type="volume")
    pod = made.pod("controller", "slurm-controller", env={"MINIVM_ACCOUNTING": "pod"}, extra_mounts=[kept])
    pod.add_user()
    return pod


def submit(pod: Pod) -> str:
    batch = ("sbatch", "--parsable", "--chdir=/tmp", "--output=/dev/null", "--wrap", "true")
    return pod.run(*batch, user="demo").strip()


def accounted(pod: Pod, job: str) -> str:
    return pod.code("sacct", "-n", "-X", "-P", "-j", job, "-o", "state")[1].strip()


# Restore a copy, killed before the program of the database whose last argument begins so.
KILLED = """
import os, sys
from pathlib import Path
from init.pod.pod import Pod
from init.slurm.place import BACKUPS
from init.state import copies, restore
def kill(event, arguments):
    if event == "subprocess.Popen" and arguments[1][-1].startswith(sys.argv[2]): os._exit(7)
sys.addaudithook(kill)
restore.restore_records(Pod(os.environ), Path(BACKUPS), copies.load_manifest(Path(BACKUPS), sys.argv[1]))
"""
LOADS, EXCHANGES = "slurm_acct_db_restoring", "--execute=RENAME TABLE"
# The pod's own schedule, without the first minutes of a pod's life in which nothing is copied.
AT_ONCE = "import sys; from init.helpers import backups; backups.FIRST_AFTER = 0.0; sys.exit(backups.main())"
PYTHON = ("/opt/minivm/bin/python3", "-I", "-c")


def accounts(pod: Pod) -> set[str]:
    return set(pod.run("mariadb", "-N", "-e", "SELECT name FROM acct_table WHERE deleted = 0", "slurm_acct_db").split())


def newest(pod: Pod) -> str:
    return pod.run("minivm", "state", "list").splitlines()[1].split()[0]


def test_its_records_are_copied_proven_and_restored(apart: World) -> None:
    pod = accounting(apart).wait_ready()
    pod.run("sacctmgr", "-i", "add", "cluster", "minivm")
    pod.run("sacctmgr", "-i", "add", "account", "physics")
    pod.run(*PYTHON, AT_ONCE)
    copy = newest(pod)
    text = pod.run("minivm", "state", "show", copy)
    assert "cluster minivm, Slurm " in text and "proof: " in text and "0 accounted jobs by slurmdbd" in text, text
    assert "saved state: copied" in pod.run("minivm", "status")
    pod.run(*PYTHON, AT_ONCE)
    assert newest(pod) == copy, "the next one is due tomorrow"
    assert "records of accounting alone" in pod.code("minivm", "state", "rehearse", copy)[1]

    pod.run("sacctmgr", "-i", "add", "account", "chemistry")
    code, text = pod.code("minivm", "state", "restore", copy)
    assert code == 1 and "slurmdbd is ready, expected stopped" in text and "minivm stop slurmdbd" in text
    pod.run("minivm", "stop", "slurmdbd")
    for step in (LOADS, EXCHANGES):
        assert pod.code(*PYTHON, KILLED, copy, step)[0] == 7
        assert "chemistry" in accounts(pod), "nothing was exchanged"
    text = pod.run("minivm", "state", "restore", copy)
    assert text.endswith("start it: minivm start slurmdbd\n")
    pod.run("minivm", "start", "slurmdbd")
    assert accounts(pod) == {"root", "physics"}
    (before,) = (word for word in text.split() if word.startswith("slurm_acct_db_before_"))
    assert "chemistry" in pod.run("mariadb", "-N", "-e", "SELECT name FROM acct_table", before.rstrip(";")).split()
    until(lambda: "physics" in pod.code("sacctmgr", "-n", "show", "account")[1], "slurmdbd serves it", seen=pod.account)

    pod.run("sed", "-i", "1s/^./X/", f"/var/lib/minivm/backups/{copy}/accounting.sql.gz")
    pod.run("minivm", "stop", "slurmdbd")
    code, text = pod.code("minivm", "state", "restore", copy)
    assert code == 1 and "SHA-256" in text
    assert pod.code("minivm", "state", "verify", copy)[0] == 1
    assert "cannot be restored" in pod.run("minivm", "status")


def test_a_restored_controller_gives_no_number_of_the_accounting_pod_again(apart: World) -> None:
    volume = apart.client.volumes.create(labels={"minivm-test": "init"})
    try:
        accounting(apart).wait_ready()
        pod = controller(apart, volume.name).wait_ready()
        worker = apart.pod("worker", "w1")
        worker.add_user()
        worker.wait_ready()
        batch = ("sbatch", "--parsable", "--chdir=/tmp", "--output=/dev/null", "--begin=now+1hour", "--wrap", "true")
        waits = pod.run(*batch, user="demo").strip()
        pod.run("minivm", "state", "save")
        pod.run("scontrol", "update", f"jobid={waits}", "starttime=now", user="demo")
        late = submit(pod)
        for job in (waits, late):
            until(lambda job=job: accounted(pod, job) == "COMPLETED", f"{job} is accounted", seen=pod.account)  # type: ignore[misc]  # mypy does not infer a lambda's default
        pod.run("minivm", "stop", "slurmctld")
        # The newer state is lost, not only replaced.
        pod.run("sh", "-c", "rm -r /var/spool/slurmctld/*")
        text = pod.run("minivm", "state", "restore", newest(pod))
        # The later job may be of the same second as the copy, and is named then, too.
        assert "of its jobs ended since; slurmctld counts" in text and f"scancel {waits}" in text, text
        pod.run("minivm", "start", "slurmctld")
        pod.wait_ready()
        assert int(submit(pod)) > int(late)
    finally:
        for pod in apart.pods:
            pod.remove()
        volume.remove(force=True)
