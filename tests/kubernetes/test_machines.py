"""Failures of Kubernetes' machines, and their effect on the pods and Slurm."""

from __future__ import annotations

import time

import pytest

from tests.kubernetes import configs
from tests.kubernetes.kubectl import condition_of
from tests.kubernetes.lab import Lab
from tests.kubernetes.world import Release
from tests.waiting import until

pytestmark = pytest.mark.timeout(900)
WORKERS = ("worker-0", "worker-1")


def test_a_drained_machine_gives_its_pods_and_jobs_away(release: Release) -> None:
    job = release.submit("alice", "-w", f"{release.name}-worker-0", script="sleep 600")
    release.wait_for(job, "RUNNING")
    node = release.node_of("worker-0")
    release.shut()
    release.kubernetes("drain", node, "--ignore-daemonsets", "--delete-emptydir-data", "--timeout=240s")
    try:
        release.wait_ready()
        assert node not in {release.node_of(name) for name in release.pods()}
        release.wait_requeued(job)
    finally:
        release.kubernetes("uncordon", node)


def test_a_machine_that_restarts_has_its_pods_back_where_they_were(release: Release, lab: Lab) -> None:
    """All containers are killed at once, and nobody is told; the pods are the same, with other addresses and another
    boot: its name, and the time since it that Slurm counts, which takes a node that was away and started for broken."""
    worker = release.away()
    job = release.submit("alice", "-w", f"{release.name}-{worker}", script="sleep 600")
    release.wait_for(job, "RUNNING")
    before = release.lives()
    node = release.node_of(worker)
    hit = {name: life for name, life in before.items() if release.node_of(name) == node}
    old = boots(release, worker)
    release.shut()
    lab.power_cut(node)
    lab.power_back(node)
    again = {name: (identity, starts + 1) for name, (identity, starts) in hit.items()}
    until(lambda: release.lives() == before | again, "its containers are new", seen=release.why)
    release.wait_ready()
    release.wait_requeued(job)
    release.wait_idle()
    new = boots(release, worker)
    assert all(new[which] != old[which] for which in new) and new["kubelet's"] == new["the pod's"], (old, new)
    until(lambda: new["the pod's"] in known_to_health(release, worker), "what is told of its health is of this boot")
    assert old["the pod's"] not in known_to_health(release, worker)
    assert len(release.as_user("alice", "srun -N2 hostname").split()) == 2


def boots(release: Release, worker: str) -> dict[str, str]:
    """The boot that each of them knows of."""
    info = release.kubernetes.get("node", release.node_of(worker))["status"]["nodeInfo"]
    shown = release.slurm("scontrol", "-o", "show", "node", f"{release.name}-{worker}")
    return {
        "kubelet's": info["bootID"],
        "the pod's": release.run(worker, "cat", "/proc/sys/kernel/random/boot_id").strip(),
        "Slurm's": shown.partition("BootTime=")[2].split()[0],
    }


def known_to_health(release: Release, worker: str) -> str:
    return release.run(worker, "sh", "-c", "cat /run/minivm/health/index.json /run/minivm/verdicts/*.json || true")


def taints(release: Release, node: str) -> set[str]:
    found = release.kubernetes.get("node", node)["spec"].get("taints") or []
    return {f"{item['key']}:{item['effect']}" for item in found}


def test_a_lost_machine_keeps_its_pods_until_it_is_back(release: Release, lab: Lab) -> None:
    """Kubernetes cannot know whether they still run, and makes no second one of a name; Slurm requeues by itself."""
    victim = release.away()
    where = release.node_of(victim)
    (kept,) = set(WORKERS) - {victim}
    job = release.submit("alice", "-w", f"{release.name}-{victim}", script="sleep 600")
    release.wait_for(job, "RUNNING")
    old = release.pods()[victim]
    release.shut()
    begun = time.monotonic()
    lab.power_cut(where)
    try:
        unreachable = "node.kubernetes.io/unreachable:NoExecute"
        until(lambda: unreachable in taints(release, where), "the loss is noticed")
        print(f"node lost to noticed: {time.monotonic() - begun:.1f} s")
        until(
            lambda: victim in release.leaving(), "its pods are to go", within=configs.TOLERATE + 120, seen=release.why
        )
        print(f"node lost to its pods evicted: {time.monotonic() - begun:.1f} s")
        release.wait_requeued(job)
        print(f"node lost to its job requeued: {time.monotonic() - begun:.1f} s")
        assert release.pods()[victim]["metadata"]["uid"] == old["metadata"]["uid"], "it is not replaced"
        assert condition_of(release.pods()[victim], "Ready")["status"] == "False"
        # The login pod may be lost too.
        options = ("-D", "/tmp", "-o", "/dev/null", "-w", f"{release.name}-{kept}")
        release.wait_for(release.slurm_as_user("sbatch", "--parsable", *options, "--wrap", "true"), "COMPLETED")
    finally:
        lab.power_back(where)
    until(lambda: release.is_new(victim, old["metadata"]["uid"]), "there is another one", within=180, seen=release.why)
    release.wait_ready()


def test_a_lost_machine_that_somebody_gives_up_loses_its_pods_to_the_others(release: Release, lab: Lab) -> None:
    """`kubectl delete --force` is the word of somebody who knows that it is off. The controller comes back elsewhere
    with its state, jobs on other machines run on, and one of the lost machine is requeued when its worker is back."""
    node = release.node_of("controller-0")
    jobs = {worker: release.submit("alice", "-w", f"{release.name}-{worker}", script="sleep 600") for worker in WORKERS}
    for job in jobs.values():
        release.wait_for(job, "RUNNING")
        release.wait_saved(job)
    lost = {name for name in release.pods() if release.node_of(name) == node}
    release.shut()
    lab.power_cut(node)
    try:
        within = configs.TOLERATE + 120
        until(lambda: lost <= release.leaving(), "its pods are to go", within=within, seen=release.why)
        begun = time.monotonic()
        names = [f"{release.name}-{name}" for name in sorted(lost)]
        release.kubectl("delete", "pod", "--force", "--grace-period=0", *names)
        release.wait_ready()
        print(f"given up to all ready elsewhere: {time.monotonic() - begun:.1f} s")
        assert node not in {release.node_of(name) for name in release.pods()}
        for worker, job in jobs.items():
            if worker in lost:
                release.wait_requeued(job)
            else:
                assert (release.state(job), release.restarts(job)) == ("RUNNING", 0)
                release.slurm("scancel", job)
    finally:
        lab.power_back(node)
