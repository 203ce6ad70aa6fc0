"""Parse the chart's rendered objects into the pods, Services and files that a cluster on one machine runs.

`build.py up` renders the chart (`render.py`), parses the objects here (`parse`), and starts one container for each
`PodSpec` (`pods.py`). The parser understands what the chart writes and refuses the rest: silently dropping an object or
a volume would make the local cluster differ from the one on Kubernetes.
"""

from __future__ import annotations

import base64
import enum
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from cluster import ClusterError

CLUSTER_DOMAIN = "svc.cluster.local"
# Kinds of objects that have no effect on one machine.
WITHOUT_EFFECT = frozenset(
    {
        "NetworkPolicy",
        "PersistentVolume",
        "PodDisruptionBudget",
        "PodMonitor",
        "PrometheusRule",
        "PriorityClass",
        "Role",
        "RoleBinding",
        "ServiceAccount",
        "ValidatingAdmissionPolicy",
        "ValidatingAdmissionPolicyBinding",
    }
)
# The seccomp profile of pods whose jobs may run containers; its text is in the chart.
CONTAINERS = "minivm-containers.json"
POD_NAME_LABEL = "statefulset.kubernetes.io/pod-name"


# A pod as its chart describes it.


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
    of: str = ""  # name of the ConfigMap, Secret or claim, or the path on the machine
    mode: int = 0o644  # of the files of a ConfigMap or Secret
    memory: bool = False  # an empty directory in memory
    size: int = 0  # limit of an empty directory in bytes; 0: none
    optional: bool = False  # the pod starts without the Secret, and finds no files


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
    cpus: float = 0.0  # 0: no limit
    memory: int = 0  # bytes; 0: no limit
    devices: tuple[tuple[str, int], ...] = ()  # Kubernetes' name of a kind of device, and their number


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
    fields: tuple[tuple[str, str], ...]  # variables known only at the start: name, field such as status.podIP
    mounts: tuple[VolumeMount, ...]
    capabilities: tuple[str, ...]
    privileged: bool
    seccomp: str
    runtime_class: str
    host_network: bool
    grace: int  # seconds between the request to end and the kill
    pre_stop: tuple[str, ...]
    ready: HttpProbe
    alive: HttpProbe
    ports: Mapping[str, int]  # name -> number
    limits: ResourceLimits


@dataclass(frozen=True, slots=True)
class ServiceSpec:
    name: str
    headless: bool
    # Empty: the active one of several pods takes the address itself.
    selector: Mapping[str, str]
    # Port of the machine, and name of the pod's port; None: the Service is not published on the machine.
    node_port: tuple[int, str] | None = None


@dataclass(frozen=True, slots=True)
class MountedFiles:
    """Files of a ConfigMap or of a Secret; the repr omits them."""

    data: Mapping[str, bytes] = field(repr=False)


# What Kubernetes derives from the pods and Services.


def resolve_env(pod: PodSpec, *, address: str) -> dict[str, str]:
    """Return the pod's environment at a start; $(NAME) refers to earlier variables, as on Kubernetes."""
    downward = {
        "metadata.name": pod.name,
        "metadata.namespace": pod.namespace,
        "status.podIP": address,
        "spec.nodeName": "this-machine",
    }
    env = {name: downward[path] for name, path in pod.fields}
    for name, value in pod.env:
        env[name] = re.sub(r"\$\(([A-Z0-9_]+)\)", lambda match: env.get(match[1], match[0]), value)
    return env


def size_shared_memory(pod: PodSpec, machine: int) -> int:
    """Return the size of /dev/shm; 0 for the engine's 64 MiB, if the chart mounts none.

    A kubelet gives a volume without a size what it has for pods; here the pods share one machine.
    """
    volume = next((mount.volume for mount in pod.mounts if mount.path == "/dev/shm"), None)
    if volume is None:
        return 0
    return volume.size or (pod.limits.memory or machine) // 2


def selects(service: ServiceSpec, pod: PodSpec) -> bool:
    return bool(service.selector) and all(pod.labels.get(key) == value for key, value in service.selector.items())


def map_stable_services(pods: Iterable[PodSpec], services: Iterable[ServiceSpec]) -> dict[str, ServiceSpec]:
    """Map pods to the Service whose address they keep: a Service with an address and only this pod behind it."""
    by_pod: dict[str, ServiceSpec] = {}
    for service in services:
        selected = [pod.name for pod in pods if selects(service, pod)]
        if not service.headless and not service.node_port and len(selected) == 1:
            by_pod.setdefault(selected[0], service)
    return by_pod


def list_moving_services(services: Iterable[ServiceSpec]) -> list[ServiceSpec]:
    """Return the Services with an address that moves between their pods."""
    return [service for service in services if not service.selector and not service.headless]


def host_names(host: str, namespace: str) -> list[str]:
    """Return the names by which the cluster's DNS resolves a host of a namespace."""
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


# The objects of a cluster.


