"""A user who opens silent connections does not block other users' commands, logins and jobs. A real cluster."""

from __future__ import annotations

import json
import re
import shlex

import pytest

from tests.cluster.researcher import Researcher, World
from tests.support.flood import flood
from tests.waiting import until

pytestmark = [pytest.mark.docker, pytest.mark.cluster]

IDLE, BUSY = 4000, 20
HANGS = "serving: slurmctld does not answer authenticated requests within 5 s"
# Of the other user for one command, also on a busy machine; the flood lasts longer than all of them.
PATIENCE = "timeout 60"

ASK = """
import json, sys, urllib.request
request = urllib.request.Request(sys.argv[1], headers={"X-SLURM-USER-TOKEN": sys.argv[2]})
print([job["job_id"] for job in json.load(urllib.request.urlopen(request, timeout=60))["jobs"]])
"""


def not_accepted(world: World, port: int) -> int:
    """Return how many connections to the controller's port wait in the kernel for slurmctld to accept them."""
    rows = world.run("slurm-controller-0", "cat", "/proc/net/tcp", "/proc/net/tcp6").splitlines()
    listening = [row.split() for row in rows if f":{port:04X} " in row and row.split()[3] == "0A"]
    return max(int(row[4].partition(":")[2], 16) for row in listening if row[1].endswith(f":{port:04X}"))


@pytest.fixture
def bob(healthy: World) -> Researcher:
    return Researcher(healthy, "bob")


def test_a_login_user_s_connections_to_slurmctld_keep_no_other_user_waiting(alice: Researcher, bob: Researcher) -> None:
    address = bob.world.running("slurm-controller-0").address
    with flood(bob, f"{address}:6817", IDLE, BUSY) as held:
        assert held >= 100
        # A burst delays whoever comes right behind it; what is shown here is that held connections do not.
        until(lambda: not_accepted(bob.world, 6817) <= BUSY, "slurmctld has accepted the flood")
        alice("; ".join([f"{PATIENCE} squeue >/dev/null || exit"] * 5))
        assert alice(f"{PATIENCE} srun -n1 id -un") == "alice\n"


def test_a_login_user_s_connections_to_slurmdbd_stop_no_job_and_no_look_at_the_queue(
    alice: Researcher, bob: Researcher
) -> None:
    """slurmdbd takes 100 connections, so `sacct` waits while one user holds them. slurmctld keeps its own."""
    address = bob.world.running("slurm-controller-0").address
    with flood(bob, f"{address}:6819", IDLE, BUSY) as held:
        assert held >= 100
        alice("; ".join([f"{PATIENCE} squeue >/dev/null || exit"] * 5))
        job = alice.submit("-o", "/dev/null", script="true")
        alice.wait_for(job, "COMPLETED")
    until(lambda: "COMPLETED" in alice(f"sacct -nX -j {job} -o state"), "accounting has the job's end")


def test_a_login_user_s_connections_to_slurmrestd_keep_no_other_user_waiting(
    alice: Researcher, bob: Researcher
) -> None:
    """No network policy stands between them here."""
    address = f"{bob.world.running('slurm-controller-0').address}:6820"
    token = bob.world.slurm("scontrol", "token", "username=alice", "lifespan=900").strip().partition("=")[2]
    ask = f"{PATIENCE} python3 -c {shlex.quote(ASK)} http://{address}/slurm/v0.0.40/jobs/ {token}"
    job = alice.submit("-o", "/dev/null", script="sleep 3000")
    assert int(job) in json.loads(alice(ask))
    with flood(bob, address, IDLE, BUSY) as held:
        assert held >= 100
        until(lambda: not_accepted(bob.world, 6820) <= BUSY, "slurmrestd has accepted the flood")
        for _ in range(5):
            assert int(job) in json.loads(alice(ask))
        alice(f"{PATIENCE} squeue >/dev/null")
    alice(f"scancel {job}")


def test_a_job_s_connections_to_slurmd_stop_no_other_job(alice: Researcher, bob: Researcher) -> None:
    job = alice.submit("-w", "slurm-worker-1", "-o", "/dev/null", script="sleep 3000")
    alice.wait_for(job, "RUNNING")
    srun = "srun -Q -n1 -w slurm-worker-0"
    with flood(bob, "slurm-worker-1.slurm-worker:6818", IDLE, BUSY, within=srun) as held:
        assert held >= 100
        assert alice(f"{PATIENCE} srun -Q --overlap --jobid {job} -n1 id -un") == "alice\n"
        alice(f"{PATIENCE} srun -n1 -w slurm-worker-1 true")
    alice(f"scancel {job}")
    alice.wait_for(job, "CANCELLED")


@pytest.mark.parametrize("service", ["nss", "pam"])
def test_connections_to_sssd_keep_nobody_from_logging_in(service: str, alice: Researcher, bob: Researcher) -> None:
    with flood(bob, f"/var/lib/sss/pipes/{service}", 8300) as held:
        assert held >= 100
        for _ in range(3):
            assert alice.try_("true", timeout=60).returncode == 0


def test_connections_to_sshd_from_one_pod_turn_nobody_else_away(alice: Researcher, bob: Researcher) -> None:
    with flood(bob, "localhost:22", 640) as held:
        assert held >= 100
        for _ in range(6):
            assert alice.try_("true", timeout=60).returncode == 0


def test_a_slurmctld_that_hangs_makes_no_pod_look_ready(healthy: World) -> None:
    """Its process lives and its port accepts: what users ask is not answered, and the pods say so."""
    controller, login = "slurm-controller-0", "slurm-login-0"
    healthy.run(controller, "pkill", "-STOP", "-x", "slurmctld")
    try:
        for pod in (controller, login):
            healthy.wait_for_reason(pod, HANGS)
        assert re.search(r"^serving +failing", healthy.run(controller, "minivm", "status"), re.MULTILINE)
        assert "slurmctld does not answer" in healthy.row(controller).why
    finally:
        healthy.run(controller, "pkill", "-CONT", "-x", "slurmctld")
