"""Metrics for alerts on a real controller's page: nodes by state, waiting jobs, ages of keys, ends of certificates.

One cluster for the module; the tests run in the order in which they stand.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from docker.types import Mount  # type: ignore[import-untyped]  # it carries no types
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from tests.container.init_pods import Pod, World, slurm_conf, world
from tests.waiting import until

pytestmark = [pytest.mark.docker, pytest.mark.cluster]

SLURM = 64030
DAY = 86400.0
# The planner's own functions; it waits for half an hour, and a test does not.
COUNT = """
import os, time
from health.active.__main__ import find_startable
from health.active import metrics
from init.slurm import client
from init.slurm.node import parse
controller = client.address(os.environ)
waiting = client.run([client.SQUEUE, "--all", "--noheader", "--states=PD", f"--Format={metrics.FORMAT}"], controller)
text = client.run([client.SCONTROL, "--oneliner", "show", "node"], controller)
nodes = [parse(line) for line in text.splitlines() if line.startswith("NodeName=")]
print(dict(find_startable(waiting.splitlines(), nodes, time.time() + 3600)))
"""
# What two failed tests of a machine leave in the planner's memory.
BLAME = """
import time
from health.active.turn import MEMORY, CheckState, MachineResult, PlanMemory, save_memory
save_memory(MEMORY, PlanMemory({"cpu": CheckState({"w1": MachineResult(time.time(), failures=2)})}))
"""
ACTIVE = "PartitionName=minivm-active Nodes=ALL Hidden=YES AllowGroups=root State=UP"
# The tests' own partition lets jobs share nodes, whatever they ask for.
ALONE = "PartitionName=alone Nodes=ALL OverSubscribe=NO State=UP"
PYTHON = ("/opt/minivm/bin/python3", "-I", "-c")


class Cluster:
    def __init__(self, made: World, directory: Path) -> None:
        self.world, self.directory = made, directory
        for name in ("state", "kept"):
            (directory / name).mkdir()
        os.chown(directory / "state", SLURM, SLURM)
        (made.mounts / "secrets" / "sssd").mkdir()
        command = "openssl req -x509 -nodes -newkey ec -pkeyopt ec_paramgen_curve:P-256 -subj /CN=x -days 30"
        argv = [*command.split(), "-keyout", "/dev/null"]
        text = subprocess.run(argv, capture_output=True, check=True, text=True).stdout
        (made.mounts / "secrets" / "sssd" / "ca.crt").write_text(text)
        # sched/builtin looks at nothing behind the first job that cannot start, as a backfill that is too short.
        made.configure({"slurm.conf": slurm_conf("SchedulerType=sched/builtin", ACTIVE, ALONE, accounting=False)})
        self.controller = self.new_controller()
        self.workers = [made.pod("worker", name, env={"MINIVM_ACCOUNTING": "none"}) for name in ("w1", "w2")]
        for pod in self.workers:
            pod.add_user()

    def new_controller(self) -> Pod:
        volumes = {"state": "/var/spool/slurmctld", "kept": "/var/lib/minivm/slurm"}
        mounts = [Mount(target, str(self.directory / name), type="bind") for name, target in volumes.items()]
        # Its planner submits nothing: no node is idle for a day.
        env = {"MINIVM_ACCOUNTING": "none", "MINIVM_ACTIVE_CHECKS": "1", "MINIVM_ACTIVE_IDLE": "86400s"}
        pod = self.world.pod("controller", "slurm-controller", env=env, extra_mounts=mounts)
        pod.add_user()
        return pod

    def replace_controller(self) -> None:
        self.controller.remove()
        self.world.pods.remove(self.controller)
        self.controller = self.new_controller().wait_ready()

    def samples(self, family: str) -> dict[str, float]:
        """Return the values of a family by its first label."""
        parsed = text_string_to_metric_families(self.look())  # type: ignore[no-untyped-call]
        return {
            next(iter(sample.labels.values())): sample.value
            for each in parsed
            if each.name == family
            for sample in each.samples
        }

    def slurm(self, *argv: str, user: str = "root") -> str:
        return self.controller.run(*argv, user=user)

    def look(self) -> str:
        return self.controller.metrics()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with world(tmp_path_factory.mktemp("alert-metrics"), "alert-metrics") as made:
        found = Cluster(made, tmp_path_factory.mktemp("volumes"))
        for pod in (found.controller, *found.workers):
            pod.wait_ready()
        yield found


def states(cluster: Cluster) -> dict[str, float]:
    return {name: count for name, count in cluster.samples("minivm_nodes_by_state").items() if count}


def test_the_nodes_are_counted_by_state(cluster: Cluster) -> None:
    until(lambda: states(cluster) == {"idle": 2}, "both are idle", seen=cluster.look)
    cluster.slurm("scontrol", "update", "nodename=w1", "state=drain", "reason=fan")
    job = cluster.slurm("sbatch", "--parsable", "--chdir=/tmp", "-ww2", "--wrap", "sleep 7777", user="demo").strip()
    until(lambda: states(cluster) == {"drained": 1, "busy": 1}, "one is drained, one runs a job", seen=cluster.look)
    cluster.slurm("scancel", job)
    cluster.slurm("scontrol", "update", "nodename=w1", "state=resume")
    until(lambda: states(cluster) == {"idle": 2}, "they are idle again", seen=cluster.look)


def test_a_waiting_job_that_idle_nodes_fit_is_counted(cluster: Cluster) -> None:
    """The scheduler tries nothing behind a job that cannot start."""

    def submit(*options: str) -> str:
        line = ("sbatch", "--parsable", "--chdir=/tmp", "--output=/dev/null", "--partition=alone", *options)
        return cluster.slurm(*line, "--wrap", "sleep 7777", user="demo").strip()

    def count() -> str:
        return cluster.slurm(*PYTHON, COUNT).strip()

    def state(job: str) -> str:
        return cluster.slurm("squeue", "-hj", job, "-o%t").strip()

    def seen() -> str:
        return count() + cluster.slurm("squeue")

    runs = submit("-ww1", "--exclusive")
    until(lambda: state(runs) == "R", "it runs", seen=seen)
    first = submit("-N2", "--exclusive")
    for options in ("--hold", f"--dependency=afterok:{runs}", "--begin=now+1day"):
        submit("-N1", options)
    until(lambda: "(Resources)" in cluster.slurm("squeue", "-hj", first, "-o%R"), "it waits", seen=seen)
    assert count() == "{'alone': 0, 'main': 0}", "the first job needs both nodes, and the rest explain themselves"
    excludes, waits = submit("-N1", "--exclude=w2"), submit("-N1", "--mem=100")
    until(lambda: count() == "{'alone': 1, 'main': 0}", "one of the two would fit", seen=seen)
    assert [state(job) for job in (first, excludes, waits)] == ["PD"] * 3, seen()
    cluster.slurm("scancel", "--user=demo")
    until(lambda: states(cluster) == {"idle": 2}, "the nodes are idle again", seen=seen)


def test_the_planner_tells_idle_partitions_and_blamed_machines(cluster: Cluster) -> None:
    def read(name: str) -> dict[str, float]:
        return cluster.samples(f"minivm_active_{name}")

    until(lambda: read("startable_jobs") == {"alone": 0, "main": 0}, "no job waits", seen=cluster.look)
    assert not read("blamed")

    # No other process may write the memory at the same time.
    cluster.slurm("minivm", "stop", "active-checks")
    cluster.slurm(*PYTHON, BLAME, user="slurm")
    cluster.slurm("minivm", "start", "active-checks")
    blamed = 'minivm_active_blamed{check="cpu",part="machine",name="w1"} 2'
    until(lambda: blamed in cluster.look(), "the machine is blamed", seen=cluster.look)


def test_the_age_of_a_key_outlives_the_pod_and_ends_with_the_key(cluster: Cluster) -> None:
    def read() -> dict[str, float]:
        return cluster.samples("minivm_keys_known_timestamp_seconds")

    first = until(read, "the age is known", seen=cluster.look)
    assert first.keys() == {"munge key"} and abs(first["munge key"] - time.time()) < DAY
    cluster.replace_controller()
    assert until(read, "the age is known again", seen=cluster.look) == first
    kept = cluster.directory / "kept" / "keys.json"
    assert kept.stat().st_mode & 0o777 == 0o600
    kept.write_text(kept.read_text().replace(f"{first['munge key']:.0f}"[:6], "170000"))
    cluster.controller.run("minivm", "restart", "keys")
    until(lambda: read().get("munge key", DAY * 1e6) < first["munge key"], "it is an old one", seen=cluster.look)


def test_the_end_of_a_certificate_is_told_and_no_key(cluster: Cluster) -> None:
    found = until(lambda: cluster.samples("minivm_keys_certificate_end_timestamp_seconds"), "it is known")
    assert found.keys() == {"sssd/ca.crt"}
    assert found["sssd/ca.crt"] - time.time() == pytest.approx(30 * DAY, abs=DAY)
    file = cluster.world.mounts / "secrets" / "sssd" / "ca.crt"
    file.write_text("-----BEGIN CERTIFICATE-----\nQUJD\n-----END CERTIFICATE-----\n")

    def is_unknown() -> bool:
        cluster.controller.run("minivm", "restart", "keys")
        return not cluster.samples("minivm_keys_certificate_end_timestamp_seconds")

    until(is_unknown, "what cannot be read is unknown, not 0", seen=cluster.look)


def test_without_slurmctld_the_nodes_are_unknown(cluster: Cluster) -> None:
    assert states(cluster)
    cluster.controller.run("minivm", "stop", "slurmctld")

    def are_unknown() -> bool:
        """A look of before may write its answer after the first touch."""
        cluster.controller.run("touch", "--date=10 minutes ago", "/run/minivm/metrics.d/slurm/nodes.prom")
        return not cluster.samples("minivm_nodes_by_state")

    until(are_unknown, "an old answer counts no more")
