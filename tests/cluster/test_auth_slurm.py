"""A new cluster, whose daemons know each other by Slurm's own auth/slurm: users' work, a flood, and another key."""

from __future__ import annotations

import base64
import json
import os
import re
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.values import merge
from images.engine.docker import DockerEngine
from tests.cluster.conftest import NAME
from tests.cluster.researcher import Researcher, World
from tests.cluster.small import small_cluster
from tests.support.flood import flood
from tests.support.orders import check_orders_are_refused
from tests.waiting import until

pytestmark = [pytest.mark.docker, pytest.mark.cluster]

PODS = ("slurm-controller-0", "slurm-login-0", "slurm-worker-0", "slurm-worker-1")
SOCKET = "/run/slurm/sack.socket"


@pytest.fixture(scope="module")
def signed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with small_cluster(
        DockerEngine().client, f"{NAME}-auth", tmp_path_factory.mktemp("auth"), {}, workers=2
    ) as cluster:
        cluster.up(timeout=240)
        yield World(cluster)


@pytest.fixture
def ann(signed: World) -> Researcher:
    signed.wait_idle()
    return Researcher(signed, "alice")


def test_users_work_without_a_munged_anywhere(signed: World, ann: Researcher) -> None:
    for pod in PODS:
        assert signed.cluster.exec(pod, ["pgrep", "munged"])[0] == 1
        assert signed.run(pod, "stat", "-c", "%a %U", "/etc/slurm/slurm.key").split() == ["400", "slurm"]
    assert ann.try_("cat", "/etc/slurm/slurm.key").returncode != 0
    assert sorted(ann("srun -Q -N2 hostname").split()) == ["slurm-worker-0", "slurm-worker-1"]
    job = ann.submit("-N2", "-o", "/dev/null", script="srun hostname; sleep 300")
    ann.wait_for(job, "RUNNING")
    ann(f"scancel {job}")
    until(lambda: "CANCELLED" in ann(f"sacct -nXP -j {job} -o state"), "accounting has the job's end")


def test_a_job_outlives_slurmd_and_a_worker_comes_back(signed: World, ann: Researcher) -> None:
    job = ann.submit(
        "-w", "slurm-worker-0", "-o", "/dev/null", script="until test -e again; do sleep 1; done; srun true"
    )
    ann.wait_for(job, "RUNNING")
    signed.run("slurm-worker-0", "minivm", "restart", "slurmd")
    ann("touch again")
    ann.wait_for(job, "COMPLETED")
    ann("rm again")
    signed.cluster.delete("slurm-worker-0")
    signed.wait_ready("slurm-worker-0")
    assert ann("srun -Q -w slurm-worker-0 hostname") == "slurm-worker-0\n"


def test_a_worker_signs_while_its_slurmd_reconfigures(signed: World, ann: Researcher) -> None:
    """slurmd first waits for its requests, here the end of a job that outlives SIGTERM, and signs nothing meanwhile."""
    worker, script = "slurm-worker-0", "trap 'touch signalled' TERM; touch begun; while :; do sleep 1; done"

    def said() -> str:
        return signed.run(worker, "minivm", "logs", "slurmd", "--lines", "2000")

    def signs_meanwhile() -> bool:
        """Return False where the job's end, 30 s after its SIGTERM, came before the answer, as on a busy machine."""
        signed.wait_idle()
        job = ann.submit("-w", worker, "--mem=50", "-o", "/dev/null", script=script)
        until(lambda: ann.try_("rm begun").returncode == 0, "the job has begun")
        ann(f"scancel {job}")
        until(lambda: ann.try_("rm signalled").returncode == 0, "slurmd ends the job")
        slurmd = signed.run(worker, "pgrep", "-x", "slurmd")
        before = said().count("Triggering reconfigure")
        signed.slurm("scontrol", "reconfigure")
        until(lambda: said().count("Triggering reconfigure") > before, "slurmd is to reconfigure", seen=said)
        assert signed.run(worker, "sinfo", "-h", "-o", "%P").strip()
        return signed.run(worker, "pgrep", "-x", "slurmd") == slurmd

    until(signs_meanwhile, "the answer comes before the reconfiguration", within=400, seen=said)


