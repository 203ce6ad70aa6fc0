"""The faults of a kubelet's life, and of the API server's: what the pods notice, and what Slurm does."""

from __future__ import annotations

import signal
import time

import pytest

from tests.kubernetes import machine as power
from tests.kubernetes.images import reference
from tests.kubernetes.lab import Lab
from tests.kubernetes.ssh import Door
from tests.kubernetes.strangers import stranger, wait_running
from tests.kubernetes.world import IMAGES, Release
from tests.waiting import until

pytestmark = pytest.mark.timeout(900)


@pytest.mark.parametrize("daemon", ["kubelet", "containerd"])
def test_a_machines_daemon_that_is_killed_and_comes_back_costs_nobody_anything(
    release: Release, lab: Lab, daemon: str
) -> None:
    job = release.submit("alice", "-w", f"{release.name}-worker-0", script="sleep 15")
    release.wait_for(job, "RUNNING")
    before = release.containers()
    node = lab.node(release.node_of("worker-0"))
    power.kill(node, daemon)
    if daemon == "kubelet":
        lab.start_kubelet(node)
    else:
        lab.start_containerd(node)
    release.wait_for(job, "COMPLETED")
    release.wait_ready()
    assert release.containers() == before and release.restarts(job) == 0


@pytest.mark.parametrize("pod", ["worker-0", "controller-0", "login-0"])
def test_a_container_that_is_killed_comes_back_in_the_same_pod(release: Release, lab: Lab, pod: str) -> None:
    """PID 1 and all that it had end at once: the job on a worker is requeued, that of a controller or login runs on.
    Memory that jobs share is the pod's and outlives the container, but not what becomes of the job."""

    def shared() -> str:
        return release.run("worker-0", "sh", "-c", "ls -A /dev/shm; tail -n +2 /proc/sysvipc/shm")

    script = "ipcmk -M 1000000; head -c 1000000 /dev/zero > /dev/shm/whole; mv /dev/shm/whole /dev/shm/left; sleep 600"
    job = release.submit("alice", "-w", f"{release.name}-worker-0", script=script)
    release.wait_for(job, "RUNNING")
    release.wait_saved(job)
    until(lambda: "left" in shared(), "the job shares memory", seen=shared)
    assert "1000000" in shared()
    before, old = release.containers(), release.pods()[pod]
    release.shut()
    container = before[pod][0].removeprefix("containerd://")
    lab.ctr(release.node_of(pod), "task", "kill", "--signal", "SIGKILL", container)
    until(lambda: release.containers()[pod][1] == before[pod][1] + 1, "it is started again", seen=release.why)
    release.wait_ready()
    new, after = release.pods()[pod], release.containers()
    assert (new["metadata"]["uid"], new["status"]["podIP"]) == (old["metadata"]["uid"], old["status"]["podIP"])
    assert {name for name in before if before[name] != after[name]} == {pod}
    assert release.run(pod, "hostname").strip() == f"{release.name}-{pod}"
    if pod == "worker-0":
        until(lambda: shared() == "", "the requeued job's epilog has been there", seen=shared)
        release.wait_requeued(job)
    else:
        assert "left" in shared()
        assert (release.state(job), release.restarts(job)) == ("RUNNING", 0)
        release.slurm("scancel", job)


def test_a_pid_1_that_hangs_is_started_again_by_the_kubelet(release: Release, lab: Lab) -> None:
    """It answers no probe and hears no word: at once it is out of its Service, after three times 20 s it is to end, and
    after the pod's time for that it is killed."""
    job = release.submit("alice", script="sleep 600")
    release.wait_for(job, "RUNNING")
    before = release.containers()
    release.shut()
    container = before["login-0"][0].removeprefix("containerd://")
    begun = time.monotonic()
    lab.ctr(release.node_of("login-0"), "task", "kill", "--signal", "SIGSTOP", container)
    until(lambda: not release.ready()["login-0"], "it is not ready", seen=release.why)
    print(f"PID 1 hangs to not ready: {time.monotonic() - begun:.1f} s")
    until(lambda: release.containers()["login-0"][1] == 1 + before["login-0"][1], "it is started again", within=400)
    print(f"PID 1 hangs to started again: {time.monotonic() - begun:.1f} s")
    release.wait_ready()
    (status,) = release.pods()["login-0"]["status"]["containerStatuses"]
    assert status["lastState"]["terminated"]["exitCode"] == 128 + signal.SIGKILL
    after = release.containers()
    assert {name for name in before if before[name] != after[name]} == {"login-0"}
    assert (release.state(job), release.restarts(job)) == ("RUNNING", 0)
    release.slurm("scancel", job)


