"""A user who opens silent connections does not block other users' commands, logins and jobs. A real cluster."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator

import pytest

from tests.cluster.researcher import Researcher, World
from tests.support.flood import flood
from tests.waiting import until

pytestmark = [pytest.mark.docker, pytest.mark.cluster]

IDLE, BUSY = 4000, 20
# More than the daemons take.
AT_SLURMDBD, AT_A_DOOR = 300, 60
TOO_MANY = "held too many connections to"
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


@pytest.fixture(params=["", "srun -Q -n1 -w slurm-worker-0"], ids=["login", "job"])
def place(request: pytest.FixtureRequest, healthy: World) -> Iterator[str]:
    """Yield the words that start a flood on the login pod or in a job, and end the guard's watch of its user."""
    yield request.param
    for pod in ("slurm-login-0", "slurm-worker-0"):
        healthy.run(pod, "minivm", "restart", "port-guard")


# Fewer than the guard of the pod leaves a user, and more.
@pytest.mark.parametrize("idle", [900, IDLE])
def test_a_login_user_s_connections_to_slurmctld_keep_no_other_user_waiting(
    idle: int, alice: Researcher, bob: Researcher
) -> None:
    address = bob.world.running("slurm-controller-0").address
    try:
        with flood(bob, f"{address}:6817", idle, BUSY):
            # A burst delays whoever comes right behind it; what is shown here is that held connections do not.
            until(lambda: not_accepted(bob.world, 6817) <= BUSY, "slurmctld has accepted the flood")
            alice("; ".join([f"{PATIENCE} squeue >/dev/null || exit"] * 5))
            assert alice(f"{PATIENCE} srun -n1 id -un") == "alice\n"
    finally:
        bob.world.run("slurm-login-0", "minivm", "restart", "port-guard")


def test_one_users_connections_to_slurmdbd_keep_no_other_user_from_accounting(
    place: str, alice: Researcher, bob: Researcher
) -> None:
    """slurmdbd takes 100 connections. Without the guard `sacct` waits for as long as one user holds them."""
    address = bob.world.running("slurm-controller-0").address
    with flood(bob, f"{address}:6819", AT_SLURMDBD, BUSY, within=place, is_guarded=True):
        alice("; ".join([f"{PATIENCE} squeue >/dev/null || exit"] * 5))
        job = alice.submit("-o", "/dev/null", script="true")
        alice.wait_for(job, "COMPLETED")
        until(lambda: "COMPLETED" in alice(f"{PATIENCE} sacct -nX -j {job} -o state"), "accounting has the job's end")
        bob.world.wait_for_reason("slurm-worker-0" if place else "slurm-login-0", TOO_MANY)


def test_one_users_connections_to_a_worker_keep_no_other_user_from_black_boxes(
    place: str, alice: Researcher, bob: Researcher
) -> None:
    """A worker answers four silent askers at a time, each for two seconds."""
    worker = "slurm-worker-1"
    job = alice.submit("-w", worker, "-o", "/dev/null", script="exit 3")
    alice.wait_for(job, "FAILED")

    def unknown() -> list[str]:
        texts = json.loads(alice(f"{PATIENCE} minivm job {job} --json"))["unknown"]
        return [text for text in texts if f"what {worker}" in text]

    until(lambda: not unknown(), "the page has the black box", seen=unknown)
    with flood(bob, f"{bob.world.running(worker).address}:8652", AT_A_DOOR, least=10, within=place, is_guarded=True):
        bob.world.wait_for_reason("slurm-worker-0" if place else "slurm-login-0", TOO_MANY)
        # Twice: one page may have come between two of bob's connections.
        until(lambda: not unknown() and not unknown(), "the page has the black box again", seen=unknown)


def test_a_login_user_s_connections_to_slurmrestd_keep_no_other_user_waiting(
    alice: Researcher, bob: Researcher
) -> None:
    """No network policy stands between them here."""
    address = f"{bob.world.running('slurm-controller-0').address}:6820"
    token = bob.world.slurm("scontrol", "token", "username=alice", "lifespan=900").strip().partition("=")[2]
    ask = f"{PATIENCE} python3 -c {shlex.quote(ASK)} http://{address}/slurm/v0.0.40/jobs/ {token}"
    job = alice.submit("-o", "/dev/null", script="sleep 3000")
    assert int(job) in json.loads(alice(ask))
    with flood(bob, address, IDLE, BUSY):
        until(lambda: not_accepted(bob.world, 6820) <= BUSY, "slurmrestd has accepted the flood")
        for _ in range(5):
            assert int(job) in json.loads(alice(ask))
        alice(f"{PATIENCE} squeue >/dev/null")
    alice(f"scancel {job}")


def test_a_job_s_connections_to_slurmd_stop_no_other_job(alice: Researcher, bob: Researcher) -> None:
    job = alice.submit("-w", "slurm-worker-1", "-o", "/dev/null", script="sleep 3000")
    alice.wait_for(job, "RUNNING")
    srun = "srun -Q -n1 -w slurm-worker-0"
    with flood(bob, "slurm-worker-1.slurm-worker:6818", IDLE, BUSY, within=srun):
        assert alice(f"{PATIENCE} srun -Q --overlap --jobid {job} -n1 id -un") == "alice\n"
        alice(f"{PATIENCE} srun -n1 -w slurm-worker-1 true")
    alice(f"scancel {job}")
    alice.wait_for(job, "CANCELLED")


@pytest.mark.parametrize("service", ["nss", "pam"])
def test_connections_to_sssd_keep_nobody_from_logging_in(service: str, alice: Researcher, bob: Researcher) -> None:
    with flood(bob, f"/var/lib/sss/pipes/{service}", 8300):
        for _ in range(3):
            assert alice.try_("true").returncode == 0


def test_connections_to_sshd_from_one_pod_turn_nobody_else_away(alice: Researcher, bob: Researcher) -> None:
    with flood(bob, "localhost:22", 640):
        for _ in range(6):
            assert alice.try_("true").returncode == 0


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
