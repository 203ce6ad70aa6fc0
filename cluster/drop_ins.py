"""Check drop-ins before a pod gets them: `minivm check` of the pod's own image, in a short-lived container."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Any

from cluster import manifests, publish
from cluster.errors import ClusterError
from cluster.manifests import Manifests, PodSpec, VolumeMount, VolumeSource
from cluster.pods import LABEL, Kubelet

DIRECTORIES = ("services.d", "supervisor.d")
PATIENCE = 60


def check(kubelet: Kubelet, known: Manifests) -> None:
    """Raise ClusterError for drop-ins that a pod would refuse; those that the pods have already are skipped."""
    checked_roles = set()
    for pod in known.pods:
        mounts = [mount for mount in pod.mounts if PurePosixPath(mount.path).name in DIRECTORIES]
        if pod.role in checked_roles or not any(fresh(kubelet, pod, mount, known) for mount in mounts):
            continue
        checked_roles.add(pod.role)
        refused = ask(kubelet, pod, mounts, known)
        if refused:
            raise ClusterError(f"take the drop-ins of {pod.role}", refused, hint="no pod was changed")


def fresh(kubelet: Kubelet, pod: PodSpec, mount: VolumeMount, known: Manifests) -> bool:
    files = content(mount, known)
    return bool(files) and publish.published(kubelet.volume_directory(pod, mount.volume.name)) != files


def content(mount: VolumeMount, known: Manifests) -> dict[str, bytes]:
    files = known.files.get((mount.volume.source, mount.volume.of))
    return dict(files.data) if files is not None and mount.volume.source is VolumeSource.CONFIG else {}


def ask(kubelet: Kubelet, pod: PodSpec, mounts: list[VolumeMount], known: Manifests) -> str:
    """Return the image's error, or ""."""
    root = kubelet.state / "check"
    binds: list[dict[str, Any]] = []
    for mount in mounts:
        directory = root / pod.role / mount.volume.name
        publish.publish(directory, content(mount, known), mode=mount.volume.mode)
        binds.append({"Type": "bind", "Source": str(directory), "Target": mount.path, "ReadOnly": True})
    api = kubelet.api
    host = api.create_host_config(mounts=binds, cap_drop=["ALL"], network_mode="none")
    env = manifests.resolve_env(pod, address="127.0.0.1", node="this-machine")
    labels = {LABEL: f"{kubelet.cluster}-check"}
    container = api.create_container(
        pod.image, ["check"], entrypoint=["/usr/bin/minivm"], environment=env, host_config=host, labels=labels
    )["Id"]
    try:
        api.start(container)
        code = api.wait(container, timeout=PATIENCE)["StatusCode"]
        message = str(api.logs(container).decode(errors="replace")).strip().removeprefix("minivm: ")
    finally:
        api.remove_container(container, force=True, v=True)
    return message or f"minivm check ended with {code}" if code else ""
