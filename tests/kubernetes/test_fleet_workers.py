"""A pool of workers that the fleet owns, on real kubelets: taken over from a StatefulSet, grown, rolled."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from tests.kubernetes.kubectl import Object
from tests.kubernetes.world import SMALL, Release, create_kinds
from tests.waiting import until

pytestmark = pytest.mark.timeout(1200)
FLEET: Object = {"enabled": True, "workerPools": {"enabled": True}, **SMALL}


@pytest.fixture(scope="module")
def running(installed: Release) -> Iterator[Release]:
    """The fleet runs, its kinds are there, and the pool is a StatefulSet still."""
    installed.wait_ready()
    create_kinds(installed.kubernetes)
    installed.upgrade(fleet=FLEET)
    try:
        installed.kubectl("rollout", "status", f"deployment/{installed.name}-fleet", "--timeout=240s")
        # The controller's pod is another one: it has slurmrestd.
        installed.wait_ready()
        yield installed
    finally:
        installed.kubectl("delete", "workerpool", f"{installed.name}-worker", "--cascade=orphan", "--ignore-not-found")
        installed.upgrade(
            workers={"pools": {"worker": {"kind": "StatefulSet", "replicas": 2, "podAnnotations": {}}}},
            fleet={"enabled": False, "workerPools": {"enabled": False}},
        )
        until(lambda: installed.all_ready(), "its pods are the StatefulSet's", within=400, seen=installed.why)


@pytest.fixture
def owned(running: Release) -> Release:
    if owner(running, "worker-0") != "WorkerPool":
        take_over(running)
    return running


def take_over(release: Release) -> None:
    """As docs/how-to/roll-a-pool-by-the-fleet.md says."""
    release.kubectl("delete", "statefulset", f"{release.name}-worker", "--cascade=orphan")
    until(lambda: not owner(release, "worker-0"), "nobody owns its pods", seen=release.why)
    begun = time.monotonic()
    pool(release)
    helm = time.monotonic() - begun
    until(
        lambda: {owner(release, name) for name in ("worker-0", "worker-1")} == {"WorkerPool"},
        "the fleet owns them", seen=lambda: why(release),
    )  # fmt: skip
    print(f"upgrade begun to the pods taken over: {time.monotonic() - begun:.1f} s, of which Helm {helm:.1f} s")


def pool(release: Release, **over: object) -> None:
    release.upgrade(workers={"pools": {"worker": {"kind": "WorkerPool", **over}}})


def workers(release: Release) -> dict[str, str]:
    """Those that are ready -> who they are."""
    pods, ready = release.pods(), release.ready()
    return {
        name: pods[name]["metadata"]["uid"]
        for name, is_ready in ready.items()
        if is_ready and name.startswith("worker-")
    }


def why(release: Release) -> str:
    said = release.kubernetes.attempt(
        "-n", release.namespace, "logs", "-l", "app.kubernetes.io/component=fleet", "--prefix", "--tail=20"
    )
    pools = release.kubernetes.attempt("-n", release.namespace, "get", "workerpools", "-o", "yaml")
    return f"{release.why()}{said.stdout}{said.stderr}{pools.stdout}"


def owner(release: Release, pod: str) -> str:
    owners = release.pods()[pod]["metadata"].get("ownerReferences", [])
    return next((item["kind"] for item in owners if item.get("controller")), "")


def long_job(release: Release, worker: str) -> str:
    job = release.submit("alice", "-w", f"{release.name}-{worker}", script="sleep 3600")
    release.wait_for(job, "RUNNING")
    return job


def test_a_pool_that_runs_is_taken_over_without_a_pod_restarted(running: Release) -> None:
    job, before = long_job(running, "worker-0"), running.containers()
    take_over(running)
    assert running.containers() == before
    assert (running.state(job), running.restarts(job)) == ("RUNNING", 0)
    running.slurm("scancel", job)


def test_a_pool_grows_by_a_pod_that_the_fleet_makes_and_jobs_run_over_all(owned: Release) -> None:
    begun, old = time.monotonic(), workers(owned)
    pool(owned, replicas=3)
    until(lambda: len(workers(owned)) == 3, "three are ready", within=240, seen=lambda: why(owned))
    print(f"upgrade begun to the third worker ready: {time.monotonic() - begun:.1f} s")
    assert workers(owned).items() > old.items() and owner(owned, "worker-2") == "WorkerPool"
    owned.wait_idle()
    assert len(set(owned.as_user("alice", "srun -N3 hostname").split())) == 3
    pool(owned, replicas=2)
    until(lambda: "worker-2" not in owned.pods(), "the third goes", within=240, seen=lambda: why(owned))
    assert workers(owned) == old


def test_a_roll_leaves_a_busy_pod_until_its_job_ends(owned: Release) -> None:
    """One worker at a time may be away: of two workers one is always there."""
    owned.wait_idle()
    job, old = long_job(owned, "worker-0"), workers(owned)
    begun = time.monotonic()
    pool(owned, podAnnotations={"example.org/rolled": "yes"})

    def new(name: str) -> bool:
        found = workers(owned)
        assert found, why(owned)
        return found.get(name, old[name]) != old[name]

    until(lambda: new("worker-1"), "the idle one is another", within=240, seen=lambda: why(owned))
    print(f"upgrade begun to the idle worker new and ready: {time.monotonic() - begun:.1f} s")
    assert workers(owned)["worker-0"] == old["worker-0"]
    assert (owned.state(job), owned.restarts(job)) == ("RUNNING", 0)
    owned.slurm("scancel", job)
    begun = time.monotonic()
    until(lambda: new("worker-0"), "the busy one after its job", within=240, seen=lambda: why(owned))
    print(f"job's end to its worker new and ready: {time.monotonic() - begun:.1f} s")
    assert all(owned.pods()[name]["metadata"]["annotations"]["example.org/rolled"] == "yes" for name in old)
    owned.wait_idle()
