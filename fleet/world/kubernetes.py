"""Kubernetes' side of a snapshot: Nodes, and the pods, Machines and pools of one release."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from fleet import FleetError
from fleet.world import guests
from fleet.world.fields import Fields, Object
from fleet.world.guests import ENDED, Amounts, Guest
from fleet.world.machine import MachineObject
from fleet.world.worker_pool import CANONICAL, MADE_OF, POOL, WorkerPool

# The label of a pod that nothing runs on and that gets no jobs. Each pool's PodDisruptionBudget refuses the eviction
# of pods without it.
FREE = "minivm.io/free"
LOST = "lost"  # its value when Slurm does not know the pod
# The pod's init restarts slurmd once for each new value (init/helpers/configwatch.py). The fleet writes the time.
RESTART = "minivm.io/restart-slurmd"
# The label of a Node that a fleet cordoned; its value names the fleet. NodeRestriction keeps kubelets from setting
# labels with this prefix.
CORDONED = "minivm.node-restriction.kubernetes.io/cordoned"
LEGACY_MARK = "true"  # the value before marks named the fleet
# Kubernetes' taint for a machine that is given up, and the label by which the fleet knows its own taint.
TAINT = "node.kubernetes.io/out-of-service"
FENCED = "minivm.node-restriction.kubernetes.io/fenced"
# The label of a pod with the revision of its StatefulSet's template.
REVISION = "controller-revision-hash"
LABEL = "app.kubernetes.io"
MOST = 200  # letters that are kept of why a pod ended
LONGEST = 63  # letters of a label's value

CONTROLLER, WORKER = "controller", "worker"


@dataclass(frozen=True, slots=True)
class Component:
    """A role of images/roles/, by its pods' label `app.kubernetes.io/component`.

    tests/unit/test_roles.py compares this table with the chart's and the images'.
    """

    name: str
    # The port of its daemon: an answer there shows that the pod's machine is alive.
    port: int
    # Its pods write conditions on their page `/conditions`.
    has_page: bool
    # A StatefulSet makes its pods: one comes back under its name, and only once the old pod is gone. Other pods have a
    # successor already, and the fleet has no right to delete them.
    returns: bool


COMPONENTS = {
    component.name: component
    for component in (
        Component(CONTROLLER, 6817, has_page=True, returns=True),
        Component("accounting", 6819, has_page=True, returns=True),
        Component("login", 22, has_page=True, returns=True),
        Component(WORKER, 6818, has_page=True, returns=True),
        Component("demo", 389, has_page=False, returns=True),
        Component("fleet", 8650, has_page=False, returns=False),
    )
}
WITH_PAGE = frozenset(name for name, component in COMPONENTS.items() if component.has_page)
RETURNING = frozenset(name for name, component in COMPONENTS.items() if component.returns)


@dataclass(frozen=True, slots=True)
class KubeCondition:
    type: str
    status: str  # "True", "False", "Unknown"
    reason: str = ""
    message: str = ""
    since: float = 0.0


def is_true(condition: KubeCondition | None) -> bool:
    return condition is not None and condition.status == "True"


@dataclass(frozen=True, slots=True)
class Taint:
    key: str
    value: str = ""
    effect: str = ""


@dataclass(frozen=True, slots=True)
class KubeNode:
    name: str
    uid: str
    version: str = ""  # resourceVersion: the precondition of a change
    cordoned: bool = False
    cordoned_by_fleet: bool = False  # by the label of this fleet: the cordon follows Slurm
    fenced: bool = False  # given up, by the fleet's label
    taints: tuple[Taint, ...] = ()
    address: str = ""
    port: int = 10250  # the kubelet's
    provider: str = ""  # providerID
    boot: str = ""  # boot id
    conditions: Mapping[str, KubeCondition] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    room: Amounts = field(default_factory=dict)  # allocatable; empty: not known

    @property
    def identity(self) -> tuple[str, str, str]:
        """Return name, uid and version: the precondition of a change."""
        return self.name, self.uid, self.version


@dataclass(frozen=True, slots=True)
class KubePod:
    name: str
    uid: str
    version: str = ""
    node: str = ""  # "": not scheduled
    address: str = ""
    http: int = 0  # the port of its pages; 0: none
    component: str = ""  # worker, controller, login
    pool: str = ""
    owner: str = ""  # uid of the controlling object
    template: str = ""  # hash of the WorkerPool template it was made of; "": no WorkerPool made it
    revision: str = ""  # of the StatefulSet template it was made of; "": no StatefulSet made it
    created: float = 0.0
    ready: bool = False
    deleting: bool = False
    ended: str = ""  # phase and reason of a pod whose containers have all ended
    free: bool = False  # labelled FREE: it may be evicted
    lost: bool = False  # labelled FREE because Slurm did not know it
    requests: Amounts = field(default_factory=dict)  # empty: not known
    conditions: Mapping[str, KubeCondition] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)

    @property
    def identity(self) -> tuple[str, str, str]:
        """Return name, uid and version: the precondition of a change."""
        return self.name, self.uid, self.version


@dataclass(frozen=True, slots=True)
class StatefulSet:
    replicas: int
    revision: str = ""  # of the present template; "": not known


@dataclass(frozen=True, slots=True)
class KubernetesView:
    nodes: Mapping[str, KubeNode] = field(default_factory=dict)
    pods: Mapping[str, KubePod] = field(default_factory=dict)  # workers
    others: Mapping[str, KubePod] = field(default_factory=dict)  # controller and logins
    # StatefulSets of workers; None: not known.
    sets: Mapping[str, StatefulSet] | None = None
    # Machines; None: switched off, or not known now (`machines_unknown`).
    machines: Mapping[str, MachineObject] | None = None
    machines_unknown: bool = False
    # WorkerPools; None: switched off, or not known now (`pools_unknown`).
    pools: Mapping[str, WorkerPool] | None = None
    pools_unknown: bool = False
    # Pool -> pod name -> Node.
    desired_pods: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    # Why an object cannot be read, by kind and name. Its absence proves nothing.
    unread: Mapping[str, str] = field(default_factory=dict)
    # The Node of a pod that cannot be read, if at least that is known; "": not scheduled. A pod can make its own status
    # unreadable, and must not hold up other machines by that.
    unread_pods_nodes: Mapping[str, str] = field(default_factory=dict)
    fleet_mark: str = ""  # this fleet in labels and conditions
    # Pods of the namespaces that may borrow machines; None: none of these namespaces is known.
    guests: tuple[Guest, ...] | None = ()
    # The namespaces that are not known.
    unknown_namespaces: frozenset[str] = frozenset()

    def can_read_pods_on(self, node: str) -> bool:
        """Return whether every pod of the release on this Node can be read."""
        places = (self.unread_pods_nodes.get(key) for key in self.unread if key.startswith("Pod/"))
        return all(place is not None and place != node for place in places)

    def will_exist(self, name: str) -> bool | None:
        """Return whether a worker of this name exists or will exist again; None: unknown, or of no set here."""
        if self.sets is None:
            return None
        pools = (self.pools or {}).values()
        if any(name in names for names in self.desired_pods.values()) or any(pool.may_create(name) for pool in pools):
            return True
        set_, _, number = name.rpartition("-")
        if set_ in self.sets:
            return int(number) < self.sets[set_].replicas if CANONICAL.fullmatch(number) else None
        return False if self._belongs_to_a_pool(name) else None

    def _belongs_to_a_pool(self, name: str) -> bool:
        """Return whether a pool made it. For a pool by Nodes, only while every Node can be read."""
        for pool in (self.pools or {}).values():
            rest = name.removeprefix(f"{pool.name}-")
            if rest != name and (pool.selector is not None or CANONICAL.fullmatch(rest)):
                return not any(key.startswith("Node/") for key in self.unread)
        return False

    def is_elastic_name(self, name: str) -> bool:
        """Return whether it is the name of an elastic pool's worker, also one beyond the pool's maximum."""
        return any(pool.number_of(name) >= 0 for pool in (self.pools or {}).values())


def assemble(  # noqa: PLR0913 - one for each kind
    nodes: Mapping[str, KubeNode],
    pods: Mapping[str, KubePod],
    sets: Mapping[str, StatefulSet] | None,
    unread: Mapping[str, str],
    machines: Mapping[str, MachineObject] | None = None,
    *,
    machines_unknown: bool = False,
    pools: Mapping[str, WorkerPool] | None = None,
    pools_unknown: bool = False,
    fleet_mark: str = "",
) -> KubernetesView:
    workers = {name: pod for name, pod in pods.items() if pod.component == WORKER}
    others = {name: pod for name, pod in pods.items() if pod.component != WORKER}
    labels = {name: node.labels for name, node in nodes.items()} if pools else {}
    desired = {name: pool.names(labels) for name, pool in (pools or {}).items()}
    return KubernetesView(
        nodes, workers, others, sets, machines, machines_unknown, pools, pools_unknown, desired, unread,
        fleet_mark=fleet_mark,
    )  # fmt: skip


def name_of(item: Object) -> str:
    metadata = item.get("metadata")
    return str(metadata.get("name", "?")) if isinstance(metadata, dict) else "?"


def node_name_of(item: Object) -> str | None:
    """Read the Node of a pod that is otherwise unreadable. Rights to write a pod's status do not cover its spec."""
    spec = item.get("spec")
    name = (spec.get("nodeName") or "") if isinstance(spec, dict) else None
    return name if isinstance(name, str) else None


