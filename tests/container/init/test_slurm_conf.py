"""A slurm.conf that would end jobs, or that Slurm cannot read, met by slurmctld, by its operator, and by the next pod.

One cluster for the module; the tests run in the order in which they stand.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from docker.types import Mount  # type: ignore[import-untyped]  # it carries no types

from tests.container.init_pods import Pod, World, slurm_conf, world
from tests.waiting import until

pytestmark = [pytest.mark.docker, pytest.mark.cluster]

SLURM = 64030
EXTRA = "PartitionName=extra Nodes=ALL OverSubscribe=FORCE:4 State=UP"
MORE = "PartitionName=more Nodes=ALL State=UP"


def conf(*lines: str) -> dict[str, str]:
    # A reconfigure on a busy machine takes longer than Slurm's ten seconds.
    return {"slurm.conf": slurm_conf("MessageTimeout=60", *lines, accounting=False)}


class Cluster:
    def __init__(self, made: World, directory: Path) -> None:
        self.world, self.directory = made, directory
        for name in ("state", "kept"):
            (directory / name).mkdir()
        os.chown(directory / "state", SLURM, SLURM)
        made.configure(conf(EXTRA))
        self.controller = self.new_controller()
        self.worker = made.pod("worker", "w1")
        self.worker.add_user()

    def new_controller(self) -> Pod:
        """On the volume that the last one had, as a StatefulSet's next pod."""
        volumes = {"state": "/var/spool/slurmctld", "kept": "/var/lib/minivm/slurm"}
        mounts = [Mount(target, str(self.directory / name), type="bind") for name, target in volumes.items()]
        env = {"MINIVM_ACCOUNTING": "none"}
        pod = self.world.pod("controller", "slurm-controller", env=env, extra_mounts=mounts)
        pod.add_user()
        return pod

    def replace_controller(self) -> None:
        self.controller.remove()
        self.world.pods.remove(self.controller)
        self.controller = self.new_controller()

    def config(self, *words: str) -> tuple[int, str]:
        return self.controller.code("minivm", "config", *words)

    def piped(self, text: str, *words: str) -> tuple[int, str]:
        return self.controller.code("sh", "-c", f'printf "%s" "$0" | minivm config {" ".join(words)} -', text)

    def refusal(self) -> str:
        return next((text for text in self.controller.status()["degraded"] if text.startswith("slurm.conf: ")), "")

    def submit(self, *options: str) -> str:
        line = ("sbatch", "--parsable", "--chdir=/tmp", "--output=/dev/null", "--oversubscribe", "--mem=1", *options)
        return self.worker.run(*line, "--wrap", "sleep 7777", user="demo").strip()

    def state(self, job: str) -> str:
        return self.controller.run("squeue", "-h", "-a", "-t", "all", "-j", job, "-o", "%T").strip()

    def partitions(self) -> set[str]:
        return set(self.controller.code("sinfo", "-h", "-a", "-o", "%R")[1].split())

    def hash(self) -> str:
        return self.config("status")[1].partition(":")[0]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with world(tmp_path_factory.mktemp("conf"), "conf") as made:
        found = Cluster(made, tmp_path_factory.mktemp("volume"))
        found.controller.wait_ready()
        found.worker.wait_ready()
        until(lambda: found.config("status")[0] == 0, "the first one is live, and kept")
        yield found


@pytest.fixture(scope="module")
def jobs(cluster: Cluster) -> dict[str, str]:
    """Submit a job to each partition, one that may run in both and runs in main, and one that waits for the other."""
    made = {
        "main": cluster.submit("-p", "main"),
        "extra": cluster.submit("-p", "extra"),
        "waits": cluster.submit("-p", "extra", "--begin=now+1hour"),
    }
    for name in ("main", "extra"):
        until(lambda name=name: cluster.state(made[name]) == "RUNNING", f"{name} runs")  # type: ignore[misc]
    cluster.controller.run("scontrol", "update", "partitionname=extra", "state=down")
    made["both"] = cluster.submit("-p", "extra,main")
    until(lambda: cluster.state(made["both"]) == "RUNNING", "it runs in main")
    cluster.controller.run("scontrol", "update", "partitionname=extra", "state=up")
    return made


