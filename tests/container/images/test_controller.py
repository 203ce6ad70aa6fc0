"""Programs of the controller's image alone; the init tests cover its daemons together."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from testinfra.host import Host  # type: ignore[import-untyped]  # ships no types

from tests.container.conftest import docker, with_munge
from tests.container.init_pods import IMAGES
from tests.slurm import release_of
from tests.waiting import until

pytestmark = [pytest.mark.docker, pytest.mark.cluster]

SOCKET = "/tmp/db/mysqld.sock"


@pytest.fixture
def controller(idle: Callable[[str], Host]) -> Host:
    return idle("controller")


def test_mariadb_makes_a_database_starts_dumps_and_stops(controller: Host) -> None:
    """With the server's core package and the few client tools that were kept."""
    run = controller.check_output
    run("rm -rf /tmp/db && install -d -o mysql -g mysql /tmp/db")
    run(
        "mariadb-install-db --user=mysql --datadir=/tmp/db/data --skip-test-db --auth-root-authentication-method=socket"
    )
    run(
        f"nohup mariadbd --user=mysql --datadir=/tmp/db/data --socket={SOCKET} --pid-file=/tmp/db/pid --skip-networking"
        " > /tmp/db/log 2>&1 &"
    )
    ping = f"mariadb-admin --socket={SOCKET} ping"
    until(lambda: controller.run(ping).rc == 0, "mariadbd answers", seen=lambda: run("cat /tmp/db/log"))
    run(f"mariadb --socket={SOCKET} -e 'create database d; create table d.t (a int); insert into d.t values (42)'")
    assert "42" in run(f"mariadb-dump --socket={SOCKET} d")
    run(f"mariadb-admin --socket={SOCKET} shutdown")


@pytest.mark.parametrize("how", ["bytes:1024", "letters:32", "ed25519"])
def test_it_makes_a_clusters_keys_as_the_charts_job_runs_it(how: str) -> None:
    """The Job runs as nobody, on a read-only root with a MiB in /tmp, without any capability."""
    code = f"from init.helpers import make_keys; print(len(make_keys.fresh(make_keys.parse('s:k:{how}'))))"
    said = docker(
        "run", "--rm", "--read-only", "--tmpfs", "/tmp:size=1m", "--user", "65534:65534", "--cap-drop", "ALL",
        "--security-opt", "no-new-privileges", "--network", "none", "--entrypoint", "/opt/minivm/bin/python3",
        f"{IMAGES}/controller:latest", "-I", "-c", code,
    )  # fmt: skip
    assert int(said) >= int(how.partition(":")[2] or 300)


@pytest.mark.parametrize("plugin", ["accounting_storage_mysql", "auth_jwt", "auth_munge", "select_cons_tres", "mpi_*"])
def test_slurm_has_the_plugin(controller: Host, plugin: str) -> None:
    if plugin == "mpi_*":
        plugin = f"mpi_{release_of(f'{IMAGES}/controller:latest').mpi[0]}"
    found = controller.check_output(f"find /usr/lib -name '{plugin}*.so'").split()
    assert found
    for path in found:
        missing = [line for line in controller.check_output(f"ldd {path}").splitlines() if "not found" in line]
        assert [line for line in missing if "libslurmfull.so" not in line] == []


def test_slurmrestd_lists_its_interfaces(controller: Host) -> None:
    # It unshares namespaces first, which a pod may not; and it is nobody's business to be root.
    security = "SLURMRESTD_SECURITY=disable_unshare_sysv,disable_unshare_files"
    command = f"SLURM_CONF={with_munge(controller)} {security} slurmrestd -d list"
    listed = controller.run(f"su -s /bin/sh nobody -c '{command}'")
    assert "data_parser/" in listed.stdout + listed.stderr


def test_no_database_was_made_at_build(controller: Host) -> None:
    """Every pod would share its server id and its keys."""
    assert controller.check_output("ls -A /var/lib/mysql") == ""
