"""The fleet, switched on in a release that runs: its pods come up as the chart makes them, one acts, another follows;
and a machine that dies is given up, the controller's too."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from functools import partial

import pytest

from fleet.world.kubernetes import FENCED, RESTART
from tests.kubernetes import network
from tests.kubernetes.kubectl import condition, condition_of, going
from tests.kubernetes.lab import Lab
from tests.kubernetes.world import SMALL, Release
from tests.waiting import until

pytestmark = pytest.mark.timeout(1200)
# Kubernetes' own word comes after 20 s here.
POLICY = {"fencing": "act", "dead": "30s", "notReady": "15s", "lost": "20s"}


@pytest.fixture(scope="module")
def fleet(installed: Release) -> Iterator[Release]:
    installed.wait_ready()
    installed.upgrade(fleet={"enabled": True, "policy": POLICY, **SMALL})
    try:
        until(lambda: ready(installed) == 2, "both of its pods are ready", within=240, seen=lambda: why(installed))
        # The controller's pod is another one: it has slurmrestd. All are: the fleet writes their conditions.
        wait_replaced(installed, gated=False)
        until(lambda: holder(installed), "one of them holds the Lease", seen=lambda: why(installed))
        yield installed
    finally:
        installed.upgrade(fleet={"enabled": False})
        until(lambda: not fleets(installed), "they are gone")
        wait_replaced(installed, gated=True)


def wait_replaced(release: Release, *, gated: bool) -> None:
    """Wait until every pod is of the new template: a pod that writes its own condition has a gate for it."""

    def replaced() -> bool:
        pods = {name: pod for name, pod in release.pods().items() if not name.startswith("demo-")}
        return all(("readinessGates" in pod["spec"]) is gated and not going(pod) for pod in pods.values())

    until(replaced, "every pod is another one", within=480, seen=release.why)
    release.wait_ready()


def fleets(release: Release) -> dict[str, bool]:
    labels = f"app.kubernetes.io/instance={release.name},app.kubernetes.io/component=fleet"
    return {pod["metadata"]["name"]: condition(pod, "Ready") for pod in release.get("pods", "-l", labels)["items"]}


def ready(release: Release) -> int:
    return sum(fleets(release).values())


def holder(release: Release) -> str:
    """Return the pod that holds the lease."""
    spec = release.get("lease", f"{release.name}-fleet").get("spec", {})
    return str(spec.get("holderIdentity", "")).rpartition("-")[0]


def why(release: Release) -> str:
    logs = release.kubernetes.attempt(
        "-n", release.namespace, "logs", "-l", "app.kubernetes.io/component=fleet", "--prefix", "--tail=20"
    )
    return f"{release.kubectl('get', 'pods', '-o', 'wide')}{logs.stdout}{logs.stderr}"


def reason(release: Release, worker: str) -> str:
    return release.slurm("sinfo", "-h", "-n", f"{release.name}-{worker}", "-o", "%E").splitlines()[0]


def test_the_fleet_writes_the_conditions_and_no_pod_of_slurm_may(fleet: Release) -> None:
    """No pod has a token, and none of their accounts may write a status, the pod's own included."""
    pods = {name: pod for name, pod in fleet.pods().items() if not name.startswith("demo-")}
    for name, pod in pods.items():
        until(partial(is_shown_ready, fleet, name), f"{name} has its condition")
        assert fleet.run(name, "sh", "-c", "ls /var/run/secrets/kubernetes.io 2>&1 || true").startswith("ls: cannot")
        account = f"system:serviceaccount:{fleet.namespace}:{pod['spec']['serviceAccountName']}"
        words = ("auth", "can-i", "patch", "pods", "--subresource=status", f"--as={account}")
        assert fleet.kubernetes.attempt("-n", fleet.namespace, *words).stdout.strip() == "no"
    fleet.run("login-0", "minivm", "stop", "sshd")
    try:
        until(lambda: "sshd" in ready_of(fleet, "login-0")["message"], "its condition says why")
        assert not is_shown_ready(fleet, "login-0")
    finally:
        fleet.run("login-0", "minivm", "start", "sshd")
    until(lambda: is_shown_ready(fleet, "login-0"), "and that it is over")


def is_shown_ready(release: Release, name: str) -> bool:
    return ready_of(release, name).get("status") == "True"


def ready_of(release: Release, name: str) -> dict[str, str]:
    return condition_of(release.pods()[name], "minivm.io/Ready")


def test_a_cordon_is_a_drain_and_its_end_takes_it_back(fleet: Release) -> None:
    node = fleet.node_of("worker-0")
    fleet.kubernetes("annotate", "node", node, "minivm.io/cordon-reason=fan 3")
    fleet.kubernetes("cordon", node)
    try:
        wanted = "minivm: fleet: cordon: fan 3"
        until(lambda: reason(fleet, "worker-0") == wanted, "Slurm drains", seen=lambda: why(fleet))
        until(lambda: fleet.states()[f"{fleet.name}-worker-0"] == "drained", "and nothing is left there")
        said = fleet.kubectl("exec", f"deployment/{fleet.name}-fleet", "--", "fleet", "why", f"{fleet.name}-worker-0")
        assert wanted in said
    finally:
        fleet.kubernetes("uncordon", node)
        fleet.kubernetes("annotate", "node", node, "minivm.io/cordon-reason-")
    until(lambda: fleet.states()[f"{fleet.name}-worker-0"] == "idle", "its end undrains", seen=lambda: why(fleet))


