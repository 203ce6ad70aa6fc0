"""Kubernetes' side: Nodes, and the pods of one cluster's workers."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from fleet.errors import FleetError
from fleet.world import fields, guests
from fleet.world.fields import Object
from fleet.world.guests import Amounts, Guest
from fleet.world.machine import Machine
from fleet.world.worker_pool import CANONICAL, MADE_OF, POOL, WorkerPool

# A pod that nothing runs on and that gets nothing: of all others each pool's PodDisruptionBudget allows no eviction.
FREE = "minivm.io/free"
LOST = "lost"  # its value where that is because Slurm does not know it
# Its init restarts slurmd once for each new value (init/helpers/asked.py). The fleet's say when it has asked.
RESTART = "minivm.io/restart-slurmd"
# A cordon of a fleet's; its value says whose. A machine cannot set a label of this kind: the API server keeps kubelets
# from it (NodeRestriction).
CORDONED = "minivm.node-restriction.kubernetes.io/cordoned"
ANYBODYS = "true"  # a mark from before marks said whose they are
# What Kubernetes knows for a machine that is given up; and our label, of the same kind, which says that it was we.
TAINT = "node.kubernetes.io/out-of-service"
FENCED = "minivm.node-restriction.kubernetes.io/fenced"
# A StatefulSet labels each pod with the revision of its template.
REVISION = "controller-revision-hash"
LABEL = "app.kubernetes.io"
WORKER = "worker"
# Phases of a pod that runs no more; and so much of why is kept.
ENDED, MOST = ("Failed", "Succeeded"), 200
LONGEST = 63  # of a label's value


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
    ours: bool = False  # labelled so by this fleet: the cordon follows Slurm, and goes with it
    fenced: bool = False  # labelled so by the fleet: given up
    taints: tuple[Taint, ...] = ()
    address: str = ""
    port: int = 10250  # its kubelet's
    provider: str = ""  # its provider's name for it
    boot: str = ""  # changes with each start of it
    conditions: Mapping[str, Condition] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    room: Amounts = field(default_factory=dict)  # for all its pods together; empty: not known


@dataclass(frozen=True, slots=True)
class Pod:
    name: str
    uid: str
    version: str = ""
    node: str = ""  # "" until it is scheduled
    address: str = ""
    component: str = ""  # of the cluster: worker, controller, login
    pool: str = ""
    owner: str = ""  # the uid of who makes it
    template: str = ""  # of which its WorkerPool made it; "": it did not
    revision: str = ""  # of the StatefulSet's template that it was made of; "": no StatefulSet made it
    created: float = 0.0
    ready: bool = False
    deleting: bool = False
    ended: str = ""  # how, where nothing of it runs any more
    free: bool = False  # labelled so by the fleet: it may be evicted
    lost: bool = False  # and that is because Slurm did not know it
    requests: Amounts = field(default_factory=dict)  # empty: not known
    conditions: Mapping[str, Condition] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StatefulSet:
    replicas: int
    revision: str = ""  # of its present template; "": not known


@dataclass(frozen=True, slots=True)
class Kubernetes:
    nodes: Mapping[str, Node] = field(default_factory=dict)
    pods: Mapping[str, Pod] = field(default_factory=dict)  # workers
    others: Mapping[str, Pod] = field(default_factory=dict)  # the controller's, those of logins
    # The release's StatefulSets of workers; None: not known.
    sets: Mapping[str, StatefulSet] | None = None
    # Kept of hardware; None: not asked for, or not known just now (`blind`).
    machines: Mapping[str, Machine] | None = None
    blind: bool = False
    # Of workers, as the fleet makes them; None: not asked for, or not known just now (`unsure`).
    pools: Mapping[str, WorkerPool] | None = None
    unsure: bool = False
    # The names of their pods, with the Node of each, by pool.
    wanted: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    # Objects that are there and could not be read, by kind and name: nothing is concluded from their absence.
    unread: Mapping[str, str] = field(default_factory=dict)
    # On which Nodes those pods of them are of which that is known; "": on none yet. A pod may write its own status, and
    # whatever it writes there keeps nothing from another machine.
    hidden: Mapping[str, str] = field(default_factory=dict)
    whose: str = ""  # the mark of this fleet
    # Of the namespaces to whose pods machines are lent; None: of none of them it is known just now.
    guests: tuple[Guest, ...] | None = ()
    # Those of these namespaces of which alone it is not known who asks.
    silent: frozenset[str] = frozenset()

    def sees(self, node: str) -> bool:
        """Whether all pods of the release that are on this Node can be read."""
        pods = (self.hidden.get(key) for key in self.unread if key.startswith("Pod/"))
        return all(where is not None and where != node for where in pods)

    def made(self, name: str) -> bool | None:
        """Whether a worker of that name is made, now or again; None: nobody says, or it is none of the release's."""
        if self.sets is None:
            return None
        if any(name in names for names in self.wanted.values()) or any(
            pool.may_have(name) for pool in (self.pools or {}).values()
        ):
            return True
        set_, _, number = name.rpartition("-")
        if set_ in self.sets:
            return int(number) < self.sets[set_].replicas if CANONICAL.fullmatch(number) else None
        return False if self._of_a_pool(name) else None

    def _of_a_pool(self, name: str) -> bool:
        """Of one that a Node's pod had, it is known only where all Nodes are."""
        for pool in (self.pools or {}).values():
            rest = name.removeprefix(f"{pool.name}-")
            if rest != name and (pool.selector is not None or CANONICAL.fullmatch(rest)):
                return not any(key.startswith("Node/") for key in self.unread)
        return False

    def elastic(self, name: str) -> bool:
        """Whether it is a name of an elastic pool's; also beyond what it may have now."""
        return any(pool.numbered(name) >= 0 for pool in (self.pools or {}).values())


