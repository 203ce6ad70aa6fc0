"""The state of a real controller is saved under running and queued jobs, lost, and restored; and copies are proven.

One cluster for the module; the tests run in the order in which they stand, and each leaves the cluster whole.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.container.init_pods import Pod, slurm_conf, world
from tests.pages import blocks
from tests.reader import ROOT
from tests.waiting import until

pytestmark = [pytest.mark.docker, pytest.mark.cluster]

STATE, BACKUPS = "/var/spool/slurmctld", "/var/lib/minivm/backups"


PAGE = blocks(ROOT / "docs" / "how-to" / "restore-the-controller.md")


class Cluster:
    def __init__(self, controller: Pod, worker: Pod) -> None:
        self.controller, self.worker = controller, worker

    def submit(self, *options: str) -> str:
        batch = ("sbatch", "--parsable", "--chdir=/tmp", "--output=/dev/null")
        return self.controller.run(*batch, *options, "--wrap", "sleep 7777", user="demo").strip()

    def jobs(self) -> dict[str, str]:
        text = self.controller.run("squeue", "--all", "--noheader", "--format=%i|%T")
        return dict(line.strip().rpartition("|")[::2] for line in text.splitlines())

    def save(self, *options: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.controller.run("minivm", "state", "save", "--json", *options))
        return found

    def start(self) -> None:
        self.controller.run("minivm", "start", "slurmctld")
        until(
            lambda: self.controller.code("scontrol", "ping")[0] == 0, "slurmctld answers", seen=self.controller.account
        )

    def pids(self) -> str:
        return self.worker.run("pgrep", "--full", "sleep 7777", check=False)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with world(tmp_path_factory.mktemp("state"), "state") as made:
        made.configure({"slurm.conf": slurm_conf()})
        controller, worker = made.pod("controller", "slurm-controller"), made.pod("worker", "w1")
        for pod in (controller, worker):
            pod.add_user()
        for pod in (controller, worker):
            pod.wait_ready()
        # The pod is ready before what it can do without, and the copies here have the accounting.
        until(lambda: controller.service("slurmdbd")["ready"], "accounting too", seen=controller.account)
        yield Cluster(controller, worker)


@pytest.fixture(scope="module")
def jobs(cluster: Cluster) -> dict[str, str]:
    """One job runs; one is held, and an array."""
    running = cluster.submit("--nodelist=w1")
    until(lambda: cluster.jobs().get(running) == "RUNNING", "the job runs", seen=lambda: str(cluster.jobs()))
    until(cluster.pids, "its process is there")
    cluster.submit("--hold")
    cluster.submit("--hold", "--array=1-20")
    return cluster.jobs()


@pytest.fixture(scope="module")
def copy(cluster: Cluster, jobs: dict[str, str]) -> str:
    saved = cluster.save()
    assert saved["jobs"] == {"PENDING": 2, "RUNNING": 1} and saved["accounting"] is True, saved
    assert cluster.jobs() == jobs
    return str(saved["name"])


def test_a_copy_is_private_and_whole(cluster: Cluster, copy: str) -> None:
    pod = cluster.controller
    modes = set(pod.run("find", f"{BACKUPS}/{copy}", "-type", "f", "-printf", "%m %u\n").splitlines())
    assert modes == {"600 root"}
    assert pod.code("su", "-s", "/bin/sh", "demo", "-c", f"ls {BACKUPS}")[0] != 0
    shown = json.loads(pod.run("minivm", "state", "show", copy, "--json"))
    assert shown["verified"] and shown["highestJob"] >= 3 and shown["proof"] is None
    (listed,) = json.loads(pod.run("minivm", "state", "list", "--json"))
    assert listed["name"] == copy


def test_a_copy_is_proven_without_network_and_touches_no_job(cluster: Cluster, copy: str, jobs: dict[str, str]) -> None:
    pids = cluster.pids()
    code, said = cluster.controller.code("minivm", "state", "verify", copy)
    assert code == 0 and "unfinished jobs are the same" in said and "by slurmdbd" in said, said
    assert cluster.jobs() == jobs and cluster.pids() == pids
    assert "a copy proven" in cluster.controller.run("minivm", "status")
    assert cluster.controller.run("find", "/var/tmp", "-name", "minivm-proof-*") == ""


def test_a_copy_that_lacks_a_job_is_not_proven(cluster: Cluster, copy: str) -> None:
    """The list names a job more, with hashes that fit: what a proof finds and no hash does."""
    more = f"""
