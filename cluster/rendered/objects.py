"""Facts about Kubernetes' objects that a machine needs to run them, and functions of them. Pure."""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

CLUSTER_DOMAIN = "svc.cluster.local"


class VolumeSource(enum.Enum):
    """Source of a volume's content."""

    CONFIG = "configMap"
    SECRET = "secret"
    CLAIM = "persistentVolumeClaim"
    EMPTY = "emptyDir"
    HOST = "hostPath"


@dataclass(frozen=True, slots=True)
class Volume:
    name: str
    source: VolumeSource
    of: str = ""
    mode: int = 0o644
    memory: bool = False
    size: int = 0


@dataclass(frozen=True, slots=True)
class VolumeMount:
    volume: Volume
    path: str
    sub_path: str = ""
    read_only: bool = False


@dataclass(frozen=True, slots=True)
class HttpProbe:
    path: str
    port: int


@dataclass(frozen=True, slots=True)
class ResourceLimits:
    cpus: float = 0.0
    memory: int = 0
    devices: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class PodSpec:
    """A pod's description, as a kubelet gets it."""

    name: str
    namespace: str
    role: str
    pool: str
    labels: Mapping[str, str]
    subdomain: str
    searches: tuple[str, ...]
    image: str
    env: tuple[tuple[str, str], ...]
    fields: tuple[tuple[str, str], ...]
    mounts: tuple[VolumeMount, ...]
    capabilities: tuple[str, ...]
    privileged: bool
    seccomp: str
    runtime_class: str
    host_network: bool
    grace: int
    pre_stop: tuple[str, ...]
    ready: HttpProbe
    alive: HttpProbe
    ports: Mapping[str, int]
    limits: ResourceLimits


@dataclass(frozen=True, slots=True)
class ServiceSpec:
    name: str
    headless: bool
    # Empty: the active one of several pods takes the address itself.
    selector: Mapping[str, str]
    # Published on the machine: (port of the machine, name of the pod's port).
    node_port: tuple[int, str] | None = None


@dataclass(frozen=True, slots=True)
class MountedFiles:
    """Files of a ConfigMap or of a Secret; the repr omits them."""

    data: Mapping[str, bytes] = field(repr=False)


def resolve_env(pod: PodSpec, *, address: str, node: str) -> dict[str, str]:
    """Return the pod's environment at a start; $(NAME) refers to earlier variables, as on Kubernetes."""
    downward = {
        "metadata.name": pod.name,
        "metadata.namespace": pod.namespace,
        "status.podIP": address,
        "spec.nodeName": node,
    }
    env = {name: downward[path] for name, path in pod.fields}
    for name, value in pod.env:
        env[name] = re.sub(r"\$\(([A-Z0-9_]+)\)", lambda match: env.get(match[1], match[0]), value)
    return env


def shared_memory(pod: PodSpec, machine: int) -> int:
    """Return the size of /dev/shm; 0 for the engine's 64 MiB, if the chart mounts none.

    A kubelet gives a volume without a size what it has for pods; here the pods share one machine.
    """
    volume = next((mount.volume for mount in pod.mounts if mount.path == "/dev/shm"), None)
    return 0 if volume is None else volume.size or (pod.limits.memory or machine) // 2


def selects(service: ServiceSpec, pod: PodSpec) -> bool:
    return bool(service.selector) and all(pod.labels.get(key) == value for key, value in service.selector.items())


def stable_services(pods: Iterable[PodSpec], services: Iterable[ServiceSpec]) -> dict[str, ServiceSpec]:
    """Map pods to the Service whose address they keep: it has an address and no other pod behind it."""
    by_pod: dict[str, ServiceSpec] = {}
    for service in services:
        behind = [pod.name for pod in pods if selects(service, pod)]
        if not service.headless and not service.node_port and len(behind) == 1:
            by_pod.setdefault(behind[0], service)
    return by_pod


def moving_services(services: Iterable[ServiceSpec]) -> list[ServiceSpec]:
    """Return the Services whose address moves between their pods."""
    return [service for service in services if not service.selector and not service.headless]


def host_names(host: str, namespace: str) -> list[str]:
    """Return the forms in which the cluster's DNS knows a name of a namespace."""
    return [host, f"{host}.{namespace}", f"{host}.{namespace}.{CLUSTER_DOMAIN}"]


def aliases(pod: PodSpec, services: Iterable[ServiceSpec]) -> list[str]:
    """Return every name by which the cluster's DNS finds this pod."""
    names: list[str] = []
    for service in services:
        if not selects(service, pod):
            continue
        hosts = [service.name]
        if service.headless and service.name == pod.subdomain:
            hosts.append(f"{pod.name}.{service.name}")
        for host in hosts:
            names += host_names(host, pod.namespace)
    return names