def together(
    nodes: Mapping[str, Node],
    pods: Mapping[str, Pod],
    sets: Mapping[str, StatefulSet] | None,
    unread: Mapping[str, str],
    machines: Mapping[str, Machine] | None = None,
    *,
    blind: bool = False,
    pools: Mapping[str, WorkerPool] | None = None,
    unsure: bool = False,
    whose: str = "",
) -> Kubernetes:
    workers = {name: pod for name, pod in pods.items() if pod.component == WORKER}
    others = {name: pod for name, pod in pods.items() if pod.component != WORKER}
    labels = {name: node.labels for name, node in nodes.items()} if pools else {}
    wanted = {name: pool.names(labels) for name, pool in (pools or {}).items()}
    found = Kubernetes(nodes, workers, others, sets, machines, blind, pools, unsure, wanted, unread)
    return replace(found, whose=whose)


def name_of(item: Object) -> str:
    metadata = item.get("metadata")
    return str(metadata.get("name", "?")) if isinstance(metadata, dict) else "?"


def placed(item: Object) -> str | None:
    """The Node of a pod of which nothing else can be read. Whoever may write its status cannot write this."""
    spec = item.get("spec")
    where = (spec.get("nodeName") or "") if isinstance(spec, dict) else None
    return where if isinstance(where, str) else None


def mark(namespace: str, release: str) -> str:
    """Whose a cordon is: several clusters of Slurm may share the Nodes, each with a fleet. A label's value is short."""
    whose = f"{namespace}.{release}"
    return whose if len(whose) <= LONGEST else hashlib.sha256(whose.encode()).hexdigest()[:LONGEST]


def node(item: Object, whose: str) -> Node:
    metadata = fields.mapping(item.get("metadata"), "metadata")
    spec = fields.mapping(item.get("spec"), "spec")
    status = fields.mapping(item.get("status"), "status")
    labels = fields.texts(metadata.get("labels"), "metadata.labels")
    return Node(
        name=fields.text(metadata.get("name"), "metadata.name", needed=True),
        uid=fields.text(metadata.get("uid"), "metadata.uid", needed=True),
        version=fields.text(metadata.get("resourceVersion"), "metadata.resourceVersion"),
        cordoned=fields.flag(spec.get("unschedulable"), "spec.unschedulable"),
        ours=labels.get(CORDONED) in (whose, ANYBODYS),
        fenced=labels.get(FENCED) == "true",
        taints=tuple(taint(one) for one in fields.items(spec.get("taints"), "spec.taints")),
        address=_internal(status.get("addresses")),
        port=_kubelet(status.get("daemonEndpoints")),
        provider=fields.text(spec.get("providerID"), "spec.providerID"),
        boot=fields.text(fields.mapping(status.get("nodeInfo"), "status.nodeInfo").get("bootID"), "bootID"),
        conditions=conditions(status.get("conditions")),
        annotations=fields.texts(metadata.get("annotations"), "metadata.annotations"),
        # The same few on ten thousand Nodes.
        labels={sys.intern(key): sys.intern(value) for key, value in labels.items()},
        room=_amounts(guests.amounts, status.get("allocatable")),
    )


