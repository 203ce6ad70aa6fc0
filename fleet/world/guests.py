"""Pods of others that may have machines of a pool: what they ask for, and whether a Node has it.

As the scheduler sees it where it is simple: requests, labels, taints. What hinders a pod besides is not seen here.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from fleet.errors import FleetError
from fleet.world import fields
from fleet.world.fields import Object

# Of each resource in thousandths.
Amounts = Mapping[str, int]
ENDED = ("Failed", "Succeeded")
# What is compared to know of one machine: of the barest pod, and at most. What people write has a tenth of that.
BARE, HEAVY = 4, 256
_QUANTITY = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,9})?)(?:([numkMGTPE]|[KMGTPE]i)|[eE]([0-9]{1,2}))?")
_TENS = {"n": -9, "u": -6, "m": -3, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
_TWOS = "KMGTPE"
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"


@dataclass(frozen=True, slots=True)
class NodeRequirement:
    """One expression of a node affinity."""

    key: str
    operator: str
    values: tuple[str, ...]
    field: bool  # of the Node itself, and not of its labels

    def holds(self, name: str, labels: Mapping[str, str]) -> bool:
        if self.field:
            return self.key == "metadata.name" and self.operator == "In" and name in self.values
        match self.operator:
            case "In":
                return labels.get(self.key) in self.values
            case "NotIn":
                return labels.get(self.key) not in self.values
            case "Exists":
                return self.key in labels
            case "DoesNotExist":
                return self.key not in labels
        return False  # Gt and Lt: what is not understood fits nowhere


@dataclass(frozen=True, slots=True)
class Toleration:
    key: str
    value: str
    exists: bool
    effect: str

    def of(self, key: str, value: str, effect: str) -> bool:
        if self.effect not in ("", effect) or (self.key not in ("", key)):
            return False
        return self.exists if not self.key else self.exists or self.value == value


@dataclass(frozen=True, slots=True)
class Guest:
    name: str  # NAMESPACE/NAME
    class_: str = ""
    node: str = ""  # "": it waits, or is not looked at yet
    # The scheduler has said that no Node has room for it. Of one that does not wait nobody asks where it may go.
    waits: bool = False
    created: float = 0.0
    requests: Amounts = field(default_factory=dict)
    selector: Mapping[str, str] = field(default_factory=dict)
    # Of one of these all must hold; none: wherever it is.
    terms: tuple[tuple[NodeRequirement, ...], ...] = ()
    tolerations: tuple[Toleration, ...] = ()
    # The same for those that go to the same places; and how much is compared to know of one machine.
    shape: str = ""
    weight: int = BARE

    @property
    def namespace(self) -> str:
        return self.name.partition("/")[0]

    def suits(self, name: str, labels: Mapping[str, str], taints: Iterable[tuple[str, str, str]]) -> bool:
        """`taints`: key, value and effect."""
        if not self.selector.items() <= labels.items():
            return False
        if self.terms and not any(term and all(wish.holds(name, labels) for wish in term) for term in self.terms):
            return False
        hard = [taint for taint in taints if taint[2] != "PreferNoSchedule"]
        return all(any(one.of(*taint) for one in self.tolerations) for taint in hard)


def guest(item: Object) -> Guest:
    metadata = fields.mapping(item.get("metadata"), "metadata")
    spec = fields.mapping(item.get("spec"), "spec")
    status = fields.mapping(item.get("status"), "status")
    over = fields.text(status.get("phase"), "status.phase") in ENDED
    node = fields.text(spec.get("nodeName"), "spec.nodeName")
    going = metadata.get("deletionTimestamp") is not None
    namespace = fields.text(metadata.get("namespace"), "metadata.namespace", needed=True)
    waits = not (over or node or going) and _unschedulable(status)
    return Guest(
        name=f"{namespace}/{fields.text(metadata.get('name'), 'metadata.name', needed=True)}",
        class_=fields.text(spec.get("priorityClassName"), "spec.priorityClassName"),
        node="" if over else node,
        waits=waits,
        created=fields.moment(metadata.get("creationTimestamp"), "metadata.creationTimestamp"),
        requests={} if over else requests(spec),
        **(_where(spec) if waits else {}),
    )


def _where(spec: Object) -> dict[str, Any]:
    """Which machines it may be given. Whoever makes it writes it, a million letters of it if he likes."""
    affinity = fields.mapping(spec.get("affinity"), "spec.affinity")
    required = fields.mapping(affinity.get("nodeAffinity"), "spec.affinity.nodeAffinity").get(REQUIRED)
    listed = fields.mapping(required, "nodeAffinity").get("nodeSelectorTerms")
    asked, selector = requests(spec), fields.texts(spec.get("nodeSelector"), "spec.nodeSelector")
    terms = tuple(_term(one) for one in fields.items(listed, "nodeSelectorTerms"))
    bears = tuple(_toleration(one) for one in fields.items(spec.get("tolerations"), "spec.tolerations"))
    wishes = sum(1 + sum(1 + len(wish.values) for wish in term) for term in terms)
    weight = BARE + len(asked) + len(selector) + len(bears) + wishes
    if weight > HEAVY:
        said = "its resources, labels, tolerations, and terms of affinity with their values"
        raise FleetError("read spec", f"{said} are {weight} together: one of more than {HEAVY} is lent nothing")
    shape = repr((sorted(asked.items()), sorted(selector.items()), terms, bears))
    where = {"selector": selector, "terms": terms, "tolerations": bears}
    return {**where, "weight": weight, "shape": hashlib.sha256(shape.encode()).hexdigest()}


def _unschedulable(status: Object) -> bool:
    for item in fields.items(status.get("conditions"), "status.conditions"):
        one = fields.mapping(item, "status.conditions")
        if one.get("type") == "PodScheduled":
            return one.get("status") == "False" and one.get("reason") == "Unschedulable"
    return False


def _term(item: object) -> tuple[NodeRequirement, ...]:
    one = fields.mapping(item, "nodeSelectorTerms")
    return tuple(
        _wish(wish, of_node) for key, of_node in (("matchExpressions", False), ("matchFields", True))
        for wish in fields.items(one.get(key), key)
    )  # fmt: skip


def _wish(item: object, of_node: bool) -> NodeRequirement:
    one = fields.mapping(item, "nodeSelectorTerms")
    values = tuple(fields.text(value, "values", needed=True) for value in fields.items(one.get("values"), "values"))
    key, operator = (fields.text(one.get(name), name, needed=True) for name in ("key", "operator"))
    return NodeRequirement(key, operator, values, of_node)


def _toleration(item: object) -> Toleration:
    one = fields.mapping(item, "spec.tolerations")
    said = {key: fields.text(one.get(key), f"spec.tolerations.{key}") for key in ("key", "value", "effect")}
    return Toleration(**said, exists=one.get("operator") == "Exists")


def requests(spec: Object) -> dict[str, int]:
    """Of a pod: of all its containers together, and of each that runs before them alone."""
    found: dict[str, int] = amounts(spec.get("overhead"))
    alone: list[dict[str, int]] = []
    for key in ("containers", "initContainers"):
        for item in fields.items(spec.get(key), f"spec.{key}"):
            one = fields.mapping(item, f"spec.{key}")
            said = fields.mapping(one.get("resources"), "resources")
            # In a pod the API server has done so already; in a template nobody has.
            asked = amounts(said.get("limits")) | amounts(said.get("requests"))
            if key == "initContainers" and one.get("restartPolicy") != "Always":
                alone.append(asked)
                continue
            for name, much in asked.items():
                found[name] = found.get(name, 0) + much
    for asked in alone:
        found |= {name: max(much, found.get(name, 0)) for name, much in asked.items()}
    # What is asked for in no amount is asked for on each machine.
    return {name: much for name, much in found.items() if much}


def amounts(value: object) -> dict[str, int]:
    return {key: amount(said, key) for key, said in fields.mapping(value, "resources").items()}


def amount(said: object, where: str) -> int:
    found = _QUANTITY.fullmatch(said) if isinstance(said, str) else None
    if found is None:
        raise FleetError(f"read {where}", "it is no quantity")
    number, unit, tens = found.groups()
    if unit and unit.endswith("i"):
        times = Decimal(1000 * 2 ** (10 * (_TWOS.index(unit[0]) + 1)))
    else:
        times = Decimal(1).scaleb(3 + (_TENS[unit] if unit else int(tens or 0)))
    return math.ceil(Decimal(number) * times)


def less(much: Amounts, *others: Amounts) -> Amounts:
    found = dict(much)
    for other in others:
        for name, one in other.items():
            found[name] = found.get(name, 0) - one
    return found


def holds(room: Amounts, wanted: Amounts) -> bool:
    return all(room.get(name, 0) >= much for name, much in wanted.items())