def test_when_the_one_that_acts_is_killed_another_follows(fleet: Release) -> None:
    node, first = fleet.node_of("worker-1"), holder(fleet)
    fleet.kubernetes("cordon", node)
    try:
        until(lambda: "cordon" in reason(fleet, "worker-1"), "Slurm drains", seen=lambda: why(fleet))
        fleet.kubectl("delete", "pod", first, "--grace-period=0", "--force")
    finally:
        fleet.kubernetes("uncordon", node)
    until(
        lambda: fleet.states()[f"{fleet.name}-worker-1"] == "idle", "another one undrains",
        seen=lambda: why(fleet),
    )  # fmt: skip
    assert holder(fleet) not in ("", first)
    until(lambda: ready(fleet) == 2, "and there are two again", seen=lambda: why(fleet))


def test_a_worker_whose_record_somebody_deletes_registers_again_in_the_same_pod(fleet: Release) -> None:
    name = f"{fleet.name}-worker-0"
    before = fleet.get("pod", name)["metadata"]
    fleet.slurm("scontrol", "delete", f"nodename={name}")
    until(lambda: fleet.states().get(name) == "idle", "its slurmd restarts", within=180, seen=lambda: why(fleet))
    until(lambda: RESTART not in fleet.get("pod", name)["metadata"].get("annotations", {}), "and that is over")
    after = fleet.get("pod", name)
    assert after["metadata"]["uid"] == before["uid"]
    assert not any(one["restartCount"] for one in after["status"]["containerStatuses"])
    assert fleet.slurm_as_user("srun", "-w", name, "-D", "/tmp", "hostname").strip() == name


# A machine that dies


@contextlib.contextmanager
def dead(release: Release, lab: Lab, node: str) -> Iterator[float]:
    """Nobody is told, nothing of it answers; it comes back as it was. When it died."""
    release.shut()
    begun = time.monotonic()
    network.plug(lab.node(node), "down")
    lab.power_cut(node)
    try:
        yield begun
    finally:
        network.plug(lab.node(node), "up")
        lab.power_back(node)
    until(lambda: not given_up(release, node), f"{node} is taken back", seen=lambda: why(release))


def given_up(release: Release, node: str) -> bool:
    return FENCED in release.kubernetes.get("node", node)["metadata"]["labels"]


def running(release: Release, worker: str) -> str:
    job = release.submit("alice", "-w", f"{release.name}-{worker}", script="sleep 600")
    release.wait_for(job, "RUNNING")
    release.wait_saved(job)
    return job


def submits(release: Release) -> bool:
    words = (
        "setpriv",
        "--reuid=nobody",
        "--regid=nogroup",
        "--clear-groups",
        "sbatch",
        "--parsable",
        "-D",
        "/tmp",
        "-o",
        "/dev/null",
        "--wrap",
        "true",
    )
    done = release.kubernetes.attempt("-n", release.namespace, "exec", f"{release.name}-controller-0", "--", *words)
    return done.returncode == 0


def test_the_controllers_machine_dies_and_people_submit_again_without_anybodys_doing(fleet: Release, lab: Lab) -> None:
    node = fleet.node_of("controller-0")
    jobs = {worker: running(fleet, worker) for worker in ("worker-0", "worker-1")}
    lost = {name for name in fleet.pods() if fleet.node_of(name) == node}
    old = fleet.pods()["controller-0"]["metadata"]["uid"]
    with dead(fleet, lab, node) as begun:
        until(lambda: fleet.is_new("controller-0", old), "its pod is given up", within=400, seen=lambda: why(fleet))
        print(f"controller's machine killed to its pod given up: {time.monotonic() - begun:.1f} s")
        until(lambda: submits(fleet), "jobs are taken again", within=240, seen=fleet.why)
        print(f"controller's machine killed to submitting again: {time.monotonic() - begun:.1f} s")
        fleet.wait_ready(within=400)
        print(f"controller's machine killed to all ready elsewhere: {time.monotonic() - begun:.1f} s")
        assert given_up(fleet, node)
        assert node not in {fleet.node_of(name) for name in fleet.pods()}
        for worker, job in jobs.items():
            if worker in lost:
                fleet.wait_requeued(job)
            else:
                assert (fleet.state(job), fleet.restarts(job)) == ("RUNNING", 0)
                fleet.slurm("scancel", job)


def test_a_workers_machine_dies_and_its_job_is_requeued_and_its_pod_is_elsewhere(fleet: Release, lab: Lab) -> None:
    victim = fleet.away()
    node, old = fleet.node_of(victim), fleet.pods()[victim]["metadata"]["uid"]
    job = running(fleet, victim)
    with dead(fleet, lab, node) as begun:
        until(lambda: fleet.restarts(job) == 1, "its job is requeued", within=400, seen=lambda: why(fleet))
        print(f"worker's machine killed to its job requeued: {time.monotonic() - begun:.1f} s")
        until(lambda: fleet.is_new(victim, old), "its pod is given up", seen=lambda: why(fleet))
        fleet.wait_ready(within=400)
        print(f"worker's machine killed to its pod ready elsewhere: {time.monotonic() - begun:.1f} s")
        assert fleet.node_of(victim) != node
        fleet.slurm("scancel", job)
