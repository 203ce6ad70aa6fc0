"""The WorkerPool object: the pods that people request, and the status that the fleet records."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

from fleet import FleetError, crd
from fleet.world.fields import Fields, Object
from fleet.world.machine import rfc3339
from fleet.world.slurm import UNKNOWN_OFFER, Offer, gpus

POOL = "minivm.io/pool"
# The label of a pod with the hash of its template, for people.
TEMPLATE = "minivm.io/template"
# A variable of the first container with the same hash, which the fleet reads: the right to write a pod's labels or
# status does not cover its spec.
MADE_OF = "MINIVM_TEMPLATE"
LONGEST = 63
MOST_SECONDS = 1 << 40
_NAME = re.compile(crd.POOL_NAME)
_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
# A number as a StatefulSet writes it in a pod's name, without leading zeros.
CANONICAL = re.compile(r"0|[1-9][0-9]{0,8}")
# Variables of a worker's image that describe its node.
FEATURES, CONF = "MINIVM_NODE_FEATURES", "MINIVM_NODE_CONF"
EVERY_WORKER = "minivm"  # the feature that every worker has
_KEY = re.compile(r"(?:^|\s)(CPUs|RealMemory|Gres)=(\S+)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class ElasticSpec:
    """The limits of an elastic pool's size, and the speed at which it grows and shrinks."""

    minimum: int
    maximum: int
    idle_s: float
    pending_s: float
    step: int  # the most pods on their way at a time
    # The Slurm partitions whose jobs it serves; empty: all.
    partitions: frozenset[str] = frozenset()
    # What its nodes have according to the template.
    declared: Offer = UNKNOWN_OFFER


@dataclass(frozen=True, slots=True)
class PoolCondition:
    type: str
    status: str
    reason: str
    message: str = ""
    since: int = 0


@dataclass(frozen=True, slots=True)
class EndedPod:
    """A pod with only ended containers: how often pods of its name ended, since when that is known, and why."""

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
    # The template that adopted pods count as made of: the present one when the adoption began.
    adopted: str = ""
    # The last spec that the fleet could read, as JSON: it holds while the present one is wrong, also after a restart.
    last_good: str = ""


@dataclass(frozen=True, slots=True)
class WorkerPool:
    name: str
    uid: str
    version: str
    generation: int
    template: Mapping[str, object]
    hash: str
    # The pool label of its pods: the chart's name of the pool.
    label: str
    # Exactly one of these three is set, by mode.
    replicas: int | None = None
    selector: Mapping[str, str] | None = None
    elastic: ElasticSpec | None = None
    max_unavailable: int = 1
    # How long jobs may keep a pod from being replaced; None: until they end.
    deadline_s: float | None = None
    created: float = 0.0
    deleting: bool = False
    status: PoolStatus = PoolStatus()
    spec_text: str = ""
    # Why the present spec cannot be read; everything else here is of the last good one then.
    mistake: str = ""

    def selects(self, labels: Mapping[str, str]) -> bool:
        return self.selector is not None and self.selector.items() <= labels.items()

    def is_outdated(self, template: str) -> bool:
        """Return whether a pod was made of another template. `template`: the pod's hash; "": an adopted pod."""
        return (template or self.status.adopted or self.hash) != self.hash

    def number_of(self, name: str) -> int:
        """Return the number in the name of this elastic pool's pod; -1: no name of this pool."""
        rest = name.removeprefix(f"{self.name}-")
        return int(rest) if self.elastic is not None and rest != name and CANONICAL.fullmatch(rest) else -1

    def may_create(self, name: str) -> bool:
        """Return whether this elastic pool may create a pod of that name."""
        return self.elastic is not None and 0 <= self.number_of(name) < self.elastic.maximum

    def names(self, nodes: Mapping[str, Mapping[str, str]]) -> Mapping[str, str]:
        """Return the names of its pods, with the Node of each; "": any Node. `nodes`: their labels.

        Empty for an elastic pool, where jobs decide.
        """
        if self.elastic is not None:
            return {}
        if self.replicas is not None:
            return {f"{self.name}-{number}": "" for number in range(self.replicas)}
        return {pod_name(self.name, node): node for node, labels in nodes.items() if self.selects(labels)}


