"""Active checks whose account is wrong: the controller's status says what to do, and they run once it is done."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from images.engine.docker import DockerEngine
from tests.cluster.conftest import NAME
from tests.cluster.researcher import World
from tests.cluster.small import small_cluster
from tests.waiting import until

pytestmark = [pytest.mark.docker, pytest.mark.cluster]

CONTROLLER = "slurm-controller-0"
VALUES = {
    "slurm": {"config": {"AccountingStorageEnforce": "associations"}},
    "activeChecks": {"enabled": True, "idleSeconds": 30, "account": "tests"},
}


@pytest.fixture
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    root = tmp_path_factory.mktemp("active")
    with small_cluster(DockerEngine().client, f"{NAME}-active", root, VALUES) as cluster:
        cluster.up(timeout=240)
        yield World(cluster)


def test_a_wrong_account_is_told_and_then_mended(world: World) -> None:
    def why() -> str:
        return world.cluster.exec(CONTROLLER, ["minivm", "why"])[1]

    told = "found 'tests', expected an account that has the user slurm, which is in none"
    until(lambda: f"activeChecks.account: cannot submit active checks: {told}" in why(), "it is told", seen=why)
    world.slurm("sacctmgr", "-i", "add", "account", "tests")
    world.slurm("sacctmgr", "-i", "add", "user", "slurm", "account=tests")
    until(lambda: "active-check" not in why(), "the checks are submitted", seen=why)

    def jobs() -> str:
        return world.slurm("sacct", "-anXP", "--starttime=now-1days", "-o", "jobname,user,account")

    until(lambda: "|slurm|tests" in jobs(), "a check runs", seen=jobs)

    def results() -> str:
        return world.cluster.exec(CONTROLLER, ["minivm", "active"])[1]

    until(lambda: "slowest: slurm-worker-0" in results(), "the controller knows a rate of the node", seen=results)
