"""A pool of workers as people want it, and what the fleet has noted of it."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from fleet import crd_pools
from fleet.errors import FleetError
from fleet.world import fields
from fleet.world.fields import Object
from fleet.world.jobs import UNKNOWN_OFFER, Offer, gpus
from fleet.world.machine import stamp

# As a worker's image reads them.
FEATURES, CONF = "MINIVM_NODE_FEATURES", "MINIVM_NODE_CONF"
# What every worker has.
OF_ALL = "minivm"
_KEY = re.compile(r"(?:^|\s)(CPUs|RealMemory|Gres)=(\S+)", re.IGNORECASE)
USUAL = {"idleSeconds": 600, "pendingSeconds": 30, "step": 10}


@dataclass(frozen=True, slots=True)
class ElasticSpec:
    least: int
    most: int
    idle_s: float
    pending_s: float
    # So many are on their way at a time.
    step: int
    # Partitions of Slurm whose jobs it serves; none: those of all.
    partitions: frozenset[str] = frozenset()
    # What its nodes have, as far as the template says it.
    says: Offer = UNKNOWN_OFFER


def elastic(said: Object, template: Object, most: int) -> ElasticSpec:
    def count(key: str, least: int = 0, *, bound: int = most) -> int:
        if key not in said and key not in USUAL:
            raise FleetError(f"read spec.elastic.{key}", "it is not there")
        found = fields.number(said.get(key, USUAL.get(key)), f"spec.elastic.{key}")
        if not least <= found <= bound:
            raise FleetError(f"read spec.elastic.{key}", f"wanted {least} to {bound}, not {found}")
        return found

    fewest = count("min")
    names = fields.items(said.get("partitions"), "spec.elastic.partitions")
    return ElasticSpec(
        fewest,
        count("max", max(1, fewest)),
        float(count("idleSeconds", bound=1 << 40)),
        float(count("pendingSeconds", bound=1 << 40)),
        count("step", 1),
        frozenset(fields.text(name, "spec.elastic.partitions", needed=True) for name in names),
        _said(template),
    )


def offered(wants: ElasticSpec, seen: Offer) -> Offer:
    """What its nodes have, as it is said, else as it was seen of one."""
    says = wants.says
    return Offer(
        wants.partitions or seen.partitions,
        says.features | seen.features,
        says.cpus or seen.cpus,
        says.memory or seen.memory,
        says.gpus or seen.gpus,
    )


def _said(template: Object) -> Offer:
    env = _env(template)
    conf = {key.lower(): value for key, value in _KEY.findall(env.get(CONF, ""))}
    # A name that is made of others is not known before the pod is there.
    features = frozenset(name for name in env.get(FEATURES, "").split(",") if name and "$" not in name)
    size = (_number(conf.get("cpus")), _number(conf.get("realmemory")), gpus(conf.get("gres", "")))
    return Offer(frozenset(), features | {OF_ALL}, *size)


def _env(template: Object) -> Mapping[str, str]:
    found = {}
    spec = fields.mapping(template.get("spec"), "spec.template.spec")
    for container in fields.items(spec.get("containers"), "containers"):
        for item in fields.items(fields.mapping(container, "containers").get("env"), "containers.env"):
            one = fields.mapping(item, "containers.env")
            found[str(one.get("name"))] = str(one.get("value") or "")
    return found


def _number(said: str | None) -> int:
    return int(said) if said and said.isdecimal() and len(said) < 10 else 0


POOL = "minivm.io/pool"
# Of which template a pod was made: for people, who select by it.
TEMPLATE = "minivm.io/template"
# The same for the fleet, in the environment of its first container: with a pod's status its labels may be written, too,
# and its spec may not.
MADE_OF = "MINIVM_TEMPLATE"
LONGEST = 63
_NAME = re.compile(crd_pools.NAME)
_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
# As a StatefulSet writes it: w-07 is nobody's.
CANONICAL = re.compile(r"0|[1-9][0-9]{0,8}")


@dataclass(frozen=True, slots=True)
class PoolCondition:
    """A condition of it."""

    type: str
    status: str
    reason: str
    message: str = ""
    since: int = 0


@dataclass(frozen=True, slots=True)
class EndedPod:
    """One of its pods that ran no more: which, for the so manieth time, since when it is known, and why."""

    name: str
    uid: str
    times: int
    since: int
    why: str


@dataclass(frozen=True, slots=True)
class PoolStatus:
    wanted: int = 0
    replicas: int = 0
    ready: int = 0
    updated: int = 0
    away: int = 0
    template: str = ""
    generation: int = 0
    conditions: tuple[PoolCondition, ...] = ()
    ended: tuple[EndedPod, ...] = ()
    # The template that those count as made of which were taken over: as it was when that began.
    adopted: str = ""


@dataclass(frozen=True, slots=True)
class WorkerPool:
    name: str
    uid: str
    version: str
    generation: int
    template: Mapping[str, object]
    hash: str
    # What its pods have as label: the chart's pool, of which this may be a longer name.
    label: str
    # How many; None: one on each Node that the selector matches, or as many as jobs ask for.
    replicas: int | None = None
    selector: Mapping[str, str] | None = None
    elastic: ElasticSpec | None = None
    # So many may be away at a time.
    most: int = 1
    # For so long jobs keep a pod from being replaced; None: as long as they take.
    within_s: float | None = None
    created: float = 0.0
    deleting: bool = False
    status: PoolStatus = PoolStatus()

    def selects(self, labels: Mapping[str, str]) -> bool:
        return self.selector is not None and self.selector.items() <= labels.items()

    def numbered(self, name: str) -> int:
        """The number of one of an elastic pool's; -1: it is none of its."""
        rest = name.removeprefix(f"{self.name}-")
        return int(rest) if self.elastic is not None and rest != name and CANONICAL.fullmatch(rest) else -1

    def may_have(self, name: str) -> bool:
        """Whether one of that name may come when jobs ask for it."""
        return self.elastic is not None and 0 <= self.numbered(name) < self.elastic.most

    def names(self, nodes: Mapping[str, Mapping[str, str]]) -> Mapping[str, str]:
        """Of all its pods, with the Node of each; `nodes`: their labels. "": any Node. Which an elastic pool has is
        decided by what jobs ask for."""
        if self.elastic is not None:
            return {}
        if self.replicas is not None:
            return {f"{self.name}-{number}": "" for number in range(self.replicas)}
        return {named(self.name, node): node for node, labels in nodes.items() if self.selects(labels)}