def pod_name(pool: str, node: str) -> str:
    """Make one DNS label of pool and Node; a hash keeps long or unusual Node names apart."""
    if _LABEL.fullmatch(node) and len(pool) + 1 + len(node) <= LONGEST:
        return f"{pool}-{node}"
    plain = re.sub(r"[^a-z0-9]+", "-", node.lower())[: LONGEST - len(pool) - 10].strip("-")
    return "-".join(filter(None, (pool, plain, hashlib.sha256(node.encode()).hexdigest()[:8])))


def parse_pool(item: Object) -> WorkerPool:
    """Parse a pool, by its last good spec where an API server accepted a wrong one."""
    try:
        return _parse_pool(item)
    except FleetError as error:
        try:
            status = _parse_status(Fields(item).sub("status"))
            last = _parse_pool({**item, "spec": json.loads(status.last_good)})
        except (FleetError, ValueError, RecursionError):
            raise error from None
        return replace(last, generation=status.generation, mistake=str(error))


def _parse_pool(item: Object) -> WorkerPool:
    fields = Fields(item)
    metadata, spec = fields.sub("metadata"), fields.sub("spec")
    name = metadata.text("name", needed=True)
    if not _NAME.fullmatch(name):
        metadata.fail("name", f"{name[:60]!r} is no DNS label of at most 40 characters")
    template = spec.sub("template")
    labels = _check_template(template)
    mode = _choice(spec, "mode", crd.MODES)
    selector = spec.texts("nodeSelector") if mode == crd.PER_NODE else None
    if selector is not None and not selector:
        spec.fail("nodeSelector", "it names no label: every Node would have a pod")
    update = spec.sub("update")
    return WorkerPool(
        name=name,
        uid=metadata.text("uid", needed=True),
        version=metadata.text("resourceVersion"),
        generation=metadata.number("generation"),
        template=template.data,
        hash=template_hash(template.data),
        label=labels.get(POOL) or name,
        # An autoscaler may leave `replicas` in an object of another mode.
        replicas=_count(spec, "replicas") if mode == crd.FIXED else None,
        selector=selector,
        elastic=_parse_elastic(spec.sub("elastic"), template) if mode == crd.ELASTIC else None,
        max_unavailable=_count(update, "maxUnavailable"),
        deadline_s=_deadline(update),
        created=metadata.moment("creationTimestamp"),
        deleting=metadata.data.get("deletionTimestamp") is not None,
        status=_parse_status(fields.sub("status")),
        spec_text=_json_text(spec.data),
    )


def _check_template(template: Fields) -> Mapping[str, str]:
    """Refuse a template that cannot become a pod; return its labels."""
    pod = template.sub("spec")
    containers = pod.subs("containers")
    if not containers:
        pod.fail("containers", "it names no container")
    for container in containers:
        container.subs("env")
    pod.sub("affinity").sub("nodeAffinity")
    metadata = template.sub("metadata")
    metadata.texts("annotations")
    return metadata.texts("labels")


def template_hash(template: Object) -> str:
    """Hash a template independently of the order of its keys; API servers fill in nothing in it."""
    return hashlib.sha256(_json_text(template).encode()).hexdigest()[:10]


def copy_template(template: Object) -> dict[str, Any]:
    return cast(dict[str, Any], json.loads(_json_text(template)))


def _json_text(data: Object) -> str:
    try:
        return json.dumps(data, sort_keys=True, separators=(",", ":"))
    except RecursionError:
        raise FleetError("read spec.template", "it is nested too deeply") from None


def _deadline(update: Fields) -> float | None:
    when = _choice(update, "when", crd.WHEN) if "when" in update.data else crd.WHEN_IDLE
    if when == crd.WHEN_DEADLINE:
        if seconds := _count(update, "deadlineSeconds", most=MOST_SECONDS):
            return float(seconds)
        update.fail("deadlineSeconds", "it is missing, or 0: write `when: now` for that")
    if "deadlineSeconds" in update.data:
        update.fail("deadlineSeconds", f"it is set, and {update.where('when')} is {when}")
    return 0.0 if when == crd.WHEN_NOW else None


