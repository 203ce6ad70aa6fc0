"""A cluster of an older version, by munge: it keeps munge, users work, floods block one user, and it can move."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Iterator
from dataclasses import replace

import pytest

from cluster import ClusterError
from cluster.change.plan import UpPlan
from cluster.local import LocalCluster, read_options
from cluster.values import UpRequest, auth, merge, settle
from images.engine.docker import DockerEngine
from tests.cluster.conftest import NAME
from tests.cluster.researcher import Researcher, World
from tests.cluster.small import small_cluster
from tests.support.flood import flood
from tests.support.orders import check_orders_are_refused
from tests.waiting import until

pytestmark = [pytest.mark.docker, pytest.mark.cluster]

PODS = ("slurm-controller-0", "slurm-login-0", "slurm-worker-0", "slurm-worker-1")
MUNGED = "/run/munge/munge.socket.2"
BLOCKED = "held all connections to munged, and may not use it for now"
BUSY = 20
# Of the other user for one command, also on a busy machine; the flood lasts longer than all of them.
PATIENCE = "timeout 60"


@pytest.fixture(scope="module")
def older(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    root = tmp_path_factory.mktemp("munge")
    with small_cluster(DockerEngine().client, f"{NAME}-munge", root, {}, workers=2, auth="munge") as cluster:
        cluster.up(timeout=240)
        as_an_older_version_stored(cluster)
        yield World(cluster)


def as_an_older_version_stored(cluster: LocalCluster) -> None:
    """Store the options as a version did whose default was munge."""
    file = cluster.state / "options.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"auth": ""}))


@pytest.fixture
def ann(older: World) -> Researcher:
    older.wait_idle()
    return Researcher(older, "alice")


@pytest.fixture
def bob(older: World) -> Researcher:
    return Researcher(older, "bob")


def lives(world: World) -> dict[str, str]:
    return {name: pod.container for name, pod in world.cluster.kubelet.list_pods().items()}


@pytest.mark.parametrize("asked", [UpRequest(), UpRequest(reset=True), UpRequest(overrides={})])
def test_another_up_keeps_munge_replaces_no_pod_and_says_how_to_move(older: World, asked: UpRequest) -> None:
    before, options = lives(older), older.cluster.options
    found = read_options(options.name, older.cluster.state.parent)
    # The test's own images and ways to log in are no part of the question.
    settled = replace(settle(options.name, found, asked), workers=options.workers, port=options.port)
    cluster = LocalCluster(older.cluster.kubelet.client, settled, root=older.cluster.state.parent, log=print)
    plans: list[UpPlan] = []
    cluster.up(timeout=120, agree=plans.append)
    assert [plan.empty for plan in plans] == [True] and lives(older) == before
    assert any("Slurm's daemons keep munge" in line and "--auth slurm" in line for line in plans[0].lines())
    assert auth(cluster.options) == "munge"
    assert "auth/munge" in older.slurm("scontrol", "show", "config")


def works(older: World, ann: Researcher) -> None:
    for pod in PODS:
        assert older.cluster.exec(pod, ["pgrep", "munged"])[0] == 0
        assert older.cluster.exec(pod, ["test", "-e", "/etc/slurm/slurm.key"])[0] != 0
    assert ann.try_("cat", "/etc/munge/munge.key").returncode != 0
    assert sorted(ann("srun -Q -N2 hostname").split()) == ["slurm-worker-0", "slurm-worker-1"]
    job = ann.submit("-N2", "-o", "/dev/null", script="srun hostname")
    ann.wait_for(job, "COMPLETED")
    until(lambda: "COMPLETED" in ann(f"sacct -nXP -j {job} -o state"), "accounting has the job's end")


def test_users_work_by_munge(older: World, ann: Researcher) -> None:
    works(older, ann)
    older.cluster.delete("slurm-worker-0")
    older.wait_ready("slurm-worker-0")
    assert ann("srun -Q -w slurm-worker-0 hostname") == "slurm-worker-0\n"


def test_a_user_orders_no_daemon_to_end_or_change(ann: Researcher, bob: Researcher) -> None:
    check_orders_are_refused(ann, bob, "slurm-worker-0", "munge")


ASK = """/opt/minivm/bin/python3 -I - {job} {node} {address} <<'END'
import socket, sys
from health import black_box, credentials
job, node, address = sys.argv[1:]
with socket.create_connection((address, black_box.PORT), 10) as connection:
    connection.settimeout(60)
    connection.sendall(credentials.seal(black_box.question(int(job), node).encode(), 0, "munge"))
    answer = b"".join(iter(lambda: connection.recv(65536), b""))