def test_a_job_s_connections_on_a_worker_end_no_other_job_there(signed: World, ann: Researcher) -> None:
    """Job steps end by a signature of the worker's sackd; the guard ends the processes that hold its connections."""
    bob, worker = Researcher(signed, "bob"), "slurm-worker-0"

    def reasons() -> str:
        return signed.cluster.exec(worker, ["minivm", "why"])[1]

    script = "until test -e flooded; do sleep 1; done; srun true"
    job = ann.submit("-w", worker, "-o", "/dev/null", "--mem=50", script=script)
    ann.wait_for(job, "RUNNING")
    with flood(bob, SOCKET, 1000, is_guarded=True, within="srun -Q -n1 --mem=200 -w slurm-worker-0"):
        try:
            ann("touch flooded")
            ann.wait_for(job, "COMPLETED")
            ann("rm flooded")
            until(lambda: "held all connections to sackd" in reasons(), "the user is blocked", seen=reasons)
            # The node has two processors: this step waits for the job's.
            assert ann("srun -Q -w slurm-worker-0 --mem=50 sinfo -h -o %P").strip()
            signed.wait_ready(worker)
        finally:
            signed.run(worker, "minivm", "restart", "sack-guard")


def test_a_user_orders_no_daemon_to_end_or_change(signed: World, ann: Researcher) -> None:
    check_orders_are_refused(ann, Researcher(signed, "bob"), "slurm-worker-0", "slurm")


def keys(**default: bool) -> str:
    return json.dumps({"keys": [json.loads(KEYS[name]) | ({"use": "default"} if first else {})
                                for name, first in default.items()]})  # fmt: skip


KEYS: dict[str, str] = {}
READERS = {
    "slurm-controller-0": ["slurmctld", "slurmdbd"],
    "slurm-login-0": ["sackd"],
    "slurm-worker-0": ["sackd", "slurmd"],
    "slurm-worker-1": ["sackd", "slurmd"],
}


def unread(signed: World) -> dict[str, list[str]]:
    """Return the daemons of each pod that have not read the installed slurm.jwks, by the pods' own words."""
    words = {row.pod: " ".join(row.also) for row in signed.cluster.status()}
    told = {pod: sorted(re.findall(r"(\w+) has not read the new (?:slurm.key and )?slurm.jwks", text))
            for pod, text in words.items()}  # fmt: skip
    return {pod: daemons for pod, daemons in told.items() if daemons}


def jwk(name: str, data: bytes) -> str:
    return json.dumps({"kid": name, "kty": "oct", "alg": "HS256", "k": base64.b64encode(data).decode()})


def test_the_key_is_rotated_under_a_running_job(signed: World, ann: Researcher) -> None:
    KEYS["old"] = jwk("old", (signed.cluster.state / "keys/slurm.key").read_bytes())
    KEYS["new"] = jwk("new", os.urandom(1024))
    job = ann.submit("-N2", "-o", "/dev/null", "--mem=50", script="until test -e go; do sleep 1; done; srun -N2 true")
    ann.wait_for(job, "RUNNING")
    for pod in READERS:
        signed.run(pod, "minivm", "restart", "keys")  # which has seen the daemons' processes by then
    for text in (keys(old=True, new=False), keys(old=False, new=True), keys(new=True)):
        options = signed.cluster.options
        over = merge(options.overrides, {"secrets": {"slurm": {"jwks": text}}})
        signed.cluster.options = replace(options, overrides=over)
        signed.cluster.up(timeout=240)
        for pod in PODS:
            signed.run(pod, "minivm", "restart", "slurm-key")
        for pod in READERS:
            signed.run(pod, "minivm", "restart", "keys")  # as every 45 seconds
        until(lambda: unread(signed) == READERS, "the pods say which daemons have the key before")
        signed.slurm("scontrol", "reconfigure")
        signed.run("slurm-controller-0", "minivm", "restart", "slurmdbd")
        for pod in READERS:
            signed.run(pod, "minivm", "restart", "keys")
        until(lambda: not unread(signed), "all daemons have read it")
        until(lambda: ann.try_("srun -Q -N2 --mem=50 true && sacct -n").returncode == 0, "the key of this step serves")
        assert ann.state(job) == "RUNNING"
    ann("touch go")
    ann.wait_for(job, "COMPLETED")
    ann("rm go")


