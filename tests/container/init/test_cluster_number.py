"""slurmctld and its database have one number for the cluster, whatever was lost between them, and never another's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.container.init_pods import Pod, World, slurm_conf, world
from tests.waiting import until

pytestmark = [pytest.mark.docker, pytest.mark.cluster]

SAVED = "/var/spool/slurmctld/clustername"
MISMATCH = "CLUSTER ID MISMATCH"


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[World]:
    with world(tmp_path, "number") as made:
        made.configure({"slurm.conf": slurm_conf()})
        yield made


def sql(pod: Pod, text: str) -> str:
    return pod.code("mariadb", "-Ne", text, "slurm_acct_db")[1].strip()


def known(pod: Pod) -> str:
    return f"minivm|{sql(pod, 'SELECT id FROM cluster_table')}"


def saved(pod: Pod) -> str:
    return pod.code("cat", SAVED)[1].strip()


def answers(pod: Pod) -> bool:
    return pod.code("scontrol", "ping")[0] == 0


def kill(pod: Pod, name: str) -> None:
    pod.run("kill", "-9", str(pod.service(name)["pid"]))


def test_one_number_is_kept_where_both_are_known_to_belong_together(alone: World) -> None:
    """The first registration is lost with the database; slurmctld has made itself a number by then."""
    pod = alone.pod("controller", "slurm-controller")
    until(lambda: "Registering slurmctld" in pod.logs(), "slurmctld registers", seen=pod.logs)
    kill(pod, "mariadb")
    until(lambda: answers(pod) and saved(pod) == known(pod), "they agree", within=240, seen=pod.account)
    # And whatever else may have come between them.
    sql(pod, "UPDATE cluster_table SET id = 999")
    before = pod.logs().count(MISMATCH)
    kill(pod, "slurmctld")
    until(lambda: saved(pod) == "minivm|999" and answers(pod), "the next one starts with it", seen=pod.account)
    assert pod.logs().count(MISMATCH) == before
    # Of a state without the stamp nobody knows whose it is.
    pod.run("rm", "/var/spool/slurmctld/.minivm-database")
    sql(pod, "UPDATE cluster_table SET id = 998")
    kill(pod, "slurmctld")
    numbers = {saved(pod)}

    def refused() -> bool:
        numbers.add(saved(pod))
        return pod.logs().count(MISMATCH) > before

    until(refused, "slurmctld refuses another's state", seen=pod.account)
    # A pod whose slurmctld has failed too often has ended, and has no file to look at.
    assert numbers - {""} == {"minivm|999"}
    assert "this step cannot tell if they belong together" in pod.logs()
