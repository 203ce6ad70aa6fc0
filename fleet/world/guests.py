"""Guest pods: pods of other namespaces that may borrow machines of a pool; what they request, and which Node fits.

Models the simple part of the scheduler: requests, node selector, required node affinity, taints.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from fleet import FleetError
from fleet.world.fields import Fields, Object

# By resource, in thousandths.
Amounts = Mapping[str, int]
ENDED = ("Failed", "Succeeded")
# The cost of comparing a guest with one machine: of a pod without constraints, and the most that is accepted.
BARE, HEAVY = 4, 256
_QUANTITY = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,9})?)(?:([numkMGTPE]|[KMGTPE]i)|[eE]([0-9]{1,2}))?")
_TENS = {"n": -9, "u": -6, "m": -3, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
_TWOS = "KMGTPE"
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"


@dataclass(frozen=True, slots=True)
class NodeRequirement:
    """One expression of a node affinity term."""

    key: str
    operator: str
    values: tuple[str, ...]
    field: bool  # matches a field of the Node instead of its labels

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
        return False  # Gt and Lt are not supported: such a pod fits nowhere


@dataclass(frozen=True, slots=True)
class Toleration:
    key: str
    value: str
    exists: bool
    effect: str

    def of(self, key: str, value: str, effect: str) -> bool:
        """Return whether this tolerates the taint."""
        if self.effect not in ("", effect) or self.key not in ("", key):
            return False
        return self.exists if not self.key else self.exists or self.value == value


@dataclass(frozen=True, slots=True)
class Guest:
    name: str  # NAMESPACE/NAME
    class_: str = ""  # its PriorityClass
    node: str = ""  # "": not scheduled
    # The scheduler found no room. The constraints below are read of waiting guests only.
    waits: bool = False
    created: float = 0.0
    requests: Amounts = field(default_factory=dict)
    selector: Mapping[str, str] = field(default_factory=dict)
    # All requirements of one term must hold; no terms: any Node.
    terms: tuple[tuple[NodeRequirement, ...], ...] = ()
    tolerations: tuple[Toleration, ...] = ()
    # Equal for guests with equal constraints; and the cost of comparing this guest with one machine.
    shape: str = ""
    weight: int = BARE

    @property
    def namespace(self) -> str:
        return self.name.partition("/")[0]

    def suits(self, name: str, labels: Mapping[str, str], taints: Iterable[tuple[str, str, str]]) -> bool:
        """Return whether the scheduler may place the guest on this Node. `taints`: key, value and effect."""
        if not self.selector.items() <= labels.items():
            return False
        if self.terms and not any(term and all(wish.holds(name, labels) for wish in term) for term in self.terms):
            return False
        hard = [taint for taint in taints if taint[2] != "PreferNoSchedule"]
        return all(any(toleration.of(*taint) for toleration in self.tolerations) for taint in hard)


def parse_guest(item: Object) -> Guest:
    fields = Fields(item)
    metadata, spec, status = fields.sub("metadata"), fields.sub("spec"), fields.sub("status")
    ended = status.text("phase") in ENDED
    node = spec.text("nodeName")
    deleting = metadata.data.get("deletionTimestamp") is not None
    waits = not (ended or node or deleting) and _is_unschedulable(status)
    return Guest(
        name=f"{metadata.text('namespace', needed=True)}/{metadata.text('name', needed=True)}",
        class_=spec.text("priorityClassName"),
        node="" if ended else node,
        waits=waits,
        created=metadata.moment("creationTimestamp"),
        requests={} if ended else requests(spec),
        **(_constraints(spec) if waits else {}),
    )


def _constraints(spec: Fields) -> dict[str, Any]:
    """Read where the guest may run. A user may write a megabyte of constraints, so their cost is bounded."""
    required = spec.sub("affinity").sub("nodeAffinity").sub(REQUIRED)
    selector, requested = spec.texts("nodeSelector"), requests(spec)
    terms = tuple(_term(term) for term in required.subs("nodeSelectorTerms"))
    tolerations = tuple(
        Toleration(item.text("key"), item.text("value"), item.data.get("operator") == "Exists", item.text("effect"))
        for item in spec.subs("tolerations")
    )
    wishes = sum(1 + sum(1 + len(wish.values) for wish in term) for term in terms)
    weight = BARE + len(requested) + len(selector) + len(tolerations) + wishes
    if weight > HEAVY:
        what = "its resources, labels, tolerations, and terms of affinity with their values"
        raise FleetError("read spec", f"{what} are {weight} together: a pod with more than {HEAVY} is lent nothing")
    shape = repr((sorted(requested.items()), sorted(selector.items()), terms, tolerations))
    digest = hashlib.sha256(shape.encode()).hexdigest()
    return {"selector": selector, "terms": terms, "tolerations": tolerations, "weight": weight, "shape": digest}


def _is_unschedulable(status: Fields) -> bool:
    for condition in status.subs("conditions"):
        if condition.data.get("type") == "PodScheduled":
            return condition.data.get("status") == "False" and condition.data.get("reason") == "Unschedulable"
    return False


def _term(term: Fields) -> tuple[NodeRequirement, ...]:
    return tuple(
        NodeRequirement(
            item.text("key", needed=True), item.text("operator", needed=True), tuple(item.strings("values")), of_node
        )
        for key, of_node in (("matchExpressions", False), ("matchFields", True))
        for item in term.subs(key)
    )


def requests(spec: Fields) -> dict[str, int]:
    """Compute a pod's requests: the sum of its containers, and at least the requests of each init container."""
    total = amounts(spec.sub("overhead"))
    alone: list[dict[str, int]] = []
    for key in ("containers", "initContainers"):
        for container in spec.subs(key):
            resources = container.sub("resources")
            # The API server copies limits into requests of a pod; in a template they are still missing.
            requested = amounts(resources.sub("limits")) | amounts(resources.sub("requests"))
            if key == "initContainers" and container.data.get("restartPolicy") != "Always":
                alone.append(requested)
                continue
            for name, quantity in requested.items():
                total[name] = total.get(name, 0) + quantity
    for requested in alone:
        total |= {name: max(quantity, total.get(name, 0)) for name, quantity in requested.items()}
    return {name: quantity for name, quantity in total.items() if quantity}


def amounts(fields: Fields) -> dict[str, int]:
    return {key: amount(value, key) for key, value in fields.data.items()}


def amount(value: object, where: str) -> int:
    """Parse a Kubernetes quantity into thousandths, rounded up."""
    match = _QUANTITY.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise FleetError(f"read {where}", "it is no quantity")
    number, unit, tens = match.groups()
    if unit and unit.endswith("i"):
        times = Decimal(1000 * 2 ** (10 * (_TWOS.index(unit[0]) + 1)))
    else:
        times = Decimal(1).scaleb(3 + (_TENS[unit] if unit else int(tens or 0)))
    return math.ceil(Decimal(number) * times)


def subtract(total: Amounts, *subtrahends: Amounts) -> Amounts:
    rest = dict(total)
    for amounts in subtrahends:
        for name, amount in amounts.items():
            rest[name] = rest.get(name, 0) - amount
    return rest


def covers(room: Amounts, wanted: Amounts) -> bool:
    return all(room.get(name, 0) >= quantity for name, quantity in wanted.items())
