"""One user's pending jobs fill slurmctld's table, and nobody submits any more, unless accounting limits users."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from images.engine.docker import DockerEngine
from tests.cluster.conftest import NAME
from tests.cluster.researcher import Researcher, World
from tests.cluster.small import small_cluster
from tests.waiting import until

pytestmark = [pytest.mark.docker, pytest.mark.cluster]

MOST, OF_A_USER, ARRAY = 100, 60, 20
VALUES = {"slurm": {"config": {"MaxJobCount": str(MOST), "AccountingStorageEnforce": "associations,limits,qos",
                               "MinJobAge": "2"}}}  # fmt: skip
HELD = "timeout 20 sbatch --hold -o /dev/null --wrap true"  # sbatch asks a full table again and again
# slurmctld takes no array that would fill the table to its last place: single jobs do.
FILL = f"""
for i in $(seq {MOST // ARRAY}); do {HELD} --array=1-{ARRAY} || break; done
for i in $(seq {ARRAY}); do {HELD} || break; done
"""
FULL = "temporarily unable to accept job"
# docs/how-to/accounts-as-code.md
LIMITS = f"qos: [{{name: normal, limits: {{MaxSubmitJobsPerUser: {OF_A_USER}}}}}]"
SUBMIT = "timeout 20 sbatch --parsable -o /dev/null --wrap true"


@pytest.fixture(scope="module")
def limited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    root = tmp_path_factory.mktemp("table")
    with small_cluster(DockerEngine().client, f"{NAME}-table", root, VALUES) as cluster:
        cluster.up(timeout=240)
        world = World(cluster)
        world.slurm("sacctmgr", "-i", "add", "account", "people")
        world.slurm("sacctmgr", "-i", "add", "user", "alice,bob", "account=people")
        yield world


def tasks_of_bob(world: World) -> int:
    return len(world.slurm("squeue", "--noheader", "--array", "--user=bob").splitlines())


def test_a_limit_of_jobs_leaves_other_users_their_room_in_the_job_table(limited: World) -> None:
    alice, bob = Researcher(limited, "alice"), Researcher(limited, "bob")

    def refused() -> bool:
        bob.try_(FILL, timeout=300)
        asked = alice.try_(SUBMIT)
        return asked.returncode != 0 and FULL in asked.stderr

    until(refused, "the table is full", within=300)
    assert tasks_of_bob(limited) > OF_A_USER
    bob("scancel -u bob")
    limited.run("slurm-controller-0", "sh", "-c", f"printf '%s' '{LIMITS}' > /root/limits.yaml")
    limited.run("slurm-controller-0", "minivm", "accounts", "apply", "/root/limits.yaml", "--yes", "--adopt")

    def filled() -> int:
        bob.try_(FILL, timeout=300)
        return tasks_of_bob(limited)

    # slurmctld keeps the cancelled jobs in its table for seconds.
    until(lambda: filled() >= OF_A_USER, "bob has as many jobs as he may have", within=300)
    assert filled() == OF_A_USER
    job = until(lambda: alice.try_(SUBMIT).stdout.strip(), "alice's job is accepted")

    def accounted() -> str:
        return alice(f"sacct -nXP -j {job} -o state").strip()

    until(lambda: accounted() == "COMPLETED", "it runs", seen=accounted)
