"""Install and readiness."""

from __future__ import annotations

import re

from tests.conformance.cluster import Cluster, is_ready, name_of, not_tried, takes_jobs

BROKEN = {"CrashLoopBackOff", "ImagePullBackOff", "ErrImagePull", "CreateContainerConfigError", "RunContainerError"}
UNITS = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


def test_every_pod_is_ready(cluster: Cluster) -> None:
    """Every pod of the controller, the logins and the workers gets ready."""
    for role in ("controller", "login", "worker"):
        assert cluster.pods(role), f"there is no pod of the role {role}"
    unready = [name_of(pod) for _, pod in cluster.all_pods() if not is_ready(pod)]
    assert not unready, f"not ready: {unready}"


def test_no_container_is_broken(cluster: Cluster) -> None:
    """No container of the cluster waits to be started again after a crash."""
    states = [
        (name_of(pod), each["name"], each.get("state", {}).get("waiting", {}).get("reason"))
        for _, pod in cluster.all_pods()
        for each in pod["status"].get("containerStatuses", [])
    ]
    assert states, "no pod has a container that was started"
    assert not [state for state in states if state[2] in BROKEN], states


def test_every_container_with_slurm_has_a_liveness_and_a_readiness_probe(cluster: Cluster) -> None:
    """The kubelet finds out by probes when Slurm's daemon in a pod no longer works."""
    missing = [
        f"{name_of(pod)}: {probe}"
        for _, pod, container in cluster.containers()
        for probe in ("livenessProbe", "readinessProbe")
        if probe not in container
    ]
    assert not missing, missing


def test_slurmctld_answers_in_a_login_pod(cluster: Cluster) -> None:
    """`scontrol ping` in a login pod finds slurmctld up."""
    assert re.search(r"\bis UP\b", cluster.as_user("scontrol", "ping"))


def test_every_ready_worker_is_a_node_that_takes_jobs(cluster: Cluster) -> None:
    """A worker pod that is ready is a node in Slurm on which jobs may start."""
    nodes = cluster.nodes()
    away = {name: nodes.get(name, {}).get("State") for name in cluster.workers() if not takes_jobs(nodes.get(name, {}))}
    assert not away, away


def test_every_node_that_takes_jobs_is_a_worker(cluster: Cluster) -> None:
    """Slurm starts no job on a node whose pod does not exist."""
    ready = {name for name, node in cluster.nodes().items() if takes_jobs(node)}
    assert ready and ready <= set(cluster.workers()), f"{ready} in Slurm, {set(cluster.workers())} in Kubernetes"


def test_a_nodes_address_is_its_pods(cluster: Cluster) -> None:
    """slurmctld reaches each worker by the address that its pod has now."""
    nodes = cluster.nodes()
    controller = cluster.adapter.administrator.role
    for name, pod in cluster.workers().items():
        address = nodes[name]["NodeAddr"]
        found = cluster.attempt_in(controller, "getent", "ahosts", address).stdout.split()
        assert pod["status"]["podIP"] in found, (
            f"{name}: NodeAddr {address} is {found}, its pod is {pod['status']['podIP']}"
        )


def test_a_node_offers_no_more_memory_than_its_pod_may_use(cluster: Cluster) -> None:
    """A job that uses all the memory that Slurm promised does not exceed the limit of its pod."""
    nodes = cluster.nodes()
    limited = 0
    for name, pod in cluster.workers().items():
        limit = cluster.container("worker", pod).get("resources", {}).get("limits", {}).get("memory")
        if limit:
            limited += 1
            assert int(nodes[name]["RealMemory"]) << 20 <= in_bytes(limit), f"{name}: {nodes[name]}, limit {limit}"
    if not limited:
        not_tried("no worker has a memory limit")


def in_bytes(quantity: str) -> int:
    number, unit = re.fullmatch(r"([0-9.]+)(\w*)", str(quantity)).groups()  # type: ignore[union-attr]
    return int(float(number) * UNITS.get(unit, 1))


def test_slurmctlds_state_is_on_a_volume_that_outlives_the_pod(cluster: Cluster) -> None:
    """The queue is not lost with the controller's pod."""
    state = cluster.config()["StateSaveLocation"]
    (pod,) = cluster.pods("controller")[:1]
    lasting = {volume["name"] for volume in pod["spec"].get("volumes", []) if "persistentVolumeClaim" in volume}
    mounts = [
        mount["mountPath"].rstrip("/")
        for mount in cluster.container("controller", pod).get("volumeMounts", [])
        if mount["name"] in lasting
    ]
    assert any(f"{state}/".startswith(f"{mount}/") for mount in mounts), f"{state} is on none of {mounts}"


def test_a_job_that_names_no_partition_finds_one(cluster: Cluster) -> None:
    """There is a default partition, it is up, and every worker is in it."""
    lines = cluster.as_user("sinfo", "-h", "-N", "-o", "%N %P %a").splitlines()
    inside = {line.split()[0] for line in lines if line.split()[1].endswith("*") and line.split()[2] == "up"}
    assert set(cluster.workers()) <= inside, f"in the default partition: {inside}"