def named(pool: str, node: str) -> str:
    """A pod's name is its host's and its node's in Slurm: one label of DNS. What a Node's name has besides, or has too
    much of, is told apart by a hash."""
    if _LABEL.fullmatch(node) and len(pool) + 1 + len(node) <= LONGEST:
        return f"{pool}-{node}"
    plain = re.sub(r"[^a-z0-9]+", "-", node.lower())[: LONGEST - len(pool) - 10].strip("-")
    return "-".join(filter(None, (pool, plain, hashlib.sha256(node.encode()).hexdigest()[:8])))


def worker_pool(item: Object) -> WorkerPool:
    metadata = fields.mapping(item.get("metadata"), "metadata")
    spec = fields.mapping(item.get("spec"), "spec")
    name = fields.text(metadata.get("name"), "metadata.name", needed=True)
    if not _NAME.fullmatch(name):
        raise FleetError("read metadata.name", f"{name[:60]!r} is no label of DNS of 40 letters at most")
    template = fields.mapping(spec.get("template"), "spec.template")
    of_pod = fields.mapping(template.get("spec"), "spec.template.spec")
    if not fields.items(of_pod.get("containers"), "containers"):
        raise FleetError("read spec.template.spec.containers", "it names no container")
    for container in fields.items(of_pod.get("containers"), "containers"):
        for variable in fields.items(fields.mapping(container, "containers").get("env"), "containers.env"):
            fields.mapping(variable, "containers.env")
    affinity = fields.mapping(of_pod.get("affinity"), "spec.template.spec.affinity")
    fields.mapping(affinity.get("nodeAffinity"), "spec.template.spec.affinity.nodeAffinity")
    own = fields.mapping(template.get("metadata"), "spec.template.metadata")
    labels = fields.texts(own.get("labels"), "spec.template.metadata.labels")
    fields.texts(own.get("annotations"), "spec.template.metadata.annotations")
    mode = _one_of(spec, "mode", crd_pools.MODES)
    # An autoscaler may have left the other mode's.
    replicas = _count(spec, "replicas", crd_pools.MOST) if mode == crd_pools.FIXED else None
    selector = None
    if mode == crd_pools.PER_NODE:
        selector = fields.texts(spec.get("nodeSelector"), "spec.nodeSelector")
        if not selector:
            raise FleetError("read spec.nodeSelector", "it names no label: every Node would have a pod")
    wants = None
    if mode == crd_pools.ELASTIC:
        wants = elastic(fields.mapping(spec.get("elastic"), "spec.elastic"), template, crd_pools.MOST)
    update = fields.mapping(spec.get("update"), "spec.update")
    return WorkerPool(
        name=name,
        uid=fields.text(metadata.get("uid"), "metadata.uid", needed=True),
        version=fields.text(metadata.get("resourceVersion"), "metadata.resourceVersion"),
        generation=fields.number(metadata.get("generation"), "metadata.generation"),
        template=template,
        hash=hashed(template),
        label=labels.get(POOL) or name,
        replicas=replicas,
        selector=selector,
        elastic=wants,
        most=_count(update, "maxUnavailable", crd_pools.MOST) if "maxUnavailable" in update else 1,
        within_s=_within(update),
        created=fields.moment(metadata.get("creationTimestamp"), "metadata.creationTimestamp"),
        deleting=metadata.get("deletionTimestamp") is not None,
        status=_status(fields.mapping(item.get("status"), "status")),
    )