@pytest.mark.parametrize(
    ("signal", "told"),
    [("memory.available", "low on resource: memory"), ("nodefs.available", "had condition: [DiskPressure]")],
)
def test_a_worker_that_a_machine_without_memory_or_disk_throws_out_gives_its_job_back(
    release: Release, lab: Lab, signal: str, told: str
) -> None:
    """The pods get no word and no time. They are ready again, elsewhere or there, when the need is over."""
    worker = release.away()
    job = release.submit("alice", "-w", f"{release.name}-{worker}", script="sleep 600")
    release.wait_for(job, "RUNNING")
    old = release.pods()[worker]["metadata"]["uid"]
    node = release.node_of(worker)
    release.shut()
    # So much is free nowhere. A kubelet that starts on a full disk takes back none of the pods that it had, and takes
    # the images away that nobody uses: the pods' come from the registry again.
    lab.restart_kubelet(node, evictionHard={signal: "99%"}, evictionPressureTransitionPeriod="2s")
    try:
        until(lambda: release.is_new(worker, old), "the worker is evicted", within=180, seen=release.why)
    finally:
        lab.restart_kubelet(node)
    events = release.kubectl("get", "events", "--field-selector", f"reason=Evicted,involvedObject.uid={old}")
    assert told in events
    release.wait_ready()
    release.wait_requeued(job)


def test_images_that_nobody_uses_are_taken_away_and_come_again(release: Release, lab: Lab) -> None:
    """The kubelet's own round, which it makes every five minutes; whoever runs notices nothing."""
    node = release.node_of(release.away())
    before = release.containers()

    def there() -> set[str]:
        return {name for name in lab.ctr(node, "images", "ls", "-q", f"name~={IMAGES}/").split() if "@" not in name}

    pods = release.get("pods", "--field-selector", f"spec.nodeName={node}")["items"]
    used = {reference(item["image"]) for pod in pods for item in pod["spec"]["containers"]}
    assert used and used < there()
    unused = min(there() - used)
    lab.restart_kubelet(node, imageGCHighThresholdPercent=1, imageGCLowThresholdPercent=0, imageMinimumGCAge="1s")
    try:
        until(lambda: there() == used, "what nobody uses is gone", within=400, seen=there)
    finally:
        lab.restart_kubelet(node)
    release.wait_ready()
    assert release.containers() == before
    container = {"name": "main", "image": unused, "imagePullPolicy": "IfNotPresent", "command": ["sleep", "infinity"]}
    with stranger(release, "returned", nodeName=node, containers=[container]):
        wait_running(release, "returned")
    assert there() == used | {unused}


def test_an_api_server_that_is_away_for_minutes_keeps_nobody_from_work(release: Release, lab: Lab) -> None:
    """Jobs are submitted, run and end; a container that is killed meanwhile is back without it."""
    login = Door(release, release.pods()["login-0"]["status"]["podIP"], 22)
    before, node = release.containers(), release.node_of("worker-1")
    container = before["worker-1"][0].removeprefix("containerd://")
    first = time.monotonic()
    power.kill(lab.control_plane, "kube-apiserver")
    try:

        def asked(command: str, stdin: str = "") -> str:
            done = login.try_("alice", command, key=release.key("alice"), stdin=stdin)
            assert done.returncode == 0, done
            return done.stdout.strip()

        worker = f"{release.name}-worker-1"
        hurt = asked(f"sbatch --parsable -w {worker}", "#!/bin/bash\nsleep 600\n")
        until(lambda: asked(f"squeue -h -o %T -j {hurt}") == "RUNNING", "it runs")
        lab.ctr(node, "task", "kill", "--signal", "SIGKILL", container)
        until(lambda: asked(f"squeue -h -o %T -j {hurt}") == "PENDING", "it is requeued")
        asked(f"scancel {hurt}")
        until(lambda: asked(f"sinfo -h -n {worker} -o %T") == "idle", "the worker is back")
        assert asked("srun -N2 hostname").split()
        until(lambda: time.monotonic() - first > 125, "two minutes", within=140)
        assert asked("srun -N2 hostname").split()
    finally:
        lab.start_apiserver()
    release.wait_ready()
    after = release.containers()
    assert {name for name in before if before[name] != after[name]} == {"worker-1"}
    assert after["worker-1"][1] == before["worker-1"][1] + 1


def test_an_etcd_that_has_forgotten_the_past_is_no_matter(release: Release, lab: Lab) -> None:
    """Who watched from before is told to look anew: the kubelets for ConfigMaps, the scheduler, the controllers."""
    before = release.lives()
    power.kill(lab.control_plane, "kube-apiserver")
    try:
        assert lab.compact() > 0
    finally:
        lab.start_apiserver()
    release.upgrade(login={"motd": "compacted"})
    news = ("cat", "/mnt/minivm/config/motd/news")
    until(lambda: "compacted" in release.run("login-0", *news), "the login pod has the news", within=180)
    release.wait_ready()
    assert release.lives() == before