@dataclass(frozen=True, slots=True)
class Manifests:
    pods: tuple[PodSpec, ...]
    services: tuple[ServiceSpec, ...]
    files: Mapping[tuple[VolumeSource, str], MountedFiles]

    def pod(self, name: str) -> PodSpec:
        for pod in self.pods:
            if pod.name == name:
                return pod
        names = ", ".join(pod.name for pod in self.pods)
        raise ClusterError(f"find the pod {name}", "the chart has no such pod", hint=f"known: {names}")

    def starting_from(self, images: Mapping[str, str]) -> Manifests:
        """Return the pods with other image names where `images` has one."""
        pods = tuple(replace(pod, image=images.get(pod.image, pod.image)) for pod in self.pods)
        return replace(self, pods=pods)


def parse(documents: Iterable[Mapping[str, Any]], *, namespace: str) -> Manifests:
    pods: list[PodSpec] = []
    services: list[ServiceSpec] = []
    files: dict[tuple[VolumeSource, str], MountedFiles] = {}
    for document in documents:
        kind, name = str(document["kind"]), str(document["metadata"]["name"])
        match kind:
            case "StatefulSet":
                pods += parse_stateful_set(document, namespace=namespace)
            case "Service":
                services.append(parse_service(document))
            case "ConfigMap":
                text = {key: str(value).encode() for key, value in (document.get("data") or {}).items()}
                files[VolumeSource.CONFIG, name] = MountedFiles(text)
            case "Secret":
                decoded = {key: base64.b64decode(value) for key, value in (document.get("data") or {}).items()}
                files[VolumeSource.SECRET, name] = MountedFiles(decoded)
            case "PersistentVolumeClaim":
                pass  # a claim exists here when a pod names it
            case _ if kind not in WITHOUT_EFFECT:
                raise ClusterError(f"run the {kind} {name} on one machine", "this kind of object is not supported here")
    return Manifests(tuple(pods), tuple(services), files)


def parse_stateful_set(document: Mapping[str, Any], *, namespace: str) -> list[PodSpec]:
    name, spec = str(document["metadata"]["name"]), document["spec"]
    claims = [str(claim["metadata"]["name"]) for claim in spec.get("volumeClaimTemplates", [])]
    template = spec["template"]
    return [
        parse_pod(
            template["spec"],
            name=f"{name}-{ordinal}",
            namespace=namespace,
            labels=template["metadata"]["labels"] | {POD_NAME_LABEL: f"{name}-{ordinal}"},
            subdomain=str(spec["serviceName"]),
            claims=claims,
        )
        for ordinal in range(int(spec["replicas"]))
    ]


