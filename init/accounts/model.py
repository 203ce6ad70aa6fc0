"""Objects of slurmdbd as fields of text, and the mark by which an object says that accounts.yaml owns it. Pure.

A mark holds what was applied last. It lies in the object itself (an association's comment, a QOS's description) and is
set by the same call as the values, so a run that is killed leaves no record that differs from what it did.

accounts.yaml and sacctmgr write a limit in several ways; here each has one canonical text. All of it is lower case, as
sacctmgr itself lowers names and descriptions.
"""

from __future__ import annotations

import re
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


def drop_inherited(accounts: Mapping[str, Fields], name: str) -> Fields:
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


def keep_roster(names: frozenset[str]) -> frozenset[str]:
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


_NAME = re.compile(r"[a-z0-9_][a-z0-9_.-]{0,63}")
_TRES = re.compile(r"(cpu|mem|node|billing|energy|vmem|pages|(fs|bb|ic|license|gres)/[a-z0-9_.:-]{1,64})")
_SUFFIX = {"": 1, "k": 1 / 1024, "m": 1, "g": 1024, "t": 1024**2, "p": 1024**3}
_DAYS = re.compile(r"(?:(\d{1,6})-)?(\d{1,9})(?::(\d{1,2}))?(?::(\d{1,2}))?")
_UNIT = re.compile(r"(\d{1,9}) ?(m|h|d)")
_TEXT = re.compile(r"[A-Za-z0-9 .,_()/:+@&-]{1,200}")
MOST = 2**31


class Shape(Enum):
    """Form of a limit's value."""

    COUNT = "a whole number"
    TRES = "a mapping such as {cpu: 64, mem: 500G, gres/gpu: 8}"
    MINUTES = "a quoted time such as '12h', '7d' or '1-00:00:00'"


ASSOCIATION_LIMITS = {
    "GrpTRES": Shape.TRES,
    "GrpTRESMins": Shape.TRES,
    "GrpTRESRunMins": Shape.TRES,
    "GrpJobs": Shape.COUNT,
    "GrpJobsAccrue": Shape.COUNT,
    "GrpSubmitJobs": Shape.COUNT,
    "GrpWall": Shape.MINUTES,
    "MaxTRES": Shape.TRES,
    "MaxTRESPerNode": Shape.TRES,
    "MaxTRESMins": Shape.TRES,
    "MaxJobs": Shape.COUNT,
    "MaxJobsAccrue": Shape.COUNT,
    "MaxSubmitJobs": Shape.COUNT,
    "MaxWall": Shape.MINUTES,
}
QOS_LIMITS = {
    **{name: shape for name, shape in ASSOCIATION_LIMITS.items() if name.startswith("Grp")},
    "MaxTRES": Shape.TRES,
    "MaxTRESPerNode": Shape.TRES,
    "MaxTRESPerUser": Shape.TRES,
    "MaxTRESPerAccount": Shape.TRES,
    "MaxTRESMins": Shape.TRES,
    "MinTRES": Shape.TRES,
    "MaxJobsPerUser": Shape.COUNT,
    "MaxJobsPerAccount": Shape.COUNT,
    "MaxSubmitJobsPerUser": Shape.COUNT,
    "MaxSubmitJobsPerAccount": Shape.COUNT,
    "MaxWall": Shape.MINUTES,
}


def is_name(text: str) -> bool:
    """Tell if a text is safe as the name of an account, a user or a QOS."""
    return _NAME.fullmatch(text) is not None


def is_text(text: str) -> bool:
    """Tell if a text is safe as a description: no sign that sacctmgr, its output or a mark gives a meaning."""
    return _TEXT.fullmatch(text) is not None and text == text.strip()


def tres(text: str) -> str | None:
    """Return `cpu=64,mem=500G` with the names sorted and memory in megabytes; None if it is not of that form."""
    counts: dict[str, str] = {}
    for part in filter(None, text.lower().split(",")):
        name, equals, value = part.strip().partition("=")
        amount = _amount(name, value)
        if not equals or amount is None or not _TRES.fullmatch(name) or name in counts:
            return None
        counts[name] = amount
    return ",".join(f"{name}={counts[name]}" for name in sorted(counts))


def tres_names(text: str) -> set[str]:
    return {part.partition("=")[0] for part in text.split(",") if part}


def _amount(name: str, value: str) -> str | None:
    match = re.fullmatch(r"(\d{1,15})([kmgtp]?)", value)
    if match is None or (match[2] and name not in ("mem", "vmem") and not name.startswith("bb/")):
        return None
    return str(int(int(match[1]) * _SUFFIX[match[2]]))


def minutes(text: str) -> str | None:
    """Return the minutes of Slurm's `1-00:00:00` or of `12h`; None if it is neither or not of whole minutes."""
    if match := _UNIT.fullmatch(text):
        return _check_bounds(int(match[1]) * {"m": 1, "h": 60, "d": 1440}[match[2]])
    match = _DAYS.fullmatch(text)
    if match is None:
        return None
    days, *rest = match.groups()
    parts = [int(part) for part in rest if part is not None]
    if days is not None:  # D-H, D-H:M, D-H:M:S
        hours, mins, seconds = [*parts, 0, 0][:3]
    elif len(parts) == 3:
        hours, mins, seconds = parts
    else:  # M, M:S
        hours, (mins, seconds) = 0, [*parts, 0][:2]
    return None if seconds else _check_bounds(int(days or 0) * 1440 + hours * 60 + mins)


def seconds(text: str) -> str:
    """Return the seconds of Slurm's `1-00:00:30`; another text as it is."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+):(\d+):(\d+)", text)
    if match is None:
        return text
    days, hours, mins, secs = (int(part or 0) for part in match.groups())
    return str(((days * 24 + hours) * 60 + mins) * 60 + secs)


def _check_bounds(count: int) -> str | None:
    return str(count) if count < MOST else None


def normalise_names(text: str) -> str:
    """Return a list of names sorted and in lower case."""
    return ",".join(sorted(set(filter(None, (part.strip() for part in text.lower().split(","))))))


def canonical(shape: Shape, text: str) -> str:
    """Return sacctmgr's text of a limit in its one form; a text that it never wrote stays as it is."""
    value = tres(text) if shape is Shape.TRES else minutes(text) if shape is Shape.MINUTES else text
    return text.lower() if value is None else value
