"""Drain and cordon."""

from __future__ import annotations

import json

from tests.conformance.cluster import Cluster, fields, is_ready, name_of, not_tried, takes_jobs, uid_of

REASON = "conformance: look at the fan"


def drain(cluster: Cluster, node: str) -> None:
    cluster.as_admin("scontrol", "update", f"nodename={node}", "state=drain", f"reason={REASON}")


def resume(cluster: Cluster, node: str) -> None:
    """End a drain if there is one, also where slurmctld does not answer at once."""
    who = cluster.adapter.administrator

    def resumed() -> bool:
        cluster.attempt_as(who, "scontrol", "update", f"nodename={node}", "state=resume")
        found = cluster.attempt_as(who, "scontrol", "-o", "show", "node", node)
        return found.returncode == 0 and "DRAIN" not in fields(found.stdout).get("State", "DRAIN")

    cluster.until(resumed, f"{node} is resumed", seen=cluster.overview)


def test_a_drained_node_ends_its_job_and_starts_none(cluster: Cluster) -> None:
    """A drain keeps the running job and starts no other; a resume starts the one that waits."""
    node, _ = cluster.worker()
    runs = cluster.submit("-w", node, script="sleep 20")
    cluster.wait_job(runs, "RUNNING")
    drain(cluster, node)
    try:
        waits = cluster.submit("-w", node)
        cluster.wait_job(runs, "COMPLETED")
        assert cluster.job(waits)["JobState"] == "PENDING"
    finally:
        resume(cluster, node)
    cluster.wait_job(waits, "COMPLETED")


def test_a_persons_drain_outlives_the_pod(cluster: Cluster) -> None:
    """A node that a person drained stays drained, with the person's reason, when its pod is replaced."""
    node, pod = cluster.worker()
    old = uid_of(cluster.get("pod", pod))
    drain(cluster, node)
    try:
        cluster.kubectl("delete", "pod", pod, "--wait=false")

        def back() -> bool:
            new = next((each for each in cluster.pods("worker") if cluster.node_of(each) == node), None)
            state = cluster.nodes().get(node, {}).get("State", "")
            return new is not None and uid_of(new) != old and is_ready(new) and "IDLE" in state and "*" not in state

        cluster.until(back, "another pod has the node", within=300, seen=cluster.overview)
        found = cluster.nodes()[node]
        assert "DRAIN" in found["State"] and found["Reason"].startswith(REASON), found
    finally:
        resume(cluster, node)


def away_from_the_controller(cluster: Cluster) -> tuple[str, str]:
    """Return a worker and its Node in Kubernetes, one without the controller where there is such a Node."""
    for node, pod in sorted(cluster.workers().items()):
        machine = pod["spec"]["nodeName"]
        if not any(each["spec"].get("nodeName") == machine for each in cluster.pods("controller")):
            return node, machine
    node, pod = min(cluster.workers().items())
    return node, pod["spec"]["nodeName"]


def test_a_cordon_drains_the_machines_workers(cluster: Cluster) -> None:
    """A Node that is cordoned starts no jobs any more, and takes jobs again after the uncordon."""
    node, machine = away_from_the_controller(cluster)
    cluster.kubectl("cordon", machine)
    try:
        cluster.until(lambda: "DRAIN" in cluster.nodes()[node]["State"], f"{node} is drained", seen=cluster.overview)
        assert cluster.nodes()[node].get("Reason"), "the drain has no reason"
    finally:
        cluster.kubectl("uncordon", machine)
    cluster.until(lambda: takes_jobs(cluster.nodes()[node]), f"{node} takes jobs again", seen=cluster.overview)


def test_an_uncordon_leaves_a_persons_drain(cluster: Cluster) -> None:
    """A drain that a person set before the cordon stays after the uncordon."""
    node, machine = away_from_the_controller(cluster)
    drain(cluster, node)
    try:
        cluster.kubectl("cordon", machine)
        # Another worker of the same machine, or none, shows when the cordon was seen: wait for what is sure to come.
        cluster.until(lambda: unschedulable(cluster, machine), f"{machine} is cordoned")
        settle(cluster)
        cluster.kubectl("uncordon", machine)
        settle(cluster)
        found = cluster.nodes()[node]
        assert "DRAIN" in found["State"] and found["Reason"].startswith(REASON), found
    finally:
        cluster.attempt("uncordon", machine)
        resume(cluster, node)


def unschedulable(cluster: Cluster, machine: str) -> bool:
    return bool(cluster.get("node", machine)["spec"].get("unschedulable"))


def settle(cluster: Cluster) -> None:
    """Give whatever watches Nodes the time of two short jobs."""
    for _ in range(2):
        cluster.wait_job(cluster.submit(script="sleep 3"), "COMPLETED")


def evict(cluster: Cluster, pod: str, version: str) -> tuple[bool, str]:
    body = {
        "kind": "Eviction",
        "apiVersion": version,
        "metadata": {"name": pod, "namespace": cluster.adapter.namespace},
    }
    path = f"/api/v1/namespaces/{cluster.adapter.namespace}/pods/{pod}/eviction"
    done = cluster.attempt("create", "--raw", path, "-f", "-", stdin=json.dumps(body))
    return done.returncode == 0, f"{done.stdout}{done.stderr}"


def policy_version(cluster: Cluster) -> str:
    """Return the version of the group policy that the API server has."""
    return "policy/v1" if "policy/v1" in cluster.kubectl("api-versions").split() else "policy/v1beta1"


def test_a_worker_with_a_job_is_not_evicted(cluster: Cluster) -> None:
    """An eviction of a worker on which a job runs is refused, and the job goes on."""
    node, pod = cluster.worker()
    old = uid_of(cluster.get("pod", pod))
    job = cluster.submit("-w", node, script="sleep 600")
    cluster.wait_job(job, "RUNNING")
    granted, said = evict(cluster, pod, policy_version(cluster))
    assert not granted and "disruption budget" in said, said
    assert uid_of(cluster.get("pod", pod)) == old and cluster.job(job)["JobState"] == "RUNNING"


def test_a_drained_machines_idle_workers_are_evicted(cluster: Cluster) -> None:
    """Once a machine is cordoned and no job runs on its workers, `kubectl drain` moves them away."""
    if len({pod["spec"]["nodeName"] for pod in cluster.workers().values()}) < 2:
        not_tried("all workers are on one machine")
    node, machine = away_from_the_controller(cluster)
    pod = name_of(cluster.workers()[node])
    old = uid_of(cluster.get("pod", pod))
    cluster.kubectl("cordon", machine)
    try:
        version = policy_version(cluster)
        cluster.until(lambda: evict(cluster, pod, version)[0], f"{pod} may be evicted", seen=cluster.overview)
        cluster.until(lambda: gone(cluster, pod, old), f"{pod} left {machine}", within=300, seen=cluster.overview)
    finally:
        cluster.kubectl("uncordon", machine)


def gone(cluster: Cluster, pod: str, uid: str) -> bool:
    return all(uid_of(each) != uid for each in cluster.pods("worker", leaving=True) if name_of(each) == pod)