def hashed(template: Object) -> str:
    """The same for the same words in whatever order: API servers fill in nothing here."""
    return hashlib.sha256(_text(template).encode()).hexdigest()[:10]


def copied(template: Object) -> dict[str, Any]:
    return cast(dict[str, Any], json.loads(_text(template)))


def _text(template: Object) -> str:
    try:
        return json.dumps(template, sort_keys=True, separators=(",", ":"))
    except RecursionError:
        raise FleetError("read spec.template", "it is nested too deeply") from None


def _within(update: Object) -> float | None:
    when = _one_of(update, "when", crd_pools.WHEN) if "when" in update else crd_pools.IDLE
    if when == crd_pools.DEADLINE:
        if seconds := _count(update, "deadlineSeconds", 1 << 40):
            return float(seconds)
        raise FleetError("read spec.update.deadlineSeconds", "it is not there, or 0: `when: now` says that")
    if "deadlineSeconds" in update:
        raise FleetError("read spec.update.deadlineSeconds", f"it is there, and spec.update.when is {when}")
    return 0.0 if when == crd_pools.NOW else None


def _one_of(spec: Object, key: str, known: tuple[str, ...]) -> str:
    said = fields.text(spec.get(key), f"spec.{key}", needed=True)
    if said not in known:
        raise FleetError(f"read spec.{key}", f"{said[:40]!r} is not one of {', '.join(known)}")
    return said


def _count(spec: Object, key: str, most: int) -> int:
    if key not in spec:
        raise FleetError(f"read spec.{key}", "it is not there")
    said = fields.number(spec.get(key), f"spec.{key}")
    if not 0 <= said <= most:
        raise FleetError(f"read spec.{key}", f"wanted 0 to {most}, not {said}")
    return said


def _status(said: Object) -> PoolStatus:
    def count(key: str) -> int:
        return fields.number(said.get(key), f"status.{key}")

    return PoolStatus(
        wanted=count("wanted"),
        replicas=count("replicas"),
        ready=count("ready"),
        updated=count("updated"),
        away=count("away"),
        template=fields.text(said.get("template"), "status.template"),
        generation=count("generation"),
        conditions=tuple(_stand(one) for one in fields.items(said.get("conditions"), "status.conditions")),
        ended=tuple(_ended(one) for one in fields.items(said.get("ended"), "status.ended")),
        adopted=fields.text(said.get("adopted"), "status.adopted"),
    )


def _ended(item: object) -> EndedPod:
    one = fields.mapping(item, "status.ended")
    found = {key: fields.text(one.get(key), f"status.ended.{key}") for key in ("name", "uid", "why")}
    times = fields.number(one.get("times"), "status.ended.times")
    return EndedPod(**found, times=times, since=int(fields.moment(one.get("since"), "status.ended.since")))


def _stand(item: object) -> PoolCondition:
    one = fields.mapping(item, "status.conditions")
    found = {key: fields.text(one.get(key), f"status.conditions.{key}") for key in ("type", "status", "reason")}
    since = fields.moment(one.get("lastTransitionTime"), "status.conditions.lastTransitionTime")
    return PoolCondition(
        **found, message=fields.text(one.get("message"), "status.conditions.message"), since=int(since)
    )


def written(status: PoolStatus) -> dict[str, object]:
    """As the API server keeps it."""
    return {
        "wanted": status.wanted,
        "replicas": status.replicas,
        "ready": status.ready,
        "updated": status.updated,
        "away": status.away,
        "template": status.template,
        "generation": status.generation,
        "conditions": [
            {
                "type": one.type,
                "status": one.status,
                "reason": one.reason,
                **({"message": one.message} if one.message else {}),
                "lastTransitionTime": stamp(one.since),
            }
            for one in status.conditions
        ],
        "ended": [
            {"name": one.name, "uid": one.uid, "times": one.times, "since": stamp(one.since), "why": one.why}
            for one in status.ended
        ],
        # An empty text that is applied comes as null to the schema.
        **({"adopted": status.adopted} if status.adopted else {}),
    }