def test_the_login_pod_takes_another_host_key_and_make_ssh_knows_it(
    signed: World, ann: Researcher, tmp_path: Path
) -> None:
    made = tmp_path / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", made], check=True)
    public = made.with_suffix(".pub").read_text().strip()
    of_the_values = {"keys": {"ssh_host_ed25519_key": made.read_text()}, "public": [public]}
    options, container = signed.cluster.options, signed.running("slurm-login-0").container
    over = merge(options.overrides, {"secrets": {"sshHostKeys": of_the_values}})
    signed.cluster.options = replace(options, overrides=over)
    signed.cluster.up(timeout=240)
    signed.run("slurm-login-0", "minivm", "restart", "keys")  # as every 45 seconds
    until(lambda: ann.try_("true").returncode == 0, "ssh takes the new key for the login pod's")
    assert public in signed.cluster.known_hosts.read_text()
    assert signed.running("slurm-login-0").container == container


def test_connections_to_a_login_pod_s_sackd_keep_no_other_user_waiting(signed: World, ann: Researcher) -> None:
    """Without the guard sackd answers nobody while one user holds the few connections that it takes.

    The guard ends the processes that hold them. It does not restart sackd, which would fail other users' commands.
    """
    bob, login = Researcher(signed, "bob"), "slurm-login-0"

    def reasons() -> str:
        return signed.cluster.exec(login, ["minivm", "why"])[1]

    sackd = signed.run(login, "pgrep", "-x", "sackd")
    with flood(bob, SOCKET, 1000, 20, least=10, is_guarded=True):
        try:
            ann("timeout 60 sinfo")
            until(lambda: "held all connections to sackd" in reasons(), "the user is blocked", seen=reasons)
            assert signed.run(login, "pgrep", "-x", "sackd") == sackd
            ann("; ".join(["timeout 60 squeue >/dev/null || exit"] * 5))
            assert ann("srun -Q -n1 id -un") == "alice\n"
        finally:
            signed.run(login, "minivm", "restart", "sack-guard")
    until(lambda: bob.try_("squeue").returncode == 0, "the user who was blocked is answered again")


# Each user of the numbers given holds nine connections, and opens those anew that the daemon or the guard ends.
CROWD = """
import os, socket, sys, time
for number in range(3000, 3000 + int(sys.argv[1])):
    if os.fork() == 0:
        os.setgroups([]); os.setgid(number); os.setuid(number)
        held = {}
        while True:
            for place in range(9):
                try:
                    if place in held and held[place].recv(1, socket.MSG_DONTWAIT) == b"":
                        del held[place]
                except BlockingIOError:
                    continue
                except OSError:
                    del held[place]
                try:
                    made = socket.socket(socket.AF_UNIX)
                    made.settimeout(1)
                    made.connect(sys.argv[2])
                    held[place] = made
                except OSError:
                    pass
            time.sleep(0.2)
time.sleep(float(sys.argv[3]))
os.killpg(0, 9)
"""


def test_users_who_fill_a_login_pod_s_sackd_together_keep_no_other_waiting(signed: World, ann: Researcher) -> None:
    """Six users with nine connections each hold more than the 50 that sackd of 24.11 takes."""
    login = "slurm-login-0"

    def blocked() -> int:
        words = signed.cluster.exec(login, ["minivm", "why"])[1]
        return len(re.findall(r"user id 300\d", words))

    start = 'setsid python3 -c "$0" 6 "$1" 900 >/dev/null 2>&1 & echo $!'
    group = signed.run(login, "sh", "-c", start, CROWD, SOCKET).strip()
    try:
        until(lambda: blocked() >= 3, "those with the most are blocked", seen=blocked)
        # The six go on; while they hold all connections, no five commands in a row are answered.
        five = "; ".join(["timeout 60 squeue >/dev/null || exit"] * 5)
        until(lambda: ann.try_(five).returncode == 0, "another user is answered, time after time")
    finally:
        signed.run(login, "sh", "-c", f"kill -9 -{group} || true")
        signed.run(login, "minivm", "restart", "sack-guard")
    until(lambda: blocked() == 0, "nobody is blocked any more")