def _choice(fields: Fields, key: str, known: tuple[str, ...]) -> str:
    value = fields.text(key, needed=True)
    if value not in known:
        fields.fail(key, f"{value[:40]!r} is not one of {', '.join(known)}")
    return value


def _count(fields: Fields, key: str, least: int = 0, most: int = crd.MOST_PODS) -> int:
    if key not in fields.data:
        if key not in crd.DEFAULTS:
            fields.fail(key, "it is missing")
        return crd.DEFAULTS[key]
    value = fields.number(key)
    if not least <= value <= most:
        fields.fail(key, f"wanted {least} to {most}, not {value}")
    return value


def _parse_elastic(fields: Fields, template: Fields) -> ElasticSpec:
    least = _count(fields, "min")
    return ElasticSpec(
        least,
        _count(fields, "max", max(1, least)),
        float(_count(fields, "idleSeconds", most=MOST_SECONDS)),
        float(_count(fields, "pendingSeconds", most=MOST_SECONDS)),
        _count(fields, "step", 1),
        frozenset(fields.strings("partitions")),
        _read_declared_offer(template),
    )


def _read_declared_offer(template: Fields) -> Offer:
    env: dict[str, str] = {}
    for container in template.sub("spec").subs("containers"):
        for variable in container.subs("env"):
            env[str(variable.data.get("name"))] = str(variable.data.get("value") or "")
    conf = {key.lower(): value for key, value in _KEY.findall(env.get(CONF, ""))}
    # The value of a feature with a variable in it is not known before the pod runs.
    features = frozenset(name for name in env.get(FEATURES, "").split(",") if name and "$" not in name)
    size = (_number(conf.get("cpus")), _number(conf.get("realmemory")), gpus(conf.get("gres", "")))
    return Offer(frozenset(), features | {EVERY_WORKER}, *size)


def _number(text: str | None) -> int:
    return int(text) if text and text.isdecimal() and len(text) < 10 else 0


def choose_offer(spec: ElasticSpec, seen: Offer) -> Offer:
    """Return the resources of the pool's nodes: as the template declares them, else as Slurm recorded them."""
    declared = spec.declared
    return Offer(
        spec.partitions or seen.partitions,
        declared.features | seen.features,
        declared.cpus or seen.cpus,
        declared.memory or seen.memory,
        declared.gpus or seen.gpus,
    )


def _parse_status(status: Fields) -> PoolStatus:
    return PoolStatus(
        wanted=status.number("wanted"),
        replicas=status.number("replicas"),
        ready=status.number("ready"),
        updated=status.number("updated"),
        away=status.number("away"),
        template=status.text("template"),
        generation=status.number("generation"),
        conditions=tuple(
            PoolCondition(
                item.text("type"),
                item.text("status"),
                item.text("reason"),
                item.text("message"),
                int(item.moment("lastTransitionTime")),
            )
            for item in status.subs("conditions")
        ),
        ended=tuple(
            EndedPod(
                item.text("name"), item.text("uid"), item.number("times"), int(item.moment("since")), item.text("why")
            )
            for item in status.subs("ended")
        ),
        adopted=status.text("adopted"),
        last_good=status.text("lastGood"),
    )


def pool_status_json(status: PoolStatus) -> dict[str, object]:
    """Return the status as the API server stores it. Empty texts are left out: applied, they would become null."""
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
                "type": condition.type,
                "status": condition.status,
                "reason": condition.reason,
                **({"message": condition.message} if condition.message else {}),
                "lastTransitionTime": rfc3339(condition.since),
            }
            for condition in status.conditions
        ],
        "ended": [
            {"name": pod.name, "uid": pod.uid, "times": pod.times, "since": rfc3339(pod.since), "why": pod.why}
            for pod in status.ended
        ],
        **({"adopted": status.adopted} if status.adopted else {}),
        **({"lastGood": status.last_good} if status.last_good else {}),
    }
