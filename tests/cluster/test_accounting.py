"""Accounting in a database that is somebody else's, and none at all; and `up` and `down` of a small cluster."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cluster.local import LocalCluster
from images.engine.docker import DockerEngine
from tests.cluster.conftest import IMAGES, NAME
from tests.cluster.researcher import Researcher, World
from tests.cluster.small import small_cluster
from tests.pages import blocks
from tests.reader import ROOT, follow, programs
from tests.waiting import until

pytestmark = [pytest.mark.docker, pytest.mark.cluster]

CONTROLLER = "slurm-controller-0"
PAGE = blocks(ROOT / "docs" / "how-to" / "restore-accounting.md")
# With what ends a value in Slurm's files, and what begins a comment.
PASSWORD = r"o#ne tw\o"
ANOTHER = "thr#ee four"
# Debian's MariaDB, with one user who comes over the network with a password, as at a site.
DATABASE = """
mariadb-install-db --no-defaults --user=mysql --datadir=/tmp/db --skip-test-db >/dev/null 2>&1
install -o mysql -m 400 /run/users.sql /tmp
exec mariadbd --no-defaults --user=mysql --datadir=/tmp/db --socket=/tmp/db/socket --init-file=/tmp/users.sql
"""
USERS = """\
CREATE DATABASE IF NOT EXISTS slurm_acct_db;
CREATE USER IF NOT EXISTS slurm IDENTIFIED BY '{}';
GRANT ALL ON slurm_acct_db.* TO slurm;
"""


@contextmanager
def database(cluster: LocalCluster, users: Path) -> Iterator[str]:
    """Run a MariaDB beside the cluster, on its network but none of its pods, and yield its container."""
    api = cluster.kubelet.api
    cluster.kubelet.ensure_network()
    name = f"{cluster.kubelet.network}-mariadb"
    endpoint = api.create_networking_config({cluster.kubelet.network: api.create_endpoint_config(aliases=["mariadb"])})
    secret = api.create_host_config(mounts=[{"Type": "bind", "Source": str(users), "Target": "/run/users.sql"}])
    made = api.create_container(
        f"{IMAGES}/controller:latest",
        name=name,
        entrypoint=["bash", "-ec", DATABASE],
        host_config=secret,
        networking_config=endpoint,
    )["Id"]
    try:
        api.start(made)
        yield str(made)
    finally:
        api.remove_container(made, force=True, v=True)


def change_password(mariadb: Any) -> None:
    statement = f"ALTER USER slurm IDENTIFIED BY '{ANOTHER}'"
    changed = mariadb.exec_run(["mariadb", "--no-defaults", "--socket=/tmp/db/socket", "-e", statement])
    assert changed.exit_code == 0, changed.output


def command_lines(cluster: LocalCluster) -> str:
    """Return the command lines of the controller's processes, of which some end while the list is made."""
    text = cluster.exec(CONTROLLER, ["sh", "-c", "cat /proc/[0-9]*/cmdline 2>/dev/null"])[1]
    assert "slurmctld" in text
    return text


def back_up(name: str, directory: Path, job: str) -> None:
    """Follow the page's backup of an external database."""
    (external,) = [block for block in PAGE if block.needs]
    assert "MYSQL_PWD" in external.text and "--password" not in external.text
    env = reader(name, directory)
    subprocess.run(["sh", "-ec", external.text], cwd=directory, env=env, check=True, timeout=120)
    assert_whole(directory / "accounting.sql", job)


