"""Jobs in cgroups, with what comes to them by ssh, and people on a login pod: by a RuntimeClass, without privileges."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kubernetes.configs import CGROUP_WRITABLE
from tests.kubernetes.world import Release
from tests.waiting import until

pytestmark = pytest.mark.timeout(900)


def becomes(release: Release, proctrack: str, runtime: str) -> None:
    """Workers and login pods are replaced for it."""
    own = {"runtimeClassName": runtime}
    release.shut()
    release.upgrade(slurm={"proctrack": proctrack}, login=own, workers={"defaults": own})
    pods = ("login-0", "worker-0", "worker-1")

    def have() -> dict[str, str]:
        found = release.pods()
        return {name: found[name]["spec"].get("runtimeClassName", "") if name in found else "none" for name in pods}

    until(lambda: set(have().values()) == {runtime}, f"all have {runtime or 'no class'}", within=300, seen=release.why)
    release.wait_ready()
    release.wait_idle()


@pytest.fixture(scope="module")
def contained(installed: Release) -> Iterator[Release]:
    if not installed.kubernetes.lab:
        pytest.skip("whether this Kubernetes has such a RuntimeClass is not known")
    installed.wait_ready()
    becomes(installed, "cgroup", CGROUP_WRITABLE)
    yield installed
    becomes(installed, "linuxproc", "")


def test_a_pod_may_write_to_its_own_cgroups_and_sees_none_above(contained: Release) -> None:
    for pod in ("login-0", "worker-0"):
        assert not contained.pods()[pod]["spec"]["containers"][0]["securityContext"].get("privileged"), pod
        # Where this one is, whoever writes to it may run a program on the machine.
        assert contained.run(pod, "find", "/sys/fs/cgroup", "-name", "release_agent") == "", pod
        contained.run(pod, "test", "-w", "/sys/fs/cgroup/memory")
    assert "by cgroups (" in contained.run("login-0", "minivm", "why", "user-limits")


def test_a_job_has_the_cores_and_the_memory_it_asked_for(contained: Release) -> None:
    # The cgroup holds also who asks for more: an affinity can be changed, this cannot.
    ask = "srun -c1 --mem=100M bash -c 'taskset -pc 0-63 $$ > /dev/null; nproc'"
    assert contained.as_user("alice", ask) == "1"
    eats = "python3 -c 'bytearray(400 << 20)'"
    job = contained.submit("alice", "--mem=200M", "-o", "/dev/null", script=eats)
    contained.wait_for(job, "OUT_OF_MEMORY")
    job = contained.submit("alice", "--mem=800M", "-o", "/dev/null", script=eats)
    contained.wait_for(job, "COMPLETED")


def test_what_a_job_leaves_behind_ends_with_it(contained: Release) -> None:
    """A daemon that left its parents: only the job's cgroup still knows whose it is."""
    script = (
        "setsid setsid sleep 986543 < /dev/null > /dev/null 2>&1 &\nuntil [ -e go-$SLURM_JOB_ID ]; do sleep 0.2; done"
    )
    job = contained.submit("alice", "-w", f"{contained.name}-worker-0", "-o", "/dev/null", script=script)

    def stray() -> str:
        return contained.run("worker-0", "sh", "-c", "pgrep -f '^sleep 986543' || true").strip()

    until(stray, "the job has started its daemon")
    contained.as_user("alice", f"touch go-{job}")
    contained.wait_for(job, "COMPLETED")
    until(lambda: not stray(), "the daemon has ended too", seen=stray)


def test_ssh_to_a_worker_is_part_of_the_job_there(contained: Release) -> None:
    """With a key of one's own home, which is everywhere."""
    worker = f"{contained.name}-worker-0"
    hop = f"ssh -o BatchMode=yes {worker} 'nproc; cat /proc/self/cgroup' 2>&1 || true"
    make = "[ -e ~/.ssh/id_ed25519 ] || ssh-keygen -q -t ed25519 -N '' -f ~/.ssh/id_ed25519"
    contained.as_user("alice", f"{make}; cp ~/.ssh/id_ed25519.pub ~/.ssh/authorized_keys")
    assert "you have no active jobs on this node" in contained.as_user("alice", hop)
    job = contained.submit("alice", "-w", worker, "-c1", "-o", "/dev/null", script="sleep 600")
    contained.wait_for(job, "RUNNING")
    said = contained.as_user("alice", hop)
    assert f"/job_{job}/step_extern" in said and said.startswith("1\n"), said
    contained.slurm("scancel", job)