signer, text = credentials.unseal(answer, "munge") if answer else (-1, b"no answer")
print(signer, text.decode())
END"""


def test_a_job_s_page_has_the_black_boxes_of_its_nodes_and_no_other_user_gets_them(
    older: World, ann: Researcher, bob: Researcher
) -> None:
    first, second = "slurm-worker-0", "slurm-worker-1"
    fill = "python3 -c 'x = bytearray(400 << 20); x[::4096] = b\"x\" * len(x[::4096])'"
    job = ann.submit("--mem=60M", "-w", first, "-o", "/dev/null", script=fill)

    def evidence() -> list[str]:
        facts = json.loads(ann(f"minivm job {job} --json"))["evidence"]
        return [fact["text"] for fact in facts if fact["source"] == f"black box of {first}"]

    killed = f"on {first} while it ran: the kernel ended"
    until(lambda: any(killed in text for text in evidence()), "the page says so", seen=lambda: ann(f"minivm job {job}"))
    assert killed in older.run("slurm-login-0", "minivm", "job", job), "root sees it"
    assert "while it ran" not in bob(f"minivm job {job}")
    address = older.slurm("scontrol", "show", "node", first).partition("NodeAddr=")[2].split()[0]
    ask = ASK.format(job=job, node=first, address=address)
    assert '"oom_kills"' in ann(ask)
    answer, clock = bob(ask).strip().splitlines()
    assert answer == f"0 minivm-box 1 {job} {first}" and json.loads(clock).keys() == {"kind", "at", "boot"}, (
        "not even that it exists"
    )
    assert ann(ask.replace(first, second, 1)).strip() == "-1 no answer", "a credential is good for its node only"
    older.slurm("sacctmgr", "-i", "add", "user", "bob", "account=root", "adminlevel=operator")
    try:
        assert '"oom_kills"' in bob(ask), "an operator sees all"
    finally:
        older.slurm("sacctmgr", "-i", "delete", "user", "bob")
    place = "/var/log/minivm/boxes"
    assert set(older.run(first, "sh", "-c", f"stat -c '%a %U' {place}/*").splitlines()) == {"600 root"}
    refused = bob.try_(f"srun -Q --mem=50M -w {first} ls {place}")
    assert refused.returncode and "Permission denied" in refused.stderr


def test_a_capsule_packs_one_own_job(ann: Researcher, bob: Researcher) -> None:
    node = "slurm-worker-0"
    ann("mkdir -p capsule && printf '#!/bin/sh\\nexit 3\\n' > capsule/train.sh")
    job = ann(
        f"cd capsule && sbatch --parsable --mem=100M -w {node} -o /dev/null --export=ALL,MY_TOKEN=hunter2 train.sh"
    ).strip()
    ann.wait_for(job, "FAILED")
    ann(f"cd capsule && minivm job {job} --capsule")
    path = f"capsule/minivm-job-{job}.tar.gz"
    names = ann(f"tar -tzf {path}").split()
    assert names == [f"minivm-job-{job}/page.json", f"minivm-job-{job}/boxes/{node}.jsonl"]
    page = json.loads(ann(f"tar -xzOf {path} {names[0]}"))
    assert page["script"] == "train.sh" and page["cause"] == "your code"
    assert "hunter2" not in ann(f"zcat {path}") and ann(f"stat -c %a {path}").strip() == "600"
    again = ann.try_(f"cd capsule && minivm job {job} --capsule")
    assert again.returncode == 1 and "it exists; name another file" in again.stderr
    refused = bob.try_(f"minivm job {job} --capsule /tmp/of-alice.tar.gz; ls /tmp/of-alice.tar.gz")
    assert "this is a job of alice" in refused.stderr and "No such file" in refused.stderr
    ann("rm -r capsule")


def unblock(world: World, pod: str) -> None:
    """End the block of a user, which outlives the flood by minutes; other tests use the same user."""
    world.run(pod, "minivm", "restart", "munge-guard")


def test_a_login_user_s_connections_to_munged_keep_no_other_user_waiting(ann: Researcher, bob: Researcher) -> None:
    login = "slurm-login-0"
    with flood(bob, MUNGED, 1000, BUSY, least=10, is_guarded=True):
        try:
            bob.world.wait_for_reason(login, BLOCKED)
            ann("; ".join([f"{PATIENCE} squeue >/dev/null || exit"] * 5))
            assert ann(f"{PATIENCE} srun -n1 id -un") == "alice\n"
            assert bob.try_("squeue").returncode != 0
        finally:
            unblock(bob.world, login)
    until(lambda: bob.try_("squeue").returncode == 0, "the user who was blocked is answered again")


def test_a_job_s_connections_to_munged_end_no_other_job(ann: Researcher, bob: Researcher) -> None:
    worker = "slurm-worker-1"
    job = ann.submit("-w", worker, "-o", "/dev/null", script="until test -e flooded; do sleep 1; done; srun -n1 true")
    ann.wait_for(job, "RUNNING")
    with flood(bob, MUNGED, 1000, BUSY, least=10, within=f"srun -Q -n1 -w {worker}", is_guarded=True):
        try:
            bob.world.wait_for_reason(worker, BLOCKED)
            assert ann(f"{PATIENCE} srun -Q --overlap --jobid {job} -n1 id -un") == "alice\n"
            ann("touch flooded")
            ann.wait_for(job, "COMPLETED")
            ann("rm flooded")
        finally:
            unblock(bob.world, worker)


def test_the_munge_key_is_rotated_under_a_running_job(older: World, ann: Researcher) -> None:
    cluster = older.cluster
    job = ann.submit("-N2", "-o", "/dev/null", "--mem=50", script="until test -e go; do sleep 1; done; srun -N2 true")
    ann.wait_for(job, "RUNNING")
    another = {"secrets": {"munge": {"key": base64.b64encode(os.urandom(128)).decode()}}}
    cluster.options = replace(cluster.options, overrides=merge(cluster.options.overrides, another))
    cluster.up(timeout=240)

    def waiting() -> list[str]:
        words = "the mounted munge key is not the one in use, since 20"
        return [row.pod for row in cluster.status() if words in " ".join(row.also)]

    for pod in PODS:
        older.run(pod, "minivm", "restart", "keys")
    until(lambda: sorted(waiting()) == sorted(PODS), "each pod says so, and is ready", seen=waiting)
    for pod in PODS:
        older.run(pod, "minivm", "restart", "munged")
    older.wait_ready()
    for pod in PODS:
        older.run(pod, "minivm", "restart", "keys")
    until(lambda: not waiting(), "all have taken it", seen=waiting)
    until(lambda: ann.try_("srun -Q -N2 --mem=50 true").returncode == 0, "the new key serves")
    assert ann.state(job) == "RUNNING"
    ann("touch go")
    ann.wait_for(job, "COMPLETED")
    ann("rm go")


def test_another_authentication_is_refused_under_a_job_and_taken_without_one(older: World, ann: Researcher) -> None:
    cluster = older.cluster
    job = ann.submit("-o", "/dev/null", script="sleep 600")
    waits = ann.submit("-o", "/dev/null", "--hold", script="true")
    ann.wait_for(job, "RUNNING")
    cluster.options = settle(cluster.options.name, cluster.options, UpRequest(auth="slurm"))
    with pytest.raises(ClusterError, match=f"from munge to slurm: jobs run .{job}."):
        cluster.up(timeout=240)
    assert "auth/munge" in older.slurm("scontrol", "show", "config")
    ann(f"scancel {job}")
    ann.wait_for(job, "CANCELLED")
    for to in ("slurm", "munge"):  # and back
        # Also srun's job of the first turn, which is completing for a moment.
        until(lambda: not older.slurm("squeue", "-h", "-t", "R,CG").strip(), "no job runs")
        cluster.options = settle(cluster.options.name, cluster.options, UpRequest(auth=to))
        cluster.up(timeout=240)
        older.manifests = cluster.manifests()
        assert f"auth/{to}" in older.slurm("scontrol", "show", "config")
        assert ann.state(waits) == "PENDING", "what waits stays"
        assert sorted(ann("srun -Q -N2 hostname").split()) == ["slurm-worker-0", "slurm-worker-1"]
    ann(f"scontrol release {waits}")
    ann.wait_for(waits, "COMPLETED")
