"""Kubernetes' side: Nodes, and the pods of one cluster's workers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from fleet.errors import FleetError
from fleet.world import reading
from fleet.world.reading import Object

# A pod that nothing runs on and that gets nothing: of all others each pool's PodDisruptionBudget allows no eviction.
FREE = "minivm.io/free"


@dataclass(frozen=True, slots=True)
class Condition:
    type: str
    status: str  # "True", "False", "Unknown"
    reason: str = ""
    message: str = ""
    since: float = 0.0


@dataclass(frozen=True, slots=True)
class Taint:
    key: str
    value: str = ""
    effect: str = ""


@dataclass(frozen=True, slots=True)
class Node:
    name: str
    uid: str
    version: str = ""  # resourceVersion: what was seen, for a change that is meant for this and no later state
    cordoned: bool = False
    taints: tuple[Taint, ...] = ()
    conditions: Mapping[str, Condition] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Pod:
    name: str
    uid: str
    version: str = ""
    node: str = ""  # "" until it is scheduled
    pool: str = ""
    ready: bool = False
    deleting: bool = False
    free: bool = False  # labelled so by the fleet: it may be evicted
    conditions: Mapping[str, Condition] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Kubernetes:
    nodes: Mapping[str, Node] = field(default_factory=dict)
    pods: Mapping[str, Pod] = field(default_factory=dict)
    # Objects that are there and could not be read, by kind and name: nothing is concluded from their absence.
    unread: Mapping[str, str] = field(default_factory=dict)


def kubernetes(nodes: Iterable[Object], pods: Iterable[Object]) -> Kubernetes:
    unread: dict[str, str] = {}
    found_nodes: dict[str, Node] = {}
    found_pods: dict[str, Pod] = {}
    for item in nodes:
        try:
            one = node(item)
            found_nodes[one.name] = one
        except FleetError as error:
            unread[f"Node/{name_of(item)}"] = str(error)
    for item in pods:
        try:
            pod_ = pod(item)
            found_pods[pod_.name] = pod_
        except FleetError as error:
            unread[f"Pod/{name_of(item)}"] = str(error)
    return Kubernetes(found_nodes, found_pods, unread)


def name_of(item: Object) -> str:
    metadata = item.get("metadata")
    return str(metadata.get("name", "?")) if isinstance(metadata, dict) else "?"


def node(item: Object) -> Node:
    metadata = reading.mapping(item.get("metadata"), "metadata")
    spec = reading.mapping(item.get("spec"), "spec")
    status = reading.mapping(item.get("status"), "status")
    return Node(
        name=reading.text(metadata.get("name"), "metadata.name", needed=True),
        uid=reading.text(metadata.get("uid"), "metadata.uid", needed=True),
        version=reading.text(metadata.get("resourceVersion"), "metadata.resourceVersion"),
        cordoned=reading.flag(spec.get("unschedulable"), "spec.unschedulable"),
        taints=tuple(taint(one) for one in reading.items(spec.get("taints"), "spec.taints")),
        conditions=conditions(status.get("conditions")),
        annotations=reading.texts(metadata.get("annotations"), "metadata.annotations"),
    )


def pod(item: Object) -> Pod:
    metadata = reading.mapping(item.get("metadata"), "metadata")
    spec = reading.mapping(item.get("spec"), "spec")
    status = reading.mapping(item.get("status"), "status")
    found = conditions(status.get("conditions"))
    labels = reading.texts(metadata.get("labels"), "metadata.labels")
    return Pod(
        name=reading.text(metadata.get("name"), "metadata.name", needed=True),
        uid=reading.text(metadata.get("uid"), "metadata.uid", needed=True),
        version=reading.text(metadata.get("resourceVersion"), "metadata.resourceVersion"),
        node=reading.text(spec.get("nodeName"), "spec.nodeName"),
        pool=labels.get("minivm.io/pool", ""),
        ready="Ready" in found and found["Ready"].status == "True",
        deleting=metadata.get("deletionTimestamp") is not None,
        free=labels.get(FREE) == "true",
        conditions=found,
        annotations=reading.texts(metadata.get("annotations"), "metadata.annotations"),
    )


def taint(item: object) -> Taint:
    one = reading.mapping(item, "spec.taints")
    return Taint(
        reading.text(one.get("key"), "spec.taints.key", needed=True),
        reading.text(one.get("value"), "spec.taints.value"),
        reading.text(one.get("effect"), "spec.taints.effect"),
    )


def conditions(value: object) -> Mapping[str, Condition]:
    found = {}
    for item in reading.items(value, "status.conditions"):
        one = reading.mapping(item, "status.conditions")
        type_ = reading.text(one.get("type"), "status.conditions.type", needed=True)
        found[type_] = Condition(
            type_,
            reading.text(one.get("status"), "status.conditions.status", needed=True),
            reading.text(one.get("reason"), "status.conditions.reason"),
            reading.text(one.get("message"), "status.conditions.message"),
            reading.moment(one.get("lastTransitionTime"), "status.conditions.lastTransitionTime"),
        )
    return found
