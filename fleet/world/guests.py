"""Pods of others that may have machines of a pool: what they ask for, and whether a Node has it.

As the scheduler sees it where it is simple: requests, labels, taints. What hinders a pod besides is not seen here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal

from fleet.errors import FleetError
from fleet.world import reading
from fleet.world.reading import Object

# Of each resource in thousandths.
Amounts = Mapping[str, int]
ENDED = ("Failed", "Succeeded")
_QUANTITY = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,9})?)(?:([numkMGTPE]|[KMGTPE]i)|[eE]([0-9]{1,2}))?")
_TENS = {"n": -9, "u": -6, "m": -3, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
_TWOS = "KMGTPE"
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"


@dataclass(frozen=True, slots=True)
class Wish:
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
    # The scheduler has said that no Node has room for it.
    waits: bool = False
    created: float = 0.0
    requests: Amounts = field(default_factory=dict)
    selector: Mapping[str, str] = field(default_factory=dict)
    # Of one of these all must hold; none: wherever it is.
    terms: tuple[tuple[Wish, ...], ...] = ()
    tolerations: tuple[Toleration, ...] = ()

    @property
    def shape(self) -> object:
        """The same for those that go to the same places."""
        return tuple(sorted(self.requests.items())), tuple(sorted(self.selector.items())), self.terms, self.tolerations

    def suits(self, name: str, labels: Mapping[str, str], taints: Iterable[tuple[str, str, str]]) -> bool:
        """`taints`: key, value and effect."""
        if not self.selector.items() <= labels.items():
            return False
        if self.terms and not any(term and all(wish.holds(name, labels) for wish in term) for term in self.terms):
            return False
        hard = [taint for taint in taints if taint[2] != "PreferNoSchedule"]
        return all(any(one.of(*taint) for one in self.tolerations) for taint in hard)


def guest(item: Object) -> Guest:
    metadata = reading.mapping(item.get("metadata"), "metadata")
    spec = reading.mapping(item.get("spec"), "spec")
    status = reading.mapping(item.get("status"), "status")
    over = reading.text(status.get("phase"), "status.phase") in ENDED
    node = reading.text(spec.get("nodeName"), "spec.nodeName")
    going = metadata.get("deletionTimestamp") is not None
    namespace = reading.text(metadata.get("namespace"), "metadata.namespace", needed=True)
    affinity = reading.mapping(spec.get("affinity"), "spec.affinity")
    required = reading.mapping(affinity.get("nodeAffinity"), "spec.affinity.nodeAffinity").get(REQUIRED)
    terms = reading.mapping(required, "nodeAffinity").get("nodeSelectorTerms")
    return Guest(
        name=f"{namespace}/{reading.text(metadata.get('name'), 'metadata.name', needed=True)}",
        class_=reading.text(spec.get("priorityClassName"), "spec.priorityClassName"),
        node="" if over else node,
        waits=not (over or node or going) and _unschedulable(status),
        created=reading.moment(metadata.get("creationTimestamp"), "metadata.creationTimestamp"),
        requests={} if over else requests(spec),
        selector=reading.texts(spec.get("nodeSelector"), "spec.nodeSelector"),
        terms=tuple(_term(one) for one in reading.items(terms, "nodeSelectorTerms")),
        tolerations=tuple(_toleration(one) for one in reading.items(spec.get("tolerations"), "spec.tolerations")),
    )


def _unschedulable(status: Object) -> bool:
    for item in reading.items(status.get("conditions"), "status.conditions"):
        one = reading.mapping(item, "status.conditions")
        if one.get("type") == "PodScheduled":
            return one.get("status") == "False" and one.get("reason") == "Unschedulable"
    return False


def _term(item: object) -> tuple[Wish, ...]:
    one = reading.mapping(item, "nodeSelectorTerms")
    return tuple(
        _wish(wish, of_node) for key, of_node in (("matchExpressions", False), ("matchFields", True))
        for wish in reading.items(one.get(key), key)
    )  # fmt: skip


def _wish(item: object, of_node: bool) -> Wish:
    one = reading.mapping(item, "nodeSelectorTerms")
    values = tuple(reading.text(value, "values", needed=True) for value in reading.items(one.get("values"), "values"))
    key, operator = (reading.text(one.get(name), name, needed=True) for name in ("key", "operator"))
    return Wish(key, operator, values, of_node)


def _toleration(item: object) -> Toleration:
    one = reading.mapping(item, "spec.tolerations")
    said = {key: reading.text(one.get(key), f"spec.tolerations.{key}") for key in ("key", "value", "effect")}
    return Toleration(**said, exists=one.get("operator") == "Exists")


def requests(spec: Object) -> dict[str, int]:
    """Of a pod: of all its containers together, and of each that runs before them alone."""
    found: dict[str, int] = amounts(spec.get("overhead"))
    alone: list[dict[str, int]] = []
    for key in ("containers", "initContainers"):
        for item in reading.items(spec.get(key), f"spec.{key}"):
            one = reading.mapping(item, f"spec.{key}")
            asked = amounts(reading.mapping(one.get("resources"), "resources").get("requests"))
            if key == "initContainers" and one.get("restartPolicy") != "Always":
                alone.append(asked)
                continue
            for name, much in asked.items():
                found[name] = found.get(name, 0) + much
    for asked in alone:
        found |= {name: max(much, found.get(name, 0)) for name, much in asked.items()}
    return found


def amounts(value: object) -> dict[str, int]:
    return {key: amount(said, key) for key, said in reading.mapping(value, "resources").items()}


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
    return all(room.get(name, 0) >= much for name, much in wanted.items() if much)