def make_fleet_mark(namespace: str, release: str) -> str:
    """Name this fleet in a label's value: several Slurm clusters with a fleet each may share Nodes."""
    mark = f"{namespace}.{release}"
    return mark if len(mark) <= LONGEST else hashlib.sha256(mark.encode()).hexdigest()[:LONGEST]


def parse_node(item: Object, fleet_mark: str) -> KubeNode:
    fields = Fields(item)
    metadata, spec, status = fields.sub("metadata"), fields.sub("spec"), fields.sub("status")
    labels = metadata.texts("labels")
    return KubeNode(
        name=metadata.text("name", needed=True),
        uid=metadata.text("uid", needed=True),
        version=metadata.text("resourceVersion"),
        cordoned=spec.flag("unschedulable"),
        cordoned_by_fleet=labels.get(CORDONED) in (fleet_mark, LEGACY_MARK),
        fenced=labels.get(FENCED) == "true",
        taints=tuple(
            Taint(taint.text("key", needed=True), taint.text("value"), taint.text("effect"))
            for taint in spec.subs("taints")
        ),
        address=_internal_address(status),
        port=status.sub("daemonEndpoints").sub("kubeletEndpoint").number("Port") or 10250,
        provider=spec.text("providerID"),
        boot=status.sub("nodeInfo").text("bootID"),
        conditions=_parse_conditions(status),
        annotations=metadata.texts("annotations"),
        # Ten thousand Nodes share a few labels.
        labels={sys.intern(key): sys.intern(value) for key, value in labels.items()},
        room=_amounts(lambda: guests.amounts(status.sub("allocatable"))),
    )