def test_an_external_database_goes_and_comes_back_and_nothing_is_lost(tmp_path: Path) -> None:
    users = tmp_path / "users.sql"
    users.touch(0o600)
    users.write_text(USERS.format(PASSWORD.replace("\\", "\\\\")))
    values: dict[str, Any] = {"accounting": {"mode": "external", "database": {"host": "mariadb", "password": PASSWORD}}}
    client, name = DockerEngine().client, f"{NAME}-db"
    with small_cluster(client, name, tmp_path, values) as cluster, database(cluster, users) as mariadb:
        cluster.up(timeout=240)
        small = World(cluster)
        bob = Researcher(small, "bob")

        def accounted(job: str) -> str:
            return bob.try_(f"sacct -n -X -P -j {job} -o state,user").stdout

        def wait_accounted(job: str) -> None:
            until(lambda: accounted(job) == "COMPLETED|bob\n", f"job {job} is accounted", seen=lambda: accounted(job))

        def complaints() -> str:
            return "; ".join(small.row(CONTROLLER).also)

        before = bob.submit("-o", "/dev/null", script="true")
        bob.wait_for(before, "COMPLETED")
        wait_accounted(before)
        until(lambda: "accounting" not in complaints(), "the pod is content", seen=complaints)
        assert PASSWORD not in command_lines(cluster)

        client.api.stop(mariadb, timeout=20)
        while_away = bob.submit("-o", "/dev/null", script="true")
        bob.wait_for(while_away, "COMPLETED")
        said = bob.try_("timeout 60 sacct -n -X")
        assert said.returncode == 1 and "Unable to connect to database" in said.stderr
        until(lambda: "slurmdbd cannot reach its database" in complaints(), "the pod tells of it", seen=complaints)
        small.wait_ready(CONTROLLER)

        client.api.start(mariadb)
        for job in (before, while_away):
            wait_accounted(job)
        until(lambda: "accounting" not in complaints(), "the pod is content", seen=complaints)

        back_up(name, tmp_path, before)

        # Another password: first in the Secret, then in the database.
        values["accounting"]["database"]["password"] = ANOTHER
        cluster.options = replace(cluster.options, overrides=values)
        cluster.up(timeout=240)
        small.run(CONTROLLER, "minivm", "restart", "keys")  # by itself it looks every 45 seconds
        until(lambda: "once the database accepts it" in complaints(), "the pod waits for it", seen=complaints)
        small.wait_ready(CONTROLLER)
        change_password(client.containers.get(mariadb))
        small.run(CONTROLLER, "minivm", "restart", "keys")
        until(lambda: "keys: " not in complaints(), "slurmdbd has taken it", seen=complaints)
        installed = "/etc/slurm/slurmdbd.conf"
        written = ANOTHER.replace("#", r"\#")
        until(lambda: written in cluster.exec(CONTROLLER, ["cat", installed])[1], "the new one is in use")
        after = bob.submit("-o", "/dev/null", script="true")
        bob.wait_for(after, "COMPLETED")
        for job in (before, after):
            wait_accounted(job)
        assert ANOTHER not in command_lines(cluster)
        assert ANOTHER not in cluster.exec(CONTROLLER, ["minivm", "why"])[1]


def reader(name: str, directory: Path) -> dict[str, str]:
    """Build the environment of an operator who follows a page at this cluster."""
    return os.environ | {"MINIVM_NAME": name, "PATH": f"{programs(directory / 'bin')}:{os.environ['PATH']}"}


def assert_whole(dump: Path, job: str) -> None:
    text = dump.read_text(errors="replace")
    assert text.rstrip().splitlines()[-1].startswith("-- Dump completed on"), text[-400:]
    assert "INSERT INTO `minivm_job_table` VALUES" in text and job in text


