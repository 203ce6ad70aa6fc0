"""Pods as containers: what a kubelet does for a pod's description, through docker's API.

One pod is one container, labelled with the cluster and the pod. `description` is all of a pod that its container is
made of; a label holds its hash (`fingerprint`), so that `up` sees which pods changed. Claims are docker volumes, and a
pod's own cgroups are in `cgroups.py`. ConfigMaps and Secrets are directories, updated like a kubelet does:

..2026_11_20T10_00_00.123456/slurm.conf   the content, a new directory for every change
..data -> ..2026_11_20T10_00_00.123456    swapped by rename: a reader sees all old or all new
slurm.conf -> ..data/slurm.conf
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import struct
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO

from cluster import ClusterError, cgroups, manifests
from cluster.manifests import CONTAINERS, Manifests, MountedFiles, PodSpec, Volume, VolumeMount, VolumeSource
from cluster.render import CHART
from ground.files import read_json, write_whole

LABEL = "minivm.cluster"
CHECK_LABEL = "minivm.check"  # of a container that tries an image for the cluster, and is none of its pods
POD_LABEL = "minivm.pod"
SPEC_LABEL = "minivm.spec"
ROLE_LABEL = "minivm.role"
STATE_LABEL = "minivm.state"
GRACE_LABEL = "minivm.grace"
PRE_STOP_LABEL = "minivm.pre-stop"
PROFILE = CHART / "files/seccomp-containers.json"
CORRECT = "correct the values, then `make up ARGS='--values FILE'`; `make up ARGS=--reset` goes back to the defaults"
FRAME = struct.Struct(">BxxxL")
EXIT_S = 30.0
# A kubelet keeps the last 10 MiB of a container's log and four older files.
LOG = {"type": "json-file", "config": {"max-size": "10m", "max-file": "5"}}


@dataclass(frozen=True, slots=True)
class RunningPod:
    """A pod's container, as the engine reports it now."""

    pod: str
    container: str
    running: bool
    address: str
    restarts: int
    exit_code: int
    spec: str
    image: str  # its id
    grace: int
    pre_stop: tuple[str, ...]
    role: str = ""
    # The name by which its image was requested.
    reference: str = ""
    restarting: bool = False
    last_words: str = ""  # the reason of PID 1's end, from /dev/termination-log as a kubelet reads it


def description(pod: PodSpec, image_id: str, published: Mapping[int, int] = MappingProxyType({})) -> dict[str, Any]:
    """Return a pod's description as JSON, without the content of its ConfigMaps, which changes under a running pod.

    A node port is part of the container here; on Kubernetes a Service adds it to a running pod.
    """
    described = asdict(pod) | {"image": image_id, "env": dict(pod.env), "published": dict(published)}
    plain: dict[str, Any] = json.loads(json.dumps(described, default=str))
    for mount in plain["mounts"]:
        # It does not change the container, and pods of older versions were described without it.
        del mount["volume"]["optional"]
    return plain


def fingerprint(described: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:16]


def map_published_ports(pod: PodSpec, desired: Manifests) -> dict[int, int]:
    """Map the pod's published ports to ports of this machine."""
    services = [service for service in desired.services if service.node_port and manifests.selects(service, pod)]
    return {pod.ports[port[1]]: port[0] for service in services if (port := service.node_port)}


def status(error: OSError) -> int:
    """Return the HTTP status behind an error of the engine's API; 0 if it was never reached."""
    return int(getattr(getattr(error, "response", None), "status_code", 0) or 0)


