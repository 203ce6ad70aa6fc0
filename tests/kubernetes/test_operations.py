"""Operations on the release, and their effect on the jobs."""

from __future__ import annotations

import json

import pytest

from tests.callers import calling
from tests.kubernetes.world import Release, first
from tests.waiting import until

pytestmark = pytest.mark.timeout(900)


def test_a_deleted_worker_gives_its_job_back(release: Release) -> None:
    """Jobs that can end in time end; the others are requeued."""
    short = release.submit("alice", "-w", f"{release.name}-worker-0", script="sleep 5")
    long = release.submit("alice", "-w", f"{release.name}-worker-0", script="sleep 600")
    release.wait_for(long, "RUNNING")
    release.wait_for(short, "RUNNING", "COMPLETED")
    old = release.pods()["worker-0"]["metadata"]["uid"]
    release.kubectl("delete", "pod", f"{release.name}-worker-0", "--wait=false")
    until(lambda: release.is_new("worker-0", old), "another pod of the name is there", seen=release.why)
    print(f"a new pod is there to ready: {release.wait_ready():.1f} s")
    release.wait_for(short, "COMPLETED")
    release.wait_requeued(long)
    assert release.restarts(short) == 0


def test_a_deleted_controller_costs_no_job(release: Release) -> None:
    runs = release.submit("alice", script="sleep 20")
    waits = release.submit("alice", f"-d afterok:{runs}", script="true")
    release.wait_for(runs, "RUNNING")
    release.kubectl("delete", "pod", f"{release.name}-controller-0")
    print(f"controller deleted to all ready: {release.wait_ready():.1f} s")
    release.wait_for(runs, "COMPLETED")
    release.wait_for(waits, "COMPLETED")
    assert (release.restarts(runs), release.restarts(waits)) == (0, 0)


def test_commands_outlive_the_replacement_of_the_controllers_pod(release: Release) -> None:
    """A command resolves the controller's name once: the address behind it must outlive the pod."""
    name = f"{release.name}-controller-0"
    old = release.pods()["controller-0"]["metadata"]["uid"]
    into_login = (*release.kubernetes.client, "-n", release.namespace, "exec", "-i", f"{release.name}-login-0", "--")

    def ended() -> bool:
        pod = release.pods().get("controller-0")
        return pod is None or pod["metadata"]["uid"] != old or "terminated" in first(pod).get("state", {})

    with calling(into_login, "alice") as calls:
        until(lambda: release.slurm("squeue", "-h", "-u", "alice"), "commands are run")
        release.kubectl("delete", "pod", name, "--wait=false")
        until(ended, "the old pod's container has ended", seen=release.why)
        # Later kubelets report that at once. This one may keep the pod for another minute, and its address.
        if not release.is_new("controller-0", old):
            release.kubectl("delete", "pod", name, "--force", "--grace-period=0", "--ignore-not-found")
        release.wait_ready()
    release.slurm("scancel", "-u", "alice")
    print(f"one replacement of the controller's pod: {calls}")
    assert calls.failed == []


def test_an_eviction_is_granted_one_at_a_time(release: Release) -> None:
    def evict(pod: str) -> str:
        name = f"{release.name}-{pod}"
        body = {"kind": "Eviction", "metadata": {"name": name, "namespace": release.namespace}}
        body["apiVersion"] = release.get("poddisruptionbudgets", f"{release.name}-worker")["apiVersion"]
        path = f"/api/v1/namespaces/{release.namespace}/pods/{name}/eviction"
        done = release.kubernetes.attempt("create", "--raw", path, "-f", "-", stdin=json.dumps(body))
        return done.stderr

    old = release.pods()["worker-0"]["metadata"]["uid"]
    assert evict("worker-0") == ""
    assert "disruption budget" in evict("worker-1")
    until(lambda: release.is_new("worker-0", old), "the evicted pod is replaced", seen=release.why)
    release.wait_ready()


def test_workers_roll_one_by_one_under_an_array_that_loses_nothing(release: Release) -> None:
    before = {name: pod["metadata"]["uid"] for name, pod in release.pods().items()}
    array = release.submit("alice", "--array=0-11", script="sleep 4")
    release.wait_for(f"{array}_0", "RUNNING", "COMPLETED")  # it may have ended between two looks
    release.upgrade(workers={"defaults": {"env": {"MINIVM_USER_ROLLED": "yes"}}})

    def rolled() -> bool:
        ready = release.ready()
        assert sum(ready.get(f"worker-{number}", False) for number in (0, 1)) >= 1, "never two at once"
        return all(release.is_new(f"worker-{number}", before[f"worker-{number}"]) for number in (0, 1))

    until(rolled, "both workers are replaced", within=240, seen=release.why)
    release.wait_ready()
    after = {name: pod["metadata"]["uid"] for name, pod in release.pods().items()}
    assert {name for name in before if before[name] != after[name]} == {"worker-0", "worker-1"}
    done = ["sacct", "-n", "-X", "-j", array, "-o", "state%20,restarts"]
    lines = until(
        lambda: found if len(found := release.slurm(*done).splitlines()) == 12 and "ING" not in str(found) else [],
        "the array is done",
        seen=lambda: release.slurm(*done),
    )
    assert {tuple(line.split()) for line in lines} == {("COMPLETED", "0")}


def test_a_worker_more_takes_jobs_and_one_less_is_forgotten(release: Release) -> None:
    """By the values, as docs/how-to/drain.md says."""
    release.upgrade(workers={"pools": {"worker": {"replicas": 3}}})
    print(f"one worker more, ready: {release.wait_ready():.1f} s")
    until(lambda: release.states().get(f"{release.name}-worker-2") == "idle", "the third is idle", seen=release.states)
    third = f"{release.name}-worker-2"
    job = release.submit("alice", "-w", third, script="sleep 600")
    release.wait_for(job, "RUNNING")
    release.upgrade(workers={"pools": {"worker": {"replicas": 2}}})
    release.wait_ready()
    release.wait_requeued(job)
    # Its record goes once the controller has heard of the number.
    until(lambda: third not in release.states(), "the third is forgotten", within=180, seen=release.states)


def test_a_login_pod_that_drains_is_out_of_its_service_and_those_who_are_there_stay(release: Release) -> None:
    def addresses() -> list[str]:
        subsets = release.get("endpoints", f"{release.name}-ssh").get("subsets") or []
        return [item["ip"] for subset in subsets for item in subset.get("addresses") or ()]

    assert addresses() == [release.pods()["login-0"]["status"]["podIP"]]
    release.as_user("alice", "true")
    assert release.door
    there = release.door.begin("alice", "echo in; read word; echo $word", key=release.key("alice"))
    assert there.stdout and there.stdout.readline() == "in\n"
    draining = release.begin("login-0", "minivm", "drain")
    try:
        until(lambda: not addresses(), "nobody new comes", seen=release.why)
        said, _ = there.communicate("still", timeout=120)
        assert said.split() == ["still"]
        draining.communicate(timeout=120)
    finally:
        release.run("login-0", "minivm", "resume")
    until(addresses, "the resumed pod is back in its Service", seen=release.why)