def parse_pod(item: Object) -> KubePod:
    fields = Fields(item)
    metadata, spec, status = fields.sub("metadata"), fields.sub("spec"), fields.sub("status")
    conditions = _parse_conditions(status)
    labels = metadata.texts("labels")
    return KubePod(
        name=metadata.text("name", needed=True),
        uid=metadata.text("uid", needed=True),
        version=metadata.text("resourceVersion"),
        node=spec.text("nodeName"),
        address=status.text("podIP"),
        http=_http_port(spec),
        component=labels.get(f"{LABEL}/component", ""),
        pool=labels.get(POOL, ""),
        owner=_owner(metadata),
        template=_template_hash(spec),
        revision=sys.intern(labels.get(REVISION, "")),
        created=metadata.moment("creationTimestamp"),
        ready=is_true(conditions.get("Ready")),
        deleting=metadata.data.get("deletionTimestamp") is not None,
        ended=_describe_end(status),
        free=labels.get(FREE) in ("true", LOST),
        lost=labels.get(FREE) == LOST,
        requests=_amounts(lambda: guests.requests(spec)),
        conditions=conditions,
        annotations=metadata.texts("annotations"),
    )


def parse_stateful_set(item: Object) -> StatefulSet:
    fields = Fields(item)
    spec = fields.sub("spec")
    if not isinstance(spec.data.get("replicas"), int):
        spec.fail("replicas", "it is missing")
    return StatefulSet(spec.number("replicas"), fields.sub("status").text("updateRevision"))


def _amounts(read: Callable[[], dict[str, int]]) -> Amounts:
    """Read the fields that only lending needs; an error in them does not make the whole object unreadable."""
    try:
        return {sys.intern(key): quantity for key, quantity in read().items()}
    except FleetError:
        return {}


def _template_hash(spec: Fields) -> str:
    for container in spec.subs("containers"):
        for variable in container.subs("env"):
            if variable.data.get("name") == MADE_OF:
                return sys.intern(variable.text("value"))
    return ""


def _http_port(spec: Fields) -> int:
    ports = (port for container in spec.subs("containers") for port in container.subs("ports"))
    return next((port.number("containerPort") for port in ports if port.data.get("name") == "http"), 0)


def _describe_end(status: Fields) -> str:
    parts = [status.text(key) for key in ("phase", "reason", "message")]
    return ": ".join(filter(None, parts))[:MOST] if parts[0] in ENDED else ""


def _owner(metadata: Fields) -> str:
    owners = (owner for owner in metadata.subs("ownerReferences") if owner.flag("controller"))
    return next((owner.text("uid", needed=True) for owner in owners), "")


def _internal_address(status: Fields) -> str:
    addresses = (address for address in status.subs("addresses") if address.data.get("type") == "InternalIP")
    return next((address.text("address") for address in addresses), "")


def _parse_conditions(status: Fields) -> Mapping[str, KubeCondition]:
    conditions = {}
    for condition in status.subs("conditions"):
        type_ = condition.text("type", needed=True)
        conditions[type_] = KubeCondition(
            type_,
            condition.text("status", needed=True),
            condition.text("reason"),
            condition.text("message"),
            condition.moment("lastTransitionTime"),
        )
    return conditions