def pod(item: Object) -> Pod:
    metadata = fields.mapping(item.get("metadata"), "metadata")
    spec = fields.mapping(item.get("spec"), "spec")
    status = fields.mapping(item.get("status"), "status")
    found = conditions(status.get("conditions"))
    labels = fields.texts(metadata.get("labels"), "metadata.labels")
    return Pod(
        name=fields.text(metadata.get("name"), "metadata.name", needed=True),
        uid=fields.text(metadata.get("uid"), "metadata.uid", needed=True),
        version=fields.text(metadata.get("resourceVersion"), "metadata.resourceVersion"),
        node=fields.text(spec.get("nodeName"), "spec.nodeName"),
        address=fields.text(status.get("podIP"), "status.podIP"),
        component=labels.get(f"{LABEL}/component", ""),
        pool=labels.get(POOL, ""),
        owner=_owner(metadata.get("ownerReferences")),
        template=_made_of(spec),
        revision=sys.intern(labels.get(REVISION, "")),
        created=fields.moment(metadata.get("creationTimestamp"), "metadata.creationTimestamp"),
        ready="Ready" in found and found["Ready"].status == "True",
        deleting=metadata.get("deletionTimestamp") is not None,
        ended=_ended(status),
        free=labels.get(FREE) in ("true", LOST),
        lost=labels.get(FREE) == LOST,
        requests=_amounts(guests.requests, spec),
        conditions=found,
        annotations=fields.texts(metadata.get("annotations"), "metadata.annotations"),
    )


def _amounts(read: Callable[[Any], dict[str, int]], said: object) -> Amounts:
    """What nobody but a lender asks for: an object that else can be read is not unread for it."""
    try:
        return {sys.intern(key): much for key, much in read(said).items()}
    except FleetError:
        return {}


def _made_of(spec: Object) -> str:
    for item in fields.items(spec.get("containers"), "spec.containers"):
        one = fields.mapping(item, "spec.containers")
        for said in fields.items(one.get("env"), "spec.containers.env"):
            variable = fields.mapping(said, "spec.containers.env")
            if variable.get("name") == MADE_OF:
                return sys.intern(fields.text(variable.get("value"), MADE_OF))
    return ""


def _ended(status: Object) -> str:
    said = [fields.text(status.get(key), f"status.{key}") for key in ("phase", "reason", "message")]
    return ": ".join(filter(None, said))[:MOST] if said[0] in ENDED else ""


def _owner(value: object) -> str:
    for item in fields.items(value, "metadata.ownerReferences"):
        one = fields.mapping(item, "metadata.ownerReferences")
        if fields.flag(one.get("controller"), "metadata.ownerReferences.controller"):
            return fields.text(one.get("uid"), "metadata.ownerReferences.uid", needed=True)
    return ""


def _internal(value: object) -> str:
    for item in fields.items(value, "status.addresses"):
        one = fields.mapping(item, "status.addresses")
        if one.get("type") == "InternalIP":
            return fields.text(one.get("address"), "status.addresses.address")
    return ""


def _kubelet(value: object) -> int:
    found = fields.mapping(value, "status.daemonEndpoints").get("kubeletEndpoint")
    return fields.number(fields.mapping(found, "status.daemonEndpoints").get("Port"), "kubeletEndpoint.Port") or 10250


def stateful_set(item: Object) -> StatefulSet:
    """Parse a StatefulSet as the API server lists it."""
    spec = fields.mapping(item.get("spec"), "spec")
    if not isinstance(spec.get("replicas"), int):
        raise FleetError("read spec.replicas", "it is not there")
    status = fields.mapping(item.get("status"), "status")
    return StatefulSet(
        fields.number(spec.get("replicas"), "spec.replicas"),
        fields.text(status.get("updateRevision"), "status.updateRevision"),
    )


def taint(item: object) -> Taint:
    one = fields.mapping(item, "spec.taints")
    return Taint(
        fields.text(one.get("key"), "spec.taints.key", needed=True),
        fields.text(one.get("value"), "spec.taints.value"),
        fields.text(one.get("effect"), "spec.taints.effect"),
    )


def conditions(value: object) -> Mapping[str, Condition]:
    found = {}
    for item in fields.items(value, "status.conditions"):
        one = fields.mapping(item, "status.conditions")
        type_ = fields.text(one.get("type"), "status.conditions.type", needed=True)
        found[type_] = Condition(
            type_,
            fields.text(one.get("status"), "status.conditions.status", needed=True),
            fields.text(one.get("reason"), "status.conditions.reason"),
            fields.text(one.get("message"), "status.conditions.message"),
            fields.moment(one.get("lastTransitionTime"), "status.conditions.lastTransitionTime"),
        )
    return found
