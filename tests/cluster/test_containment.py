"""Jobs are held to what they asked for, ssh to a worker becomes part of the job, and no person takes the login pod."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from cluster.values import Options, merge
from tests.cluster.researcher import Researcher, World
from tests.waiting import PATIENCE, until

pytestmark = [pytest.mark.docker, pytest.mark.cluster]

LOGIN, WORKER, OTHER = "slurm-login-0", "slurm-worker-0", "slurm-worker-1"
PROCESSES = 800
Change = Callable[[dict[str, Any]], None]
# Forks until it may not, then stays, as a person's runaway script does.
FORK = """
import os, signal
count = 0
try:
    while os.fork():
        count += 1
    signal.pause()
except OSError as error:
    print("refused after", count, error, flush=True)
    signal.pause()
"""


@pytest.fixture
def contained(healthy: World) -> World:
    """Expect failure with the reason on a machine that cannot contain jobs."""
    refused = healthy.cluster.cgroups_refusal()
    if refused:
        assert refused in "".join(healthy.cluster.not_granted())
        pytest.xfail(refused)
    return healthy


@pytest.fixture(scope="module")
def values(world: World) -> Iterator[Change]:
    """Yield a function that changes the cluster's values, and restore them all."""
    before = world.cluster.options

    def become(options: Options) -> None:
        world.cluster.options = options
        world.cluster.up(timeout=240)
        world.manifests = world.cluster.manifests()

    yield lambda overrides: become(replace(before, overrides=merge(before.overrides, overrides)))
    become(before)


def to_the_worker(alice: Researcher, command: str) -> list[str]:
    """Build the ssh command from the login pod to the worker, with a key that only the agent has."""
    hop = f"ssh -o BatchMode=yes -o StrictHostKeyChecking=no {WORKER}.slurm-worker '{command}'"
    key = str(alice.world.cluster.keys().users[alice.user])
    return ["ssh-agent", "sh", "-c", 'ssh-add -q "$0" && exec "$@"', key, *alice.command(hop, options=("-A",))]


def go(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)


def test_system_calls_are_kept_from_every_pod_and_job(healthy: World, alice: Researcher) -> None:
    """Read the kernel's own record: 2 means a filter. Most exploits begin with creating a user namespace."""
    for pod in sorted(healthy.cluster.kubelet.list_pods()):
        assert "Seccomp:\t2" in healthy.run(pod, "cat", "/proc/1/status"), pod
    assert "Seccomp:\t2" in alice("srun cat /proc/self/status")
    assert "Operation not permitted" in alice("srun unshare --user true 2>&1 || true")


def test_a_job_has_the_cores_and_the_memory_it_asked_for(contained: World, alice: Researcher) -> None:
    # The cgroup holds also who asks for more: an affinity can be changed, this cannot.
    assert alice("srun -c1 --mem=100M bash -c 'taskset -pc 0-63 $$ > /dev/null; nproc'") == "1\n"
    take = "python3 -c 'bytearray(400 << 20)'"
    job = alice.submit("--mem=200M", "-o", "too-much.out", script=take)
    alice.wait_for(job, "OUT_OF_MEMORY")
    # The limit and the option are named, also where a step ends, and a shell of salloc's.
    for said in (
        alice("cat too-much.out"),
        alice.try_(f"srun --mem=200M {take} 2>&1").stdout,
        alice.try_("salloc -Q --mem=200M", options=("-tt",), stdin=f"{take}\nexit\n").stdout,
    ):
        assert "limit of 200 MiB" in said and "--mem" in said
    job = alice.submit("--mem=800M", "-o", "/dev/null", script="python3 -c 'bytearray(400 << 20)'")
    alice.wait_for(job, "COMPLETED")


def end_of(world: World, job: str) -> str:
    """State and comment in accounting, where they stay; "" while it has none."""
    line = world.slurm("sacct", "-n", "-P", "-X", "-j", job, "-o", "state,admincomment").strip()
    return line if line.startswith(("CANCELLED", "OUT_OF_MEMORY")) else ""


def test_a_job_that_fills_dev_shm_over_its_memory_ends_with_the_reason(contained: World, alice: Researcher) -> None:
    """The kernel kills the job's slurmstepds too, which report nothing: without the broker the job stays RUNNING."""
    fill = "while :; do dd if=/dev/zero of=/dev/shm/full-$RANDOM bs=1M count=150; done"
    job = alice.submit("-w", WORKER, "--mem=200M", "-o", "/dev/null", script=fill)
    step = alice.command(f"srun -w {OTHER} --mem=200M bash -c '{fill}' 2>&1")
    with subprocess.Popen(step, stdout=subprocess.PIPE) as srun:
        try:
            ended = until(
                lambda: end_of(contained, job),
                "it ends",
                within=300,  # both jobs fill memory on one machine at the same time
                seen=lambda: contained.slurm("scontrol", "show", "job", job),
            )
            assert "limit of 200 MiB" in ended and "--mem" in ended
            until(lambda: srun.poll() is not None, "srun ends too", seen=lambda: contained.slurm("squeue"))
            assert srun.stdout and b"limit of 200 MiB" in srun.stdout.read()
        finally:
            srun.kill()

    def processes() -> str:
        return "\n".join(contained.run(worker, "ps", "-eo", "args") for worker in (WORKER, OTHER))

    until(lambda: "sleep 100000000" not in processes(), "nothing is left", seen=processes)