import hashlib, json, shutil
from pathlib import Path
from init.state import copies
directory = Path({BACKUPS!r})
shutil.copytree(directory / {copy!r}, directory / "20010101T000000Z")
manifest = copies.load_manifest(directory, "20010101T000000Z")
path = directory / manifest.name / "jobs.json"
listed = json.loads(path.read_text())
listed["settled"]["999"] = "RUNNING"
path.write_text(json.dumps(listed))
files = dict(manifest.files) | {{"jobs.json": hashlib.sha256(path.read_bytes()).hexdigest()}}
from init.lean import replace
changed = replace(manifest, files=tuple(sorted(files.items())))
(path.parent / "manifest.json").write_text(copies.dump_manifest(changed))
"""
    pod = cluster.controller
    pod.run("/opt/minivm/bin/python3", "-I", "-c", more)
    code, said = pod.code("minivm", "state", "verify", "20010101T000000Z")
    pod.run("rm", "-r", f"{BACKUPS}/20010101T000000Z")
    assert code == 1 and "job 999 is missing, expected RUNNING" in said, said


def test_a_restore_waits_for_slurmctld_to_be_stopped(cluster: Cluster, copy: str) -> None:
    code, said = cluster.controller.code("minivm", "state", "restore", copy)
    assert code == 1 and "slurmctld is ready, expected stopped" in said and "minivm stop slurmctld" in said


@pytest.mark.parametrize("lost", ["wiped", "emptied", "foreign"])
def test_a_lost_state_is_refused_and_the_copy_brings_every_job_back(
    cluster: Cluster, copy: str, jobs: dict[str, str], lost: str
) -> None:
    pod, pids = cluster.controller, cluster.pids()
    assert pids
    pod.run("minivm", "stop", "slurmctld")
    damage = {
        "wiped": f"find {STATE} -mindepth 1 -not -path '*/.minivm-before-*' -delete",
        "emptied": f": > {STATE}/job_state; rm -f {STATE}/job_state.old",
        "foreign": f"echo 'other|9' > {STATE}/clustername",
    }
    pod.run("sh", "-c", damage[lost], check=False)
    pod.code("minivm", "start", "slurmctld")
    reason = pod.run("minivm", "why", "slurmctld", check=False)
    assert f"minivm state restore {copy}" in reason, reason
    pod.run("minivm", "stop", "slurmctld")
    said = pod.run("minivm", "state", "restore", copy)
    assert "the present one is in" in said
    cluster.start()
    until(lambda: cluster.jobs() == jobs, "the same jobs are there", seen=lambda: str(cluster.jobs()))
    until(lambda: pod.run("sinfo", "-h", "-o", "%T").strip() in ("mixed", "allocated"), "the node is used",
          seen=lambda: pod.run("sinfo"))  # fmt: skip
    assert cluster.pids() == pids, "the running job goes on"
    following = cluster.submit("--hold")
    assert int(following) > max(int(job.partition("_")[0]) for job in jobs)
    pod.run("scancel", following)
    until(lambda: cluster.jobs() == jobs, "the new job is gone", seen=lambda: str(cluster.jobs()))


def test_a_flipped_byte_is_refused_and_nothing_is_touched(cluster: Cluster, copy: str, jobs: dict[str, str]) -> None:
    pod = cluster.controller
    second = str(cluster.save()["name"])
    flip = f"f=open('{BACKUPS}/{second}/state.tar','r+b');f.seek(700);b=f.read(1);f.seek(700);f.write(bytes([b[0]^1]))"
    pod.run("/opt/minivm/bin/python3", "-I", "-c", flip)
    assert pod.code("minivm", "state", "verify", second)[0] == 1
    pod.run("minivm", "stop", "slurmctld")
    code, said = pod.code("minivm", "state", "restore", second)
    assert code == 1 and "state.tar" in said and "expected" in said, said
    cluster.start()
    until(lambda: cluster.jobs() == jobs, "the jobs are untouched", seen=lambda: str(cluster.jobs()))


def test_the_accounting_comes_back_with_the_state(cluster: Cluster, copy: str, jobs: dict[str, str]) -> None:
    pod = cluster.controller
    pod.run("sacctmgr", "--immediate", "add", "account", "later")
    for service in ("slurmctld", "slurmdbd"):
        pod.run("minivm", "stop", service)
    said = pod.run("minivm", "state", "restore", copy, "--with-accounting")
    assert "slurm_acct_db_before_" in said
    assert "start both: minivm start slurmdbd, then minivm start slurmctld" in said
    pod.run("minivm", "start", "slurmdbd")
    cluster.start()
    until(lambda: cluster.jobs() == jobs, "the same jobs are there", seen=lambda: str(cluster.jobs()))
    accounts = until(lambda: pod.run("sacctmgr", "-n", "show", "account", "format=account"), "the accounts are told")
    assert "root" in accounts and "later" not in accounts


def test_a_database_that_was_dropped_comes_back_with_the_state(
    cluster: Cluster, copy: str, jobs: dict[str, str]
) -> None:
    pod = cluster.controller
    for service in ("slurmctld", "slurmdbd"):
        pod.run("minivm", "stop", service)
    pod.run("mariadb", "-e", "DROP DATABASE slurm_acct_db")
    pod.run("minivm", "state", "restore", copy, "--with-accounting")
    pod.run("minivm", "start", "slurmdbd")
    cluster.start()
    until(lambda: cluster.jobs() == jobs, "the same jobs are there", seen=lambda: str(cluster.jobs()))
    until(lambda: "root" in pod.run("sacctmgr", "-n", "show", "account", "format=account"), "the accounts are told")


def test_the_page_is_followed_as_written(cluster: Cluster, jobs: dict[str, str]) -> None:
    save, restore = [block for block in PAGE if block.runs]
    assert save.pod == restore.pod == "slurm-controller-0"
    said = cluster.controller.run("sh", "-c", save.script)
    assert "proven: " in said and "1 running" in said, said
    said = cluster.controller.run("sh", "-c", restore.script)
    assert "2 pending, 1 running" in said, said
    until(lambda: cluster.jobs() == jobs, "the same jobs are there", seen=lambda: str(cluster.jobs()))