def test_a_candidate_is_looked_at_before_it_is_there(cluster: Cluster, jobs: dict[str, str]) -> None:
    before = cluster.controller.service("slurmctld")["pid"]
    code, text = cluster.piped(conf(EXTRA, MORE)["slurm.conf"], "check")
    assert (code, text) == (0, "partition more: comes\nno job ends\n")
    code, text = cluster.piped(conf()["slurm.conf"], "check")
    assert code == 1 and "partition extra: goes" in text
    (ends,) = re.findall(r"2 jobs \((\d+), (\d+)\)", text)
    assert set(ends) == {jobs["extra"], jobs["waits"]}
    listed = "running jobs that were submitted to extra,main"  # slurmctld saves its state every few seconds
    until(lambda: listed in cluster.piped(conf()["slurm.conf"], "diff")[1], "what Slurm does not show is told too")
    code, text = cluster.piped(conf(EXTRA, "SlurmdTimout=5")["slurm.conf"], "check")
    assert code == 1 and "unrecognized key: SlurmdTimout" in text
    for line, why in (
        ("SchedulerType=backfill", "slurm.conf: SchedulerType: found backfill, expected sched/backfill"),
        ("TopologyPlugin=topology/tree", "topology.conf: found no such file, expected one"),
    ):
        code, text = cluster.piped(conf(EXTRA, line)["slurm.conf"], "check")
        assert code == 1 and why in text
    # As `helm template` writes it.
    lines = conf(EXTRA, "ProctrackType=proctrack/pgid")["slurm.conf"].replace("ProctrackType=proctrack/linuxproc\n", "")
    manifest = "kind: ConfigMap\ndata: {news: a}\n---\nkind: ConfigMap\ndata:\n  slurm.conf: |\n"
    code, text = cluster.piped(manifest + "".join(f"    {line}\n" for line in lines.splitlines()), "diff")
    assert code == 0 and "ProctrackType: proctrack/linuxproc -> proctrack/pgid" in text
    assert "restarts: ProctrackType: the workers' pods" in text
    assert cluster.controller.service("slurmctld")["pid"] == before and cluster.refusal() == ""


def test_a_partition_with_jobs_stays_whatever_the_file_says(cluster: Cluster, jobs: dict[str, str]) -> None:
    """slurmctld would say nothing and end them all: NODE_FAIL."""
    cluster.world.configure(conf())
    text = until(cluster.refusal, "the refusal is told")
    assert "it would end jobs: partition extra goes: 2 jobs" in text and jobs["extra"] in text and jobs["waits"] in text
    assert f"`minivm config accept {cluster.hash()}` applies it anyway" in text
    assert {name: cluster.state(job) for name, job in jobs.items()} == {
        "main": "RUNNING", "extra": "RUNNING", "waits": "PENDING", "both": "RUNNING",
    }  # fmt: skip
    assert cluster.partitions() == {"main", "extra"}
    assert "slurm.conf: refused" in cluster.controller.code("minivm", "why")[1]
    assert 'minivm_condition{condition="slurm.conf",blocking="false"} 1' in cluster.controller.metrics()
    code, text = cluster.config("status")
    assert code == 1 and "refused, the last one stays" in text


def test_a_word_for_another_file_changes_nothing(cluster: Cluster, jobs: dict[str, str]) -> None:
    code, text = cluster.config("accept", "0123456789ab")
    assert code == 1 and f"the mounted files are {cluster.hash()}" in text
    assert cluster.state(jobs["extra"]) == "RUNNING"


def test_the_next_pod_goes_on_with_the_last_good_one(cluster: Cluster, jobs: dict[str, str]) -> None:
    """The pod keeps it even while the mounted file would end jobs: replacing a pod does not accept that."""
    cluster.replace_controller()
    cluster.controller.wait_ready()
    until(
        lambda: "it would end jobs" in cluster.refusal(), "the refusal is told again", seen=cluster.controller.account
    )
    assert cluster.partitions() == {"main", "extra"}
    assert [cluster.state(jobs[name]) for name in ("main", "extra", "both")] == ["RUNNING"] * 3


def test_a_file_that_slurm_cannot_read_does_not_reach_the_next_pod(cluster: Cluster, jobs: dict[str, str]) -> None:
    cluster.world.configure(conf(EXTRA, "NoSuchSetting=1"))
    until(lambda: "NoSuchSetting" in cluster.refusal(), "the refusal is told")
    cluster.replace_controller()
    cluster.controller.wait_ready()
    until(lambda: "NoSuchSetting" in cluster.refusal(), "the refusal is told again", seen=cluster.controller.account)
    assert "NoSuchSetting" in cluster.controller.code("minivm", "why")[1]
    assert cluster.controller.service("slurmctld")["failures"] == 0, "it never met that file"
    assert cluster.state(jobs["main"]) == "RUNNING"
    cluster.world.configure(conf(EXTRA, MORE))
    until(lambda: not cluster.refusal() and "more" in cluster.partitions(), "the mended one is live")
    until(lambda: cluster.config("status")[0] == 0, "and kept")
    assert "NoSuchSetting" not in cluster.controller.code("minivm", "why")[1]