def test_what_a_job_leaves_behind_ends_with_it(contained: World, alice: Researcher) -> None:
    """A daemon that left its parents: only the job's cgroup still knows whose it is."""
    script = (
        "setsid setsid sleep 986543 < /dev/null > /dev/null 2>&1 &\nuntil [ -e go-$SLURM_JOB_ID ]; do sleep 0.2; done"
    )
    job = alice.submit("-w", WORKER, "-o", "/dev/null", script=script)

    def stray() -> str:
        return contained.cluster.exec(WORKER, ["pgrep", "-f", "sleep 986543"])[1]

    until(lambda: stray() != "", "the job has started its daemon")
    alice(f"touch go-{job}")
    alice.wait_for(job, "COMPLETED")
    until(lambda: stray() == "", "the daemon has ended too", seen=stray)


def test_ssh_to_a_worker_is_part_of_the_job_there_and_ends_with_it(contained: World, alice: Researcher) -> None:
    refused = go(to_the_worker(alice, "hostname"))
    assert refused.returncode == 255, refused.stdout
    assert "you have no active jobs on this node" in refused.stderr
    job = alice.submit("-w", WORKER, "-c1", "-o", "/dev/null", script="sleep 600")
    alice.wait_for(job, "RUNNING")
    entered = go(to_the_worker(alice, "nproc; cat /proc/self/cgroup"))
    assert f"/job_{job}/step_extern" in entered.stdout, entered.stderr
    assert entered.stdout.startswith("1\n")
    # slurmd alone is started again: the job runs on, and a session still finds it.
    contained.run(WORKER, "minivm", "restart", "slurmd")
    assert alice.state(job) == "RUNNING"
    with subprocess.Popen(
        to_the_worker(alice, "echo in; exec sleep 600"), stdout=subprocess.PIPE, text=True
    ) as session:
        try:
            assert session.stdout and session.stdout.readline() == "in\n"
            alice(f"scancel {job}")
            until(lambda: session.poll() is not None, "the session ends with the job")
        finally:
            session.kill()
    alice.wait_for(job, "CANCELLED")


def test_a_user_of_the_image_needs_a_job_too(contained: World) -> None:
    """A site may have people in /etc/passwd and no directory: PAM has other ways for those."""
    script = """
    echo 'carol:x:20009:100::/tmp/carol:/bin/bash' >> /etc/passwd
    echo 'carol:*:19000:0:99999:7:::' >> /etc/shadow
    mkdir -p /tmp/carol/.ssh
    ssh-keygen -q -t ed25519 -N '' -f /tmp/carol/key
    cp /tmp/carol/key.pub /tmp/carol/.ssh/authorized_keys
    chown -R 20009 /tmp/carol
    """
    contained.run(WORKER, "sh", "-ec", script)
    enter = ["ssh", "-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=no", "-i", "/tmp/carol/key", "carol@localhost"]
    code, said = contained.cluster.exec(WORKER, [*enter, "hostname"])
    assert code == 255 and "you have no active jobs on this node" in said, said


def test_nobody_takes_the_login_pod_from_the_others(contained: World, alice: Researcher, values: Change) -> None:
    values({"login": {"perUser": {"memory": "512Mi", "processes": PROCESSES}}})
    bob = Researcher(contained, "bob")
    alice("cat > fork.py", stdin=FORK)
    alice("nohup setsid python3 fork.py > forked 2>&1 < /dev/null &")

    def forked() -> str:
        return contained.run(LOGIN, "cat", "/home/alice/forked")

    until(lambda: "refused after" in forked(), "alice's forks are refused", seen=forked)
    # Bob notices nothing. Alice is let in to end what she started, and is told how.
    assert bob("for i in $(seq 50); do echo $i & done | sort -n | tail -1") == "50\n"
    rescued = alice.try_(options=("-tt",), stdin="kill -9 -1\n").stdout
    assert f"of {PROCESSES} at most" in rescued
    until(lambda: alice("pgrep -fc [f]ork.py || true").strip() == "0", "her processes have ended")
    # The kernel ends what takes too much, and the next prompt says whose limit it was.
    greedy = alice.try_(options=("-tt",), stdin="python3 -c 'bytearray(900 << 20)'\nexit 0\n").stdout
    assert "minivm: your share here is 0.5 GiB of memory: a process of yours was ended." in greedy
    assert alice("python3 -c 'bytearray(200 << 20)'; echo well") == "well\n"


def test_where_a_pod_may_not_write_cgroups_ulimits_are_the_floor(
    contained: World, alice: Researcher, values: Change
) -> None:
    values({"login": {"perUser": {"memory": "1Gi", "processes": 700}, "runtimeClassName": ""}})
    assert "by ulimits, which know no sum" in contained.cluster.exec(LOGIN, ["minivm", "why", "user-limits"])[1]
    assert alice("ulimit -u; ulimit -d; ulimit -Hd").split() == ["700", str(1 << 20), str(1 << 20)]
    # They stay on the login pod: a job has what its node gives it.
    assert alice("srun bash -c 'ulimit -u; ulimit -d'").split() != ["700", str(1 << 20)]
    assert "MemoryError" in alice.try_("python3 -c 'bytearray(2 << 30)'").stderr