def read_frames(stream: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Yield the kind and content of the engine's frames until the stream ends: stdout is 1, stderr 2."""
    while len(header := stream.read(FRAME.size)) == FRAME.size:
        kind, size = FRAME.unpack(header)
        yield kind, stream.read(size)


def security(pod: PodSpec) -> list[str]:
    """Return the runtime's security options for a pod. A kubelet reads a profile from its machine's disk."""
    if pod.seccomp == CONTAINERS:
        return [f"seccomp={PROFILE.read_text()}", "apparmor=unconfined"]
    return ["seccomp=unconfined"] if pod.seccomp == "Unconfined" else []


class Kubelet:
    """The pods of one cluster on one engine. Stateless: the engine's labels are its memory."""

    def __init__(self, client: Any, cluster: str, state: Path) -> None:
        self.client = client
        self.cluster = cluster
        self.state = state
        self.network = f"minivm-{cluster}"

    @property
    def api(self) -> Any:
        return self.client.api

    # Inspection

    def list_pods(self) -> dict[str, RunningPod]:
        """Return the cluster's containers by pod, also those that have stopped."""
        by_pod = {}
        for item in self.api.containers(all=True, filters={"label": f"{LABEL}={self.cluster}"}):
            labels = item["Labels"]
            detail = self.inspect(item["Id"])
            if detail is None:
                continue
            running = bool(detail["State"]["Running"]) and not detail["State"]["Restarting"]
            address = detail["NetworkSettings"]["Networks"].get(self.network, {}).get("IPAddress", "")
            by_pod[labels[POD_LABEL]] = RunningPod(
                pod=labels[POD_LABEL],
                container=item["Id"],
                running=running,
                address=address,
                restarts=int(detail["RestartCount"]),
                exit_code=int(detail["State"]["ExitCode"]),
                spec=labels[SPEC_LABEL],
                image=detail["Image"],
                grace=int(labels[GRACE_LABEL]),
                pre_stop=tuple(json.loads(labels[PRE_STOP_LABEL])),
                role=labels.get(ROLE_LABEL, ""),
                reference=detail["Config"]["Image"],
                restarting=bool(detail["State"]["Restarting"]),
                last_words="" if running else self.last_words(labels[POD_LABEL]),
            )
        return by_pod

    def termination_log(self, pod: str) -> Path:
        return self.state / "pods" / pod / "termination-log"

    def description_file(self, pod: str) -> Path:
        return self.state / "pods" / pod / "description.json"

    def read_description(self, pod: str) -> dict[str, Any]:
        """Return what the pod's container was created from; empty if an older version created it."""
        return dict(read_json(self.description_file(pod)))

    def last_words(self, pod: str) -> str:
        try:
            return self.termination_log(pod).read_bytes()[:4096].decode(errors="replace").strip()
        except OSError:
            return ""

    def inspect(self, container: str) -> dict[str, Any] | None:
        try:
            detail: dict[str, Any] = self.api.inspect_container(container)
        except OSError as error:
            if status(error) == 404:
                return None
            raise
        return detail

    def image_id(self, image: str) -> str:
        if image_info := self.inspect_image(image):
            return str(image_info["Id"])
        raise ClusterError(f"start from {image}", "this machine does not have it", hint="make images")

    def labels(self, image: str) -> dict[str, str]:
        image_info = self.inspect_image(image)
        return (image_info["Config"]["Labels"] or {}) if image_info else {}

    def inspect_image(self, image: str) -> dict[str, Any] | None:
        try:
            return dict(self.api.inspect_image(image))
        except OSError as error:
            if status(error) != 404:
                raise
            return None

    # Volumes

    def publish_files(self, pod: PodSpec, known: Manifests) -> bool:
        """Write the pod's ConfigMaps and Secrets as directories; return whether a running pod sees a change."""
        changed = False
        for volume, files in self.files(pod, known):
            changed |= publish_files(self.volume_directory(pod, volume.name), files.data, mode=volume.mode)
        return changed

    def changed_files(self, pod: PodSpec, known: Manifests) -> set[str]:
        """Return the ConfigMaps and Secrets whose files have changed for the pod."""
        return {
            volume.of
            for volume, files in self.files(pod, known)
            if read_published_files(self.volume_directory(pod, volume.name)) != dict(files.data)
        }

    def files(self, pod: PodSpec, known: Manifests) -> Iterator[tuple[Volume, MountedFiles]]:
        for volume in {mount.volume for mount in pod.mounts}:
            if volume.source not in (VolumeSource.CONFIG, VolumeSource.SECRET):
                continue
            files = known.files.get((volume.source, volume.of))
            if files is None and not volume.optional:
                raise ClusterError(
                    f"give {pod.name} its volume {volume.name}",
                    f"there is no {volume.source.value} {volume.of}",
                    hint="one machine has those that the chart makes: leave existing ones out of the values",
                )
            yield volume, files or MountedFiles({})

    def volume_directory(self, pod: PodSpec, volume: str) -> Path:
        return self.state / "pods" / pod.name / "volumes" / volume

    def docker_mount(self, pod: PodSpec, mount: VolumeMount) -> dict[str, Any]:
        volume, target = mount.volume, {"Target": mount.path, "ReadOnly": mount.read_only}
        if volume.source in (VolumeSource.CONFIG, VolumeSource.SECRET):
            # One file of it stays as it is now, as on Kubernetes: the engine follows the link.
            file = self.volume_directory(pod, volume.name) / mount.sub_path
            return target | {"Type": "bind", "Source": str(file)}
        if volume.source is VolumeSource.EMPTY and volume.memory:
            return target | {"Type": "tmpfs", "TmpfsOptions": {"SizeBytes": volume.size} if volume.size else {}}
        parts = {
            VolumeSource.CLAIM: ("claim", volume.of),
            VolumeSource.HOST: ("host", volume.of.strip("/").replace("/", "-")),
            VolumeSource.EMPTY: ("empty", pod.name, volume.name),
        }[volume.source]
        name = "-".join(("minivm", self.cluster, *parts, *filter(None, [mount.sub_path])))
        # NoCopy: a claim starts empty on Kubernetes, without the image's files at that path.
        options = {"NoCopy": True, "Labels": {LABEL: self.cluster}}
        return target | {"Type": "volume", "Source": name, "VolumeOptions": options}

    # Life of a pod

    def create(
        self,
        pod: PodSpec,
        known: Manifests,
        *,
        address: str,
        described: Mapping[str, Any],
        aliases: list[str],
        hosts: Mapping[str, str],
    ) -> str:
        """Create a container for the pod without starting it.

        `hosts` are names that resolve even while no pod has them.
        """
        self.publish_files(pod, known)
        termination = self.termination_log(pod.name)
        termination.write_text("")
        write_private(self.description_file(pod.name), json.dumps(described).encode())
        shm = manifests.size_shared_memory(pod, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
        mounts = [self.docker_mount(pod, mount) for mount in pod.mounts if mount.path != "/dev/shm"]
        mounts.append({"Type": "bind", "Source": str(termination), "Target": "/dev/termination-log"})
        own_cgroups = cgroups.wants_cgroups(pod)
        if own_cgroups:
            mounts += cgroups.make(self.cluster, pod.name, pod.role, memory=pod.limits.memory)
        bindings = {port: ("127.0.0.1", host_port) for port, host_port in map_published_ports(pod, known).items()}
        host = self.api.create_host_config(
            mounts=mounts,
            cap_drop=["ALL"],
            cap_add=list(pod.capabilities),
            security_opt=security(pod) or None,
            restart_policy={"Name": "always"},
            port_bindings=bindings or None,
            log_config=LOG,
            dns_search=list(pod.searches) or None,
            extra_hosts=dict(hosts) or None,
            **({"cgroup_parent": cgroups.name_parent(self.cluster, pod.name)} if own_cgroups else {}),
            **({"shm_size": shm} if shm else {}),
            **({"mem_limit": pod.limits.memory} if pod.limits.memory else {}),
            **({"nano_cpus": int(pod.limits.cpus * 1e9)} if pod.limits.cpus else {}),
        )
        endpoint = self.api.create_endpoint_config(aliases=aliases, ipv4_address=address)
        created = self.api.create_container(
            image=pod.image,
            name=f"minivm-{self.cluster}-{pod.name}",
            hostname=pod.name,
            environment=manifests.resolve_env(pod, address=address),
            labels={
                LABEL: self.cluster,
                POD_LABEL: pod.name,
                ROLE_LABEL: pod.role,
                STATE_LABEL: str(self.state),
                SPEC_LABEL: fingerprint(described),
                GRACE_LABEL: str(pod.grace),
                PRE_STOP_LABEL: json.dumps(pod.pre_stop),
            },
            ports=list(bindings) or None,
            host_config=host,
            networking_config=self.api.create_networking_config({self.network: endpoint}),
        )
        return str(created["Id"])

    def start(self, pod: PodSpec, container: str) -> None:
        try:
            self.api.start(container)
        except OSError as error:
            if not status(error):
                raise
            message = str(getattr(error, "explanation", None) or error)
            hint = f"this machine cannot grant one of {', '.join(pod.capabilities)}" if "apply caps" in message else ""
            raise ClusterError(f"start {pod.name}", message, hint=hint or CORRECT) from error

    def stop(self, running: RunningPod) -> None:
        """Stop a pod like a kubelet: preStop, then TERM, then KILL at the end of the grace period.

        The settings at the pod's start count, not the chart's current ones: its labels hold them.
        """
        deadline = time.monotonic() + running.grace
        if running.pre_stop:
            self.run_pre_stop(running.container, running.pre_stop, deadline)
        self.api.stop(running.container, timeout=max(1, round(deadline - time.monotonic())))

    def restart(self, running: RunningPod) -> None:
        """Restart the container, like a kubelet after a failed liveness probe."""
        self.api.restart(running.container, timeout=running.grace)

    def run_pre_stop(self, container: str, command: tuple[str, ...], deadline: float) -> None:
        try:
            started = self.api.exec_create(container, list(command))["Id"]
            self.api.exec_start(started, detach=True)
            while time.monotonic() < deadline and self.api.exec_inspect(started)["Running"]:
                time.sleep(0.05)
        except OSError as error:
            # A container that no longer runs has no preStop.
            if status(error) not in (404, 409):
                raise

    def remove(self, pod: str, container: str) -> None:
        """Remove the container and what belongs to it alone; claims stay."""
        self.api.remove_container(container, force=True, v=True)
        cgroups.remove(self.cluster, pod)
        prefix = f"minivm-{self.cluster}-empty-{pod}-"
        for volume in self.volumes():
            if volume.startswith(prefix):
                self.api.remove_volume(volume, force=True)

    def exec(self, container: str, command: Iterable[str], *, user: str = "") -> tuple[int, str]:
        """Run a command in a pod; return the exit code, and stdout and stderr together.

        The docker library would upgrade the connection and read beside the buffer of the response: what the engine
        sends together with the header is lost then, under load one answer of a hundred.
        """
        started = self.api.exec_create(container, list(command), user=user)["Id"]
        url = f"{self.api.base_url}/v{self.api.api_version}/exec/{started}/start"
        request = {"Detach": False, "Tty": False}
        with self.api.post(url, json=request, stream=True, timeout=None) as answer:  # a command may be silent for long
            answer.raise_for_status()
            output = b"".join(content for _, content in read_frames(answer.raw))
        return self._exit_code(started), output.decode(errors="replace")

    def _exit_code(self, started: str) -> int:
        """Return the exit code of a command whose output has ended; the engine knows it a moment later."""
        deadline = time.monotonic() + EXIT_S
        while (code := self.api.exec_inspect(started)["ExitCode"]) is None:
            if time.monotonic() > deadline:
                raise ClusterError("run a command in a pod", f"the engine gave no exit code within {EXIT_S:g} s")
            time.sleep(0.05)
        return int(code)

    def volumes(self) -> list[str]:
        volumes = self.api.volumes(filters={"label": f"{LABEL}={self.cluster}"})["Volumes"] or []
        return [str(volume["Name"]) for volume in volumes]

    # Network

    def ensure_network(self) -> Mapping[str, Any]:
        """Create the network with a fixed subnet: only then can a pod's address be chosen in advance."""
        networks = self.api.networks(names=[self.network])
        for network in networks:
            if network["Name"] == self.network:
                return self.api.inspect_network(network["Id"])  # type: ignore[no-any-return]  # docker's own types
        # Only the engine knows a free range on this machine: let it choose, then pin its choice.
        draft = self.api.create_network(self.network, driver="bridge", labels={LABEL: self.cluster})
        config = self.api.inspect_network(draft["Id"])["IPAM"]["Config"][0]
        self.api.remove_network(draft["Id"])
        pinned = {"Driver": "default", "Config": [{"Subnet": config["Subnet"], "Gateway": config["Gateway"]}]}
        created = self.api.create_network(self.network, driver="bridge", ipam=pinned, labels={LABEL: self.cluster})
        return self.api.inspect_network(created["Id"])  # type: ignore[no-any-return]  # docker's own types

    def remove_network(self) -> None:
        """Remove the network, after the checks in it that a killed command left behind."""
        for check in self.api.containers(all=True, filters={"label": f"{CHECK_LABEL}={self.cluster}"}):
            self.api.remove_container(check["Id"], force=True, v=True)
        for network in self.api.networks(filters={"label": f"{LABEL}={self.cluster}"}):
            self.api.remove_network(network["Id"])


DATA = "..data"


def read_published_files(directory: Path) -> dict[str, bytes]:
    """Return the files that a reader of the directory sees now."""
    data = directory / DATA
    return {path.name: path.read_bytes() for path in data.iterdir()} if data.is_symlink() else {}


def publish_files(directory: Path, files: Mapping[str, bytes], *, mode: int) -> bool:
    """Let the directory show exactly these files; return whether anything changed."""
    directory.mkdir(parents=True, exist_ok=True)
    if (directory / DATA).is_symlink() and read_published_files(directory) == dict(files):
        return False
    fresh = directory / f"..{uuid.uuid4().hex}"
    fresh.mkdir(mode=0o755)
    for name, content in files.items():
        write_whole(fresh / name, content, mode)  # a key is at no moment readable by other users
    old = directory / DATA
    previous = directory / old.readlink() if old.is_symlink() else None
    replace_link(old, fresh.name)
    for name in files:
        if not (directory / name).is_symlink():
            replace_link(directory / name, f"{DATA}/{name}")
    for link in directory.iterdir():
        if link.is_symlink() and link.name != DATA and link.name not in files:
            link.unlink()
    if previous is not None:
        shutil.rmtree(previous, ignore_errors=True)
    return True


def replace_link(link: Path, target: str) -> None:
    """Create a symbolic link, moved into place by rename."""
    temporary = link.with_name(f"..{uuid.uuid4().hex}")
    temporary.symlink_to(target)
    temporary.replace(link)


def write_private(path: Path, content: bytes) -> None:
    """Write a file atomically that only its owner can ever read."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, content, 0o600)