def test_the_very_file_is_taken_when_its_operator_says_so(cluster: Cluster, jobs: dict[str, str]) -> None:
    cluster.world.configure(conf())
    until(cluster.refusal, "the refusal is told")
    code, text = cluster.config("accept", cluster.hash())
    assert code == 0, text
    assert cluster.partitions() == {"main"}
    until(lambda: not cluster.refusal(), "and no refusal is told", seen=cluster.refusal)
    assert cluster.state(jobs["main"]) == "RUNNING"
    until(lambda: cluster.state(jobs["extra"]) not in ("RUNNING", "PENDING"), "as was said before")
    until(lambda: cluster.state(jobs["both"]) not in ("RUNNING", "PENDING"), "and so did this one")


def test_the_same_file_mounted_again_is_weighed_again(cluster: Cluster) -> None:
    """A user who returns to the file by `helm rollback` has not accepted the loss of the jobs that exist by then."""
    jobs = []
    for again in (False, True):
        cluster.world.configure(conf("PartitionName=other Nodes=ALL State=UP"))
        until(lambda: "other" in cluster.partitions(), "the partition is there")
        jobs.append(cluster.submit("-p", "other", "--hold"))
        cluster.world.configure(conf())
        text = until(cluster.refusal, "the refusal is told")
        assert "it would end jobs: partition other goes: " in text and jobs[-1] in text
        if again:
            break
        code, text = cluster.config("accept", cluster.hash())
        assert code == 0, text
        until(lambda: "other" not in cluster.partitions(), "it is taken, this once")
    assert cluster.state(jobs[-1]) == "PENDING" and "other" in cluster.partitions()
    cluster.controller.run("scancel", *jobs)
    cluster.world.configure(conf(MORE))
    until(lambda: cluster.config("status")[0] == 0, "without them another file is taken", seen=cluster.refusal)


def test_slurmctld_is_not_made_to_forget_jobs_that_it_knows(cluster: Cluster) -> None:
    """With MaxJobCount below the job count, slurmctld reads fewer saved jobs and purges the others' files."""
    cluster.world.configure(conf("MaxJobCount=200"))

    def limit(number: int) -> bool:
        shown = cluster.controller.code("scontrol", "show", "config")[1]
        return re.search(rf"^MaxJobCount\s+= {number}$", shown, re.MULTILINE) is not None

    until(lambda: limit(200), "few are known: it is taken")
    job = cluster.submit("-p", "main", "--hold", "--array=1-120")
    cluster.world.configure(conf("MaxJobCount=100"))
    text = until(cluster.refusal, "the refusal is told")
    assert "MaxJobCount 200 becomes 100, and slurmctld forgets jobs beyond it: it knows 1" in text
    assert cluster.state(job) == "PENDING"
    cluster.world.configure(conf("MaxJobCount=150"))
    until(lambda: limit(150), "there is room for them")
    assert cluster.state(job) == "PENDING"
    cluster.controller.run("scancel", job)
    cluster.world.configure(conf())
    until(lambda: cluster.config("status")[0] == 0, "as it was")


def test_how_many_jobs_slurmctld_knows_is_no_less_than_it_counts_itself(cluster: Cluster) -> None:
    """`squeue --array` has 50 lines for this array of 51."""

    def known() -> int:
        text = cluster.piped(conf("MaxJobCount=2")["slurm.conf"], "check")[1]
        (found,) = re.findall(r"it knows (\d+)", text)
        return int(found)

    def as_many_as_there_are() -> bool:
        before = known()  # ended ones, which it forgets one by one
        cluster.submit("-p", "main", "--hold", "--array=0-100:2")
        return known() - before == 51

    cluster.submit("-p", "main", "--hold", "--array=1-3")
    until(as_many_as_there_are, "each of its tasks is one")
    code, text = cluster.piped(conf("FirstJobId=10", "MaxJobId=59")["slurm.conf"], "check")
    assert code == 1 and "MaxJobCount 10000 becomes 50 (the numbers from FirstJobId to MaxJobId)" in text
    cluster.controller.run("scancel", "--user=demo")


def test_a_new_cluster_that_is_given_a_bad_file_says_which_key_it_is(cluster: Cluster, tmp_path: Path) -> None:
    """Nothing is there to go back to."""
    for name in ("secrets/munge", "config/slurm"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "secrets/munge/munge.key").write_bytes(cluster.world.key)
    cluster.world.configure(conf("NoSuchSetting=1"), mounts=tmp_path)
    pod = cluster.world.pod("controller", "first", mounts=tmp_path, env={"MINIVM_ACCOUNTING": "none"})

    def told() -> bool:
        return any("does not start with it" in text and "NoSuchSetting" in text for text in pod.status()["degraded"])

    until(lambda: pod.code("minivm", "status")[0] == 0, "init answers", seen=pod.account)
    until(told, "it says why", seen=pod.account)
    cluster.world.configure(
        {"slurm.conf": conf()["slurm.conf"].replace("SlurmctldHost=slurm-controller", "SlurmctldHost=first")},
        mounts=tmp_path,
    )
    pod.wait_ready()
    until(lambda: pod.code("minivm", "config", "status")[0] == 0, "live, and kept")