def test_accounting_is_restored_into_a_new_cluster_and_numbers_go_on(tmp_path: Path) -> None:
    """The page's commands as written, with a cluster that is lost between the first block and the second."""
    client, name = DockerEngine().client, f"{NAME}-restore"
    backup, restore, look = [block for block in PAGE if block.runs]
    env = reader(name, tmp_path)

    def numbers(cluster: LocalCluster) -> list[str]:
        asked = ["sacct", "-n", "-a", "-X", "-P", "-S", "2000-01-01", "-o", "jobid,state"]
        return cluster.exec(CONTROLLER, asked)[1].split()

    with small_cluster(client, name, tmp_path, {}) as cluster:
        cluster.up(timeout=240)
        bob = Researcher(World(cluster), "bob")
        jobs = [bob.submit("-o", "/dev/null", script="true") for _ in range(3)]
        for job in jobs:
            bob.wait_for(job, "COMPLETED")
        hangs = bob.submit("-o", "/dev/null", script="sleep 7777")
        bob.wait_for(hangs, "RUNNING")
        wanted = [*(f"{job}|COMPLETED" for job in jobs), f"{hangs}|RUNNING"]
        until(lambda: numbers(cluster) == wanted, "all are accounted", seen=lambda: numbers(cluster))
        follow(backup, env, tmp_path)
        assert_whole(tmp_path / "accounting.sql", hangs)
        cluster.down()

        cluster.up(timeout=240)
        # slurmdbd may answer later than the pod is ready.
        until(lambda: numbers(cluster) == [], "it is a new one", seen=lambda: numbers(cluster))
        small = World(cluster)
        follow(restore, env, tmp_path)
        small.wait_ready()
        said = follow(look, env, tmp_path)
        assert f"the next job gets number {int(hangs) + 1}: the accounting database knows job {hangs}" in said
        assert all(job in said for job in jobs)
        until(lambda: numbers(cluster)[:3] == wanted[:3], "all are there again", seen=lambda: numbers(cluster))
        assert f"{hangs}|RUNNING" not in numbers(cluster), "it does not run for ever"
        bob = Researcher(small, "bob")
        following = bob.submit("-o", "/dev/null", script="true")
        assert int(following) == int(hangs) + 1
        bob.wait_for(following, "COMPLETED")
        until(lambda: f"{following}|COMPLETED" in numbers(cluster), "and is accounted", seen=lambda: numbers(cluster))

        # The state alone is lost.
        small.run(CONTROLLER, "minivm", "stop", "slurmctld")
        small.run(CONTROLLER, "sh", "-c", "rm -rf /var/spool/slurmctld/* /var/spool/slurmctld/.[!.]*")
        small.run(CONTROLLER, "minivm", "start", "slurmctld")
        small.run("slurm-worker-0", "minivm", "restart", "slurmd")
        small.wait_ready()
        after = bob.submit("-o", "/dev/null", script="true")
        assert int(after) == int(following) + 1
        bob.wait_for(after, "COMPLETED")


@pytest.fixture(scope="module")
def unaccounted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    values = {"accounting": {"mode": "none"}}
    with small_cluster(DockerEngine().client, f"{NAME}-none", tmp_path_factory.mktemp("none"), values) as cluster:
        cluster.up(timeout=240)
        yield cluster


def test_without_accounting_jobs_run_and_sacct_says_so(unaccounted: LocalCluster) -> None:
    bob = Researcher(World(unaccounted), "bob")
    job = bob.submit("-o", "out", script="hostname")
    bob.wait_for(job, "COMPLETED")
    assert bob("cat out") == "slurm-worker-0\n"
    said = bob.try_("sacct")
    assert said.returncode == 1 and "accounting storage is disabled" in said.stderr
    # Nobody complains of what was not asked for.
    complaints = [text for row in unaccounted.status() for text in row.also]
    assert not [text for text in complaints if "slurmdbd" in text or "accounting" in text]


def test_up_starts_again_what_hangs_and_what_somebody_stopped(unaccounted: LocalCluster) -> None:
    before = unaccounted.kubelet.list_pods()
    hung, stopped = before["slurm-demo-0"], before["slurm-worker-0"]
    first = (unaccounted.kubelet.inspect(hung.container) or {})["State"]["Pid"]
    os.kill(first, signal.SIGSTOP)
    unaccounted.kubelet.api.stop(stopped.container, timeout=20)
    assert "`make up` starts it again" in World(unaccounted).row("slurm-worker-0").why
    unaccounted.up(timeout=240)
    after = unaccounted.kubelet.list_pods()
    assert {name: pod.container for name, pod in after.items()} == {name: pod.container for name, pod in before.items()}
    assert (unaccounted.kubelet.inspect(hung.container) or {})["State"]["Pid"] != first
    World(unaccounted).wait_ready()


def test_down_leaves_nothing_behind(unaccounted: LocalCluster) -> None:
    api, name = unaccounted.kubelet.api, unaccounted.options.name
    assert unaccounted.kubelet.volumes()
    check = {"label": f"minivm.check={name}"}  # as a killed `up --rehearse` leaves it, running in the network
    host = api.create_host_config(network_mode=unaccounted.kubelet.network)
    image = unaccounted.kubelet.list_pods()["slurm-login-0"].image
    api.start(
        api.create_container(image, ["600"], entrypoint=["/bin/sleep"], host_config=host, labels={"minivm.check": name})
    )
    assert api.containers(filters=check)
    unaccounted.down()
    assert not api.containers(all=True, filters=check)
    assert not unaccounted.kubelet.list_pods()
    assert not unaccounted.kubelet.volumes()
    assert not api.networks(filters={"label": f"minivm.cluster={name}"})
    assert not unaccounted.state.exists()