def parse_pod(
    spec: Mapping[str, Any], *, name: str, namespace: str, labels: Mapping[str, str], subdomain: str, claims: list[str]
) -> PodSpec:
    container, *sidecars = spec["containers"]
    refuse_parts(spec, sidecars, pod=name)
    volumes = {str(raw["name"]): parse_volume(raw, pod=name) for raw in spec.get("volumes", [])}
    # A StatefulSet's claim belongs to the pod and outlives it: <claim>-<pod>.
    volumes |= {claim: Volume(claim, VolumeSource.CLAIM, of=f"{claim}-{name}") for claim in claims}
    ports = {str(port["name"]): int(port["containerPort"]) for port in container.get("ports", [])}
    security = container.get("securityContext", {})
    plain, fields = parse_env(container.get("env", []), labels=labels, pod=name)
    return PodSpec(
        name=name,
        namespace=namespace,
        role=str(labels["app.kubernetes.io/component"]),
        pool=str(labels.get("minivm.io/pool", "")),
        labels=labels,
        subdomain=subdomain,
        searches=tuple(spec.get("dnsConfig", {}).get("searches", ())),
        image=str(container["image"]),
        env=plain,
        fields=fields,
        mounts=tuple(
            VolumeMount(
                volumes[raw["name"]],
                str(raw["mountPath"]),
                str(raw.get("subPath", "")),
                bool(raw.get("readOnly", False)),
            )
            for raw in container.get("volumeMounts", [])
        ),
        capabilities=tuple(security.get("capabilities", {}).get("add", ())),
        privileged=bool(security.get("privileged", False)),
        seccomp=parse_seccomp(security, pod=name),
        runtime_class=str(spec.get("runtimeClassName", "")),
        host_network=bool(spec.get("hostNetwork", False)),
        grace=int(spec.get("terminationGracePeriodSeconds", 30)),
        pre_stop=tuple(container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", ())),
        ready=parse_probe(container["readinessProbe"], ports),
        alive=parse_probe(container["livenessProbe"], ports),
        ports=ports,
        limits=parse_limits(container.get("resources", {}).get("limits", {})),
    )


def refuse_parts(spec: Mapping[str, Any], sidecars: Sequence[Mapping[str, Any]], *, pod: str) -> None:
    """Refuse parts of a pod that only Kubernetes provides: a local cluster would silently run without them."""
    parts = {"sidecars": sidecars, **{key: spec.get(key) for key in ("initContainers", "resourceClaims")}}
    for kind, refused in parts.items():
        if refused:
            names = ", ".join(str(part["name"]) for part in refused)
            problem = f"{kind} ({names}) need Kubernetes. Leave them out of the values of a cluster on one machine"
            raise ClusterError(f"run {pod} on one machine", problem)


def parse_seccomp(security: Mapping[str, Any], *, pod: str) -> str:
    """Return the profile explicitly: Docker's default is a profile, Kubernetes' is none."""
    profile = security.get("seccompProfile", {})
    if profile.get("type") == "Localhost":
        if profile.get("localhostProfile") == CONTAINERS:
            return CONTAINERS
        raise ClusterError(f"give {pod} its seccomp profile", "a Localhost one lies on Kubernetes' machines")
    return str(profile.get("type", "Unconfined"))


def parse_probe(raw: Mapping[str, Any], ports: Mapping[str, int]) -> HttpProbe:
    return HttpProbe(str(raw["httpGet"]["path"]), ports[raw["httpGet"]["port"]])


def parse_env(
    raw: Iterable[Mapping[str, Any]], *, labels: Mapping[str, str], pod: str
) -> tuple[tuple[tuple[str, str], ...], tuple[tuple[str, str], ...]]:
    """Return fixed values, and those known only at the start (name -> field path)."""
    plain: list[tuple[str, str]] = []
    fields: list[tuple[str, str]] = []
    for variable in raw:
        name = str(variable["name"])
        if "valueFrom" not in variable:
            plain.append((name, str(variable.get("value", ""))))
            continue
        path = str(variable["valueFrom"]["fieldRef"]["fieldPath"])
        if label := re.fullmatch(r"metadata\.labels\['(.+)'\]", path):
            plain.append((name, labels.get(label[1], "")))
        elif path in {"metadata.name", "metadata.namespace", "status.podIP", "spec.nodeName"}:
            fields.append((name, path))
        else:
            raise ClusterError(f"give {pod} its {name}", f"the field {path} is not supported here")
    return tuple(plain), tuple(fields)


def parse_volume(raw: Mapping[str, Any], *, pod: str) -> Volume:
    name = str(raw["name"])
    (kind,) = set(raw) - {"name"}
    source: Mapping[str, Any] = raw[kind] or {}
    match kind:
        case "configMap":
            return Volume(name, VolumeSource.CONFIG, of=str(source["name"]), mode=int(source.get("defaultMode", 0o644)))
        case "secret":
            mode, optional = int(source.get("defaultMode", 0o644)), bool(source.get("optional", False))
            return Volume(name, VolumeSource.SECRET, of=str(source["secretName"]), mode=mode, optional=optional)
        case "persistentVolumeClaim":
            return Volume(name, VolumeSource.CLAIM, of=str(source["claimName"]))
        case "emptyDir":
            memory = source.get("medium") == "Memory"
            return Volume(name, VolumeSource.EMPTY, memory=memory, size=quantity(source.get("sizeLimit", 0)))
        case "hostPath":
            return Volume(name, VolumeSource.HOST, of=str(source["path"]))
        case "projected" | "downwardAPI":
            # The API server's token, or fields requested by an annotation. There is no API server here, so the pod gets
            # an empty directory, with which it starts.
            return Volume(name, VolumeSource.EMPTY, memory=True)
    raise ClusterError(f"give {pod} its volume {name}", f"a volume of the kind {kind} is not supported on one machine")


def parse_limits(raw: Mapping[str, Any]) -> ResourceLimits:
    devices = tuple((name, int(count)) for name, count in sorted(raw.items()) if "/" in name)
    return ResourceLimits(cpus=cpus(raw.get("cpu", 0)), memory=quantity(raw.get("memory", 0)), devices=devices)


def quantity(text: str | int) -> int:
    """Convert Kubernetes' 256Gi or 1500M to bytes."""
    match = re.fullmatch(r"([0-9.]+)([KMGTPE]i?|k|m)?", str(text))
    if not match:
        raise ClusterError(f"read the quantity {text!r}", "expected a number and a unit such as Gi")
    number, unit = float(match[1]), match[2] or ""
    if unit == "m":
        return int(number / 1000)
    power = "KMGTPE".find(unit[0].upper()) + 1 if unit else 0
    return int(number * (1024 if unit.endswith("i") else 1000) ** power)


def cpus(text: str | int | float) -> float:
    return float(str(text).removesuffix("m")) / 1000 if str(text).endswith("m") else float(text)


def parse_service(document: Mapping[str, Any]) -> ServiceSpec:
    spec = document["spec"]
    published = next((port for port in spec["ports"] if "nodePort" in port), None)
    return ServiceSpec(
        name=str(document["metadata"]["name"]),
        headless=spec.get("clusterIP") == "None",
        selector=spec.get("selector", {}),
        node_port=(int(published["nodePort"]), str(published["targetPort"])) if published else None,
    )
