"""Objects of slurmdbd as fields of text, and the mark by which an object says that accounts.yaml owns it. Pure.

A mark holds what was applied last. It lies in the object itself (an association's comment, a QOS's description) and is
set by the same call as the values, so a run that is killed leaves no record that differs from what it did.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

MARK = "minivm"
ROSTER = "members"
COORDINATOR = "coordinator "
DEFAULT = "default"  # the user's default account
# Text that a column of slurmdbd and one argument hold; a longer list of members is not kept.
ROSTER_MOST = 40_000
Fields = Mapping[str, str]


class ObjectKind(Enum):
    QOS = "qos"
    ACCOUNT = "account"
    USER = "user"  # a user in an account


@dataclass(frozen=True, slots=True, order=True)
class ObjectKey:
    kind: str
    name: str
    account: str = ""

    def __str__(self) -> str:
        return f"user {self.name} in {self.account}" if self.account else f"{self.kind} {self.name}"


def qos(name: str) -> ObjectKey:
    return ObjectKey(ObjectKind.QOS.value, name)


def account(name: str) -> ObjectKey:
    return ObjectKey(ObjectKind.ACCOUNT.value, name)


def user(name: str, of: str) -> ObjectKey:
    return ObjectKey(ObjectKind.USER.value, name, of)


@dataclass(frozen=True, slots=True)
class OwnerMark:
    """Fields that were applied last; `roster`: the members of an account then."""

    fields: Fields
    roster: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class StoredObject:
    """An object in slurmdbd; without a mark it is not owned."""

    fields: Fields
    mark: OwnerMark | None


@dataclass(frozen=True, slots=True)
class Database:
    """slurmdbd at one moment, for one cluster."""

    objects: Mapping[ObjectKey, StoredObject]
    users: Mapping[str, str]  # every user's admin level, "" for none
    rows: frozenset[str]  # every account, also one without an association in this cluster
    tres: frozenset[str]
    partitioned: frozenset[ObjectKey] = frozenset()  # users in accounts who also have associations of single partitions


def coordinators(fields: Fields) -> set[str]:
    return {field for field in fields if field.startswith(COORDINATOR)}


def without_inherited(accounts: Mapping[str, Fields], name: str) -> Fields:
    """Return an account's fields without the coordinators of the accounts above it, which slurmdbd lists in it too."""
    fields = accounts[name]
    above: set[str] = set()
    parent, visited = fields.get("parent", ""), {name}
    while parent in accounts and parent not in visited:
        visited.add(parent)
        above |= coordinators(accounts[parent])
        parent = accounts[parent].get("parent", "")
    return {field: value for field, value in fields.items() if field not in above} if above else fields


def is_late(field: str) -> bool:
    """Tell if a field needs a call of its own, since it names another object."""
    return field in ("preempt", DEFAULT, "adminlevel") or field.startswith(COORDINATOR)


def write_mark(cluster: str, fields: Fields, roster: frozenset[str] = frozenset()) -> str:
    parts = [f"{MARK} {cluster.lower()}", *(f"{name}={value}" for name, value in sorted(fields.items()))]
    if roster:
        parts.append(f"{ROSTER}={','.join(sorted(roster))}")
    return ";".join(parts)


def kept_roster(names: frozenset[str]) -> frozenset[str]:
    """Return the members as a mark keeps them: none where they are too many."""
    return names if sum(len(name) + 1 for name in names) <= ROSTER_MOST else frozenset()


def read_mark(cluster: str, text: str) -> OwnerMark | None:
    """Return the mark; None for any other text, and for a mark of another cluster."""
    first, *parts = text.strip().split(";")
    if first != f"{MARK} {cluster.lower()}":
        return None
    fields = {name: value for name, equals, value in (part.partition("=") for part in parts) if equals}
    roster = frozenset(filter(None, fields.pop(ROSTER, "").split(",")))
    return OwnerMark(fields, roster)
