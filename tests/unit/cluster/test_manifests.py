"""Conversion of Kubernetes objects into pods that run on one machine."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml

from cluster import ClusterError, manifests
from cluster.manifests import VolumeSource
from cluster.pods import description, fingerprint, security
from cluster.render import CHART, Document
from cluster.values import Options
from tests.support.rendered_chart import local, render

WORKER = "slurm-worker-0"
GIB = 2**30


def without_job(documents: list[Document]) -> list[Document]:
    """Drop the keys Job: unlike `make up`, an example gives no keys, and on Kubernetes a Job makes them."""
    return [document for document in documents if document["kind"] != "Job"]


def test_a_local_cluster_is_a_controller_a_login_a_directory_and_workers() -> None:
    known = local(Options(workers=3))
    assert [(pod.name, pod.role) for pod in known.pods if pod.role != "worker"] == [
        ("slurm-controller-0", "controller"),
        ("slurm-demo-0", "demo"),
        ("slurm-login-0", "login"),
    ]
    assert [pod.name for pod in known.pods if pod.pool == "worker"] == [f"slurm-worker-{i}" for i in range(3)]


def test_a_pod_has_what_the_chart_gave_it() -> None:
    worker = local().pod("slurm-worker-1")
    assert worker.image == "minivm/worker:latest"
    assert worker.pre_stop == ("minivm", "drain")
    assert worker.grace == 35
    assert (worker.ready.path, worker.ready.port) == ("/readyz", 8651)
    assert {"SYS_NICE", "SYS_PTRACE"} <= set(worker.capabilities)
    key = next(mount for mount in worker.mounts if mount.path == "/mnt/minivm/secrets/slurm-key")
    assert (key.volume.source, key.volume.of, key.volume.mode) == (VolumeSource.SECRET, "slurm-slurm-key", 0o400)
    assert key.read_only


def test_a_pods_environment_is_complete_only_at_its_start() -> None:
    env = manifests.resolve_env(local().pod("slurm-worker-0"), address="10.0.0.7")
    assert env["MINIVM_POD_NAME"] == "slurm-worker-0"
    assert env["MINIVM_POD_IP"] == "10.0.0.7"
    assert env["MINIVM_NODE_NAME"] == "this-machine"
    assert env["MINIVM_NODE_FEATURES"] == "worker"


def test_labels_reach_the_environment_and_the_variables_made_of_it() -> None:
    overrides = {
        "workers": {
            "pools": {"worker": {"topologyFeatures": [{"label": "minivm.io/pool", "prefix": "in-"}], "replicas": 1}}
        }
    }
    env = manifests.resolve_env(local(Options(overrides=overrides)).pod("slurm-worker-0"), address="10.0.0.7")
    assert env["MINIVM_NODE_FEATURES"] == "worker,in-worker"


def test_dns_names_are_those_of_kubernetes_and_no_others() -> None:
    known = local()
    names = manifests.aliases(known.pod("slurm-worker-0"), known.services)
    assert "slurm-worker-0.slurm-worker" in names
    assert "slurm-worker-0.slurm-worker.minivm.svc.cluster.local" in names
    # The bare name of a pod resolves through the pods' search domains only, as on Kubernetes.
    assert "slurm-worker-0" not in names
    for peer in ("slurm-controller-0", "slurm-login-0", "slurm-worker-1"):
        found = {f"slurm-worker-0.{domain}" for domain in known.pod(peer).searches} & set(names)
        assert found == {"slurm-worker-0.slurm-worker.minivm.svc.cluster.local"}
    assert "slurm-controller" in manifests.aliases(known.pod("slurm-controller-0"), known.services)


def test_the_controller_keeps_the_address_of_its_service() -> None:
    """Only the controller keeps its address: login pods and workers get a new one each time, as on Kubernetes."""
    known = local(Options(workers=2))
    kept = manifests.map_stable_services(known.pods, known.services)
    assert {pod: service.name for pod, service in kept.items()} == {"slurm-controller-0": "slurm-slurmctld"}
    assert "slurm-slurmctld" in manifests.aliases(known.pod("slurm-controller-0"), known.services)
    unstable = local(Options(overrides={"controller": {"stableAddress": False}}))
    assert manifests.map_stable_services(unstable.pods, unstable.services) == {}


def test_a_service_for_one_pod_selects_that_pod_alone() -> None:
    documents = render(yaml.safe_load((CHART / "examples/static-nodes.yaml").read_text()), release="s", namespace="n")
    known = manifests.parse(without_job(documents), namespace="n")
    assert [pod.name for pod in known.pods if "s-rack1-1" in manifests.aliases(pod, known.services)] == ["s-rack1-1"]


def test_ssh_is_published_and_nothing_else() -> None:
    published = [service for service in local(Options(port=2345)).services if service.node_port]
    assert [(service.name, service.node_port) for service in published] == [("slurm-ssh", (2345, "ssh"))]


def test_the_controllers_state_is_a_claim_of_its_own_in_parts() -> None:
    state = [mount for mount in local().pod("slurm-controller-0").mounts if mount.volume.source is VolumeSource.CLAIM]
    assert {(mount.path, mount.volume.of, mount.sub_path) for mount in state} == {
        ("/var/spool/slurmctld", "state-slurm-controller-0", "slurmctld"),
        ("/var/lib/minivm/slurm", "state-slurm-controller-0", "slurm-config"),
        ("/var/lib/minivm/backups", "state-slurm-controller-0", "backups"),
        ("/var/lib/minivm/requeue", "state-slurm-controller-0", "requeue"),
        ("/var/lib/mysql", "state-slurm-controller-0", "mysql"),
        ("/var/lib/sss/db", "state-slurm-controller-0", "sssd"),
    }


def test_secrets_are_decoded_and_not_shown() -> None:
    for auth, secret, name in (("slurm", "slurm-slurm-key", "slurm.key"), ("munge", "slurm-munge", "munge.key")):
        key = local(Options(auth=auth)).files[VolumeSource.SECRET, secret]
        assert key.data[name] == auth[:3].encode() * 12
        assert auth[:3] * 2 not in repr(key).replace(secret, "")


def test_a_large_pool_keeps_its_devices_and_memory_in_sight() -> None:
    documents = render(
        yaml.safe_load((CHART / "examples/h100-infiniband.yaml").read_text()) | {"mounts": {}},
        release="s",
        namespace="n",
    )
    known = manifests.parse(without_job(documents), namespace="n")
    pod = known.pod("hall2-h100-7")
    assert pod.limits.devices == (("nvidia.com/gpu", 8), ("rdma/ib", 8))
    assert pod.limits.memory == 1900 * 2**30
    assert pod.privileged
    assert next(mount for mount in pod.mounts if mount.path == "/dev/shm").volume.size == 256 * 2**30


def test_shared_memory_is_half_of_what_a_worker_has() -> None:
    def size(**worker: object) -> int:
        return manifests.size_shared_memory(
            local(Options(overrides={"workers": {"defaults": worker}})).pod(WORKER), 8 * GIB
        )

    def limited(memory: str | int, **worker: object) -> int:
        return size(resources={"limits": {"memory": memory}}, **worker)

    assert size() == 4 * GIB
    assert limited("2Gi") == limited(2 * GIB) == limited("2147483648") == GIB
    assert limited("1.5G") == 732421 * 1024  # a whole number of KiB
    assert limited("2Ti", shmSize="10%") == 2 * 1024 * GIB // 10 // 1024 * 1024
    assert size(shmSize="1Gi") == limited("4Gi", shmSize="1Gi") == GIB
    assert size(shmSize="") == 0
    with pytest.raises(ClusterError, match="write a number with a unit"):
        limited("lots")
    with pytest.raises(ClusterError):
        size(shmSize="150%")


def test_a_pod_is_replaced_for_its_description_and_never_for_its_files() -> None:
    """Recreate a pod for a changed image, variable or grace period; a changed ConfigMap reaches the running pod."""
    before = local().pod("slurm-worker-0")
    same = local(Options(overrides={"slurm": {"extraConfig": "Licenses=a:1"}, "login": {"motd": "new"}}))
    assert fingerprint(description(same.pod("slurm-worker-0"), "sha256:1")) == fingerprint(
        description(before, "sha256:1")
    )
    assert fingerprint(description(before, "sha256:2")) != fingerprint(description(before, "sha256:1"))
    other = local(Options(overrides={"workers": {"defaults": {"graceSeconds": 45}}}))
    assert fingerprint(description(other.pod("slurm-worker-0"), "sha256:1")) != fingerprint(
        description(before, "sha256:1")
    )
    assert fingerprint(description(other.pod("slurm-login-0"), "sha256:1")) == fingerprint(
        description(local().pod("slurm-login-0"), "sha256:1")
    )


def test_an_unknown_pod_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ClusterError, match="slurm-controller-0, slurm-demo-0"):
        local().pod("slurm-worker-9")


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ({"kind": "CronJob", "metadata": {"name": "x"}}, "CronJob x"),
        ({"kind": "DaemonSet", "metadata": {"name": "y"}}, "DaemonSet y"),
    ],
)
def test_an_object_that_would_be_left_out_is_refused(document: dict[str, Any], said: str) -> None:
    with pytest.raises(ClusterError, match=said):
        manifests.parse([document], namespace="n")


def test_a_volume_that_one_machine_cannot_give_is_refused() -> None:
    with pytest.raises(ClusterError, match="nfs"):
        manifests.parse_volume({"name": "data", "nfs": {"server": "s", "path": "/"}}, pod="p")


@pytest.mark.parametrize(
    ("text", "number"),
    [("256Gi", 256 * 2**30), ("1500M", 1_500_000_000), ("10k", 10_000), ("7", 7), (0, 0), ("1.5Ti", 3 * 2**39)],
)
def test_quantities(text: str | int, number: int) -> None:
    assert manifests.quantity(text) == number


def test_a_quantity_that_is_none_is_refused() -> None:
    with pytest.raises(ClusterError, match="quantity"):
        manifests.quantity("lots")


@pytest.mark.parametrize(("text", "number"), [("500m", 0.5), (2, 2.0), ("3", 3.0)])
def test_cpus(text: str | int, number: float) -> None:
    assert manifests.cpus(text) == number


def test_a_key_that_nobody_gives_is_refused_on_one_machine() -> None:
    """Refuse a missing key: no Job runs on one machine, so the pods would wait for their keys without an error."""
    with pytest.raises(ClusterError, match="cannot run the Job slurm-keys-"):
        local(Options(overrides={"secrets": {"slurm": {"key": ""}}}))


def test_a_ring_has_its_key_on_one_machine_too() -> None:
    url = {"MINIVM_GITSYNC_RING_URL": "http://slurm-controller:8651/ring"}
    known = local(Options(overrides={"scripts": {"env": url}}))
    assert known.files[VolumeSource.SECRET, "slurm-ring"].data == {"ring.key": b"rin" * 12}


def test_system_calls_are_kept_from_pods_as_the_chart_says() -> None:
    assert {pod.seccomp for pod in local().pods} == {"RuntimeDefault"}

    def pool(profile: str) -> Options:
        return Options(overrides={"workers": {"defaults": {"seccompProfile": profile}}})

    assert local(pool("Unconfined")).pod("slurm-worker-0").seccomp == "Unconfined"
    # Localhost profiles are refused, except the chart's own, whose text is part of the chart.
    (pod, *_) = [
        each for each in local(Options(overrides={"containers": {"enabled": True}})).pods if each.role == "worker"
    ]
    profile, apparmor = security(pod)
    assert json.loads(profile.removeprefix("seccomp="))["defaultAction"] and apparmor == "apparmor=unconfined"
    with pytest.raises(ClusterError, match="a Localhost one lies on Kubernetes' machines"):
        local(pool("Localhost/minivm.json"))


@pytest.mark.parametrize(
    ("field", "part"),
    [
        ("sidecars", {"name": "beside", "image": "tools:2"}),
        ("initContainers", {"name": "before", "image": "tools:1"}),
    ],
)
def test_a_part_that_only_kubernetes_has_is_refused_and_not_left_out(field: str, part: dict[str, str]) -> None:
    options = Options(overrides={"workers": {"defaults": {field: [part]}}})
    with pytest.raises(ClusterError, match=rf"run slurm-worker-0 on one machine.*{field} \({part['name']}\) need"):
        local(options)


def test_a_volume_of_the_sites_own_is_mounted() -> None:
    parts = {
        "extraVolumes": [{"name": "data", "hostPath": {"path": "/srv"}}],
        "extraVolumeMounts": [{"name": "data", "mountPath": "/data", "readOnly": True}],
    }
    worker = local(Options(overrides={"workers": {"defaults": parts}})).pod("slurm-worker-0")
    (mount,) = [mount for mount in worker.mounts if mount.path == "/data"]
    assert (mount.volume.of, mount.read_only) == ("/srv", True)
