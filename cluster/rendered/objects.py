"""What a machine needs to know of Kubernetes' objects to run them, and what follows from it. Pure."""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

CLUSTER_DOMAIN = "svc.cluster.local"


class Source(enum.Enum):
    """Where a volume's content comes from."""

    CONFIG = "configMap"
    SECRET = "secret"
    CLAIM = "persistentVolumeClaim"
    EMPTY = "emptyDir"
    HOST = "hostPath"


@dataclass(frozen=True, slots=True)
class Volume:
    name: str
    source: Source
    of: str = ""
    mode: int = 0o644
    memory: bool = False
    size: int = 0


@dataclass(frozen=True, slots=True)
class Mount:
    volume: Volume
    path: str
    sub_path: str = ""
    read_only: bool = False


@dataclass(frozen=True, slots=True)
class Probe:
    path: str
    port: int


@dataclass(frozen=True, slots=True)
class Limits:
    cpus: float = 0.0
    memory: int = 0
    devices: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Pod:
    """What a kubelet would be told to run."""

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
    mounts: tuple[Mount, ...]
    capabilities: tuple[str, ...]
    privileged: bool
    seccomp: str
    runtime_class: str
    host_network: bool
    grace: int
    pre_stop: tuple[str, ...]
    ready: Probe
    alive: Probe
    ports: Mapping[str, int]
    limits: Limits


@dataclass(frozen=True, slots=True)
class Service:
    name: str
    headless: bool
    selector: Mapping[str, str]
    # Published on the machine: (port on the machine, name of the pod's port).
    node_port: tuple[int, str] | None = None


@dataclass(frozen=True, slots=True)
class Files:
    """Of a ConfigMap, or of a Secret: nothing prints them."""

    data: Mapping[str, bytes] = field(repr=False)


def resolve_env(pod: Pod, *, address: str, node: str) -> dict[str, str]:
    """The pod's environment at a start, with $(NAME) filled from what stands before it, as Kubernetes does."""
    downward = {
        "metadata.name": pod.name,
        "metadata.namespace": pod.namespace,
        "status.podIP": address,
        "spec.nodeName": node,
    }
    env = {name: downward[path] for name, path in pod.fields}
    for name, value in pod.env:
        env[name] = re.sub(r"\$\(([A-Z0-9_]+)\)", lambda found: env.get(found[1], found[0]), value)
    return env


def shared_memory(pod: Pod, machine: int) -> int:
    """The size of /dev/shm. A kubelet gives a volume without one what it has for pods; here they share one machine.

    0: the engine's 64 MiB, where the chart mounts none.
    """
    found = next((mount.volume for mount in pod.mounts if mount.path == "/dev/shm"), None)
    return 0 if found is None else found.size or (pod.limits.memory or machine) // 2


def selects(service: Service, pod: Pod) -> bool:
    return all(pod.labels.get(key) == value for key, value in service.selector.items())


def stable_services(pods: Iterable[Pod], services: Iterable[Service]) -> dict[str, Service]:
    """Pod name -> the Service whose address it keeps: one with an address of its own, and no other pod behind it."""
    found: dict[str, Service] = {}
    for service in services:
        behind = [pod.name for pod in pods if selects(service, pod)]
        if not service.headless and not service.node_port and len(behind) == 1:
            found.setdefault(behind[0], service)
    return found


def host_names(host: str, namespace: str) -> list[str]:
    """The forms in which the cluster's DNS knows a name of a namespace."""
    return [host, f"{host}.{namespace}", f"{host}.{namespace}.{CLUSTER_DOMAIN}"]


def aliases(pod: Pod, services: Iterable[Service]) -> list[str]:
    """Every name by which the cluster's DNS would find this pod."""
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
