"""Read accounts.yaml into the objects that slurmdbd is to have. Every error names file, field and what was expected."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from init.accounts import model
from init.accounts.model import (
    ASSOCIATION_LIMITS,
    COORDINATOR,
    DEFAULT,
    QOS_LIMITS,
    Fields,
    ObjectKey,
    Shape,
    account,
    qos,
    user,
)
from init.dropins.merge import load_mapping
from init.errors import ConfigError, nearest, raise_all
from init.fields import Reader, describe_value

WHAT = "the accounts"
MOST_BYTES = 4 << 20
MOST = {"accounts": 2_000, "users": 10_000, "qos": 200}
MOST_MEMBERSHIPS = 50_000
MOST_ERRORS = 50
ROOT = "root"
ADMIN_LEVELS = {"none": "", "operator": "operator", "administrator": "administrator"}
QOS_FLAGS = (
    "DenyOnLimit", "EnforceUsageThreshold", "NoDecay", "NoReserve", "OverPartQOS", "PartitionMaxNodes",
    "PartitionMinNodes", "PartitionTimeLimit", "RequiresReservation", "Relative", "UsageFactorSafe",
)  # fmt: skip
NAME_HINT = "1 to 64 of a-z, 0-9, _ . -, and not - or . first: Slurm keeps names in lower case"


@dataclass(frozen=True, slots=True)
class AccountsFile:
    """Content of accounts.yaml. `named`: names that slurmdbd must have if the file does not, each with its field."""

    file: str
    objects: Mapping[ObjectKey, Fields]
    named: Mapping[ObjectKey, str]
    coordinators: Mapping[str, str]


def load(path: Path) -> AccountsFile:
    """Read the file at `path`; ConfigError for all wrong entries in it."""
    try:
        size = os.stat(path).st_size  # noqa: PTH116 (an absent file is the reader's error)
    except OSError:
        size = 0
    if size > MOST_BYTES:
        raise ConfigError(f"read {WHAT}", f"{size} bytes, expected at most {MOST_BYTES}", file=str(path))
    return parse(load_mapping(path, f"read {WHAT}"), str(path))


def parse(data: Mapping[str, object], file: str) -> AccountsFile:
    top = Reader(data, WHAT, file)
    top.only("accounts", "users", "qos")
    return _Builder(file).build(top)


class _Builder:
    def __init__(self, file: str) -> None:
        self.file = file
        self.objects: dict[ObjectKey, Fields] = {}
        self.named: dict[ObjectKey, str] = {}
        self.coordinators: dict[str, str] = {}

    def build(self, top: Reader) -> AccountsFile:
        errors: list[ConfigError] = []
        for key, read in (("qos", self._qos), ("accounts", self._account), ("users", self._user)):
            errors += _collect_errors(top, key, read)
        if len(errors) > MOST_ERRORS:
            more = ConfigError(f"read {WHAT}", f"{len(errors) - MOST_ERRORS} more entries are wrong", file=self.file)
            errors = [*errors[:MOST_ERRORS], more]
        raise_all(f"read {WHAT}", errors)
        self._check_parents(top)
        users = {key.name for key in self.objects if key.account}
        named = {key: where for key, where in self.named.items() if key not in self.objects}
        coordinators = {name: where for name, where in self.coordinators.items() if name not in users}
        return AccountsFile(self.file, self.objects, named, coordinators)

    def _qos(self, reader: Reader) -> None:
        reader.only("name", "priority", "preempt", "flags", "graceTime", "usageFactor", "limits")
        fields = _limits(reader, QOS_LIMITS)
        priority = reader.number("priority", 0)
        if priority >= model.MOST:
            reader.fail("priority", f"{priority} is too large, expected less than {model.MOST}")
        fields["priority"] = str(priority)
        if preempt := _names(reader, "preempt"):
            fields["preempt"] = model.normalise_names(",".join(preempt))
            self.named.update({qos(name): _at(reader, "preempt") for name in preempt})
        if flags := reader.texts("flags"):
            flags_by_name = {flag.lower(): flag for flag in QOS_FLAGS}
            for flag in flags:
                if flag.lower() not in flags_by_name:
                    reader.fail("flags", f"{flag!r} is no flag of a QOS", nearest(flag, list(QOS_FLAGS)))
            fields["flags"] = model.normalise_names(",".join(flags))
        if grace := reader.seconds("graceTime", 0.0):
            fields["gracetime"] = f"{grace:.0f}"
        factor = reader.real("usageFactor", 1.0, most=1000.0)
        if factor != 1.0:
            fields["usagefactor"] = f"{factor:.6f}"
        self._add(reader, qos(_name(reader)), fields)

    def _account(self, reader: Reader) -> None:
        reader.only(
            "name", "parent", "description", "organization", "fairshare", "limits", "qos", "defaultQos", "coordinators"
        )
        name = _name(reader)
        if name == ROOT:
            reader.fail("name", "root is the account above all, which Slurm makes")
        parent = _word(reader, "parent", ROOT)
        fields = self._association(reader)
        fields["parent"] = parent
        fields["description"] = _text(reader, "description", name)
        fields["organization"] = _text(reader, "organization", name)
        for coordinator in _names(reader, "coordinators"):
            fields[f"{COORDINATOR}{coordinator}"] = "yes"
            self.coordinators[coordinator] = _at(reader, "coordinators")
        if parent != ROOT:
            self.named[account(parent)] = _at(reader, "parent")
        self._add(reader, account(name), fields)

    def _user(self, reader: Reader) -> None:
        reader.only("name", "defaultAccount", "accounts", "adminLevel")
        name = _name(reader)
        default = _word(reader, "defaultAccount", "")
        if not default:
            reader.fail("defaultAccount", "missing, expected one of the user's accounts")
        level = reader.text("adminLevel").lower()
        if level and level not in ADMIN_LEVELS:
            reader.fail("adminLevel", f"{level!r} is not one of None, Operator, Administrator")
        listed = reader.data.get("accounts", [default])
        if not isinstance(listed, list) or not listed:
            reader.fail("accounts", f"wanted a list of accounts, not {describe_value(listed)}")
        if len(self.objects) + len(listed) > MOST_MEMBERSHIPS:
            reader.fail("accounts", f"more than {MOST_MEMBERSHIPS} accounts, QOS and users in accounts in the file")
        for number, item in enumerate(listed):
            where = _at(reader, f"accounts[{number}]")
            data = item if isinstance(item, dict) else {"name": item}
            member = Reader(data, WHAT, self.file, where)
            member.only("name", "fairshare", "limits", "qos", "defaultQos")
            of = _name(member)
            fields = self._association(member)
            if of == default:
                fields[DEFAULT] = "yes"
            if ADMIN_LEVELS.get(level):
                fields["adminlevel"] = ADMIN_LEVELS[level]
            self.named[account(of)] = where
            self._add(member, user(name, of), fields)
        if user(name, default) not in self.objects:
            reader.fail("defaultAccount", f"{default!r} is not in accounts", "add it there")

    def _association(self, reader: Reader) -> dict[str, str]:
        fields = _limits(reader, ASSOCIATION_LIMITS)
        share = reader.data.get("fairshare")
        if share == "parent":
            fields["fairshare"] = "parent"
        else:
            fields["fairshare"] = str(reader.number("fairshare", 1))
            if int(fields["fairshare"]) >= model.MOST:
                reader.fail("fairshare", f"{share} is too large, expected less than {model.MOST}")
        if levels := _names(reader, "qos"):
            fields["qos"] = model.normalise_names(",".join(levels))
            self.named.update({qos(name): _at(reader, "qos") for name in levels})
        if default := _word(reader, "defaultQos", ""):
            fields["defaultqos"] = default
            self.named[qos(default)] = _at(reader, "defaultQos")
        return fields

    def _add(self, reader: Reader, key: ObjectKey, fields: Fields) -> None:
        if key in self.objects:
            reader.fail("name", f"{key} appears twice")
        self.objects[key] = fields

    def _check_parents(self, top: Reader) -> None:
        for key in self.objects:
            visited, at = {key.name}, self.objects[key].get("parent", ROOT)
            while at != ROOT and account(at) in self.objects and key.kind == "account":
                if at in visited:
                    top.fail("accounts", f"account {at} is below itself", "correct parent")
                visited.add(at)
                at = self.objects[account(at)]["parent"]


def _collect_errors(top: Reader, key: str, read: Callable[[Reader], None]) -> list[ConfigError]:
    """Read the entries of a list; return the first error of each wrong one."""
    errors: list[ConfigError] = []
    try:
        for reader in _items(top, key):
            try:
                read(reader)
            except ConfigError as error:
                errors.append(error)
    except ConfigError as error:
        errors.append(error)  # of the list itself
    return errors


def _items(top: Reader, key: str) -> Iterator[Reader]:
    data = top.data.get(key)
    if data is None:
        return
    if not isinstance(data, list):
        top.fail(key, f"wanted a list, not {describe_value(data)}")
    if len(data) > MOST[key]:
        top.fail(key, f"{len(data)} entries, expected at most {MOST[key]}")
    for number, item in enumerate(data):
        if not isinstance(item, dict):
            top.fail(f"{key}[{number}]", f"wanted a mapping, not {describe_value(item)}")
        yield Reader(item, WHAT, top.file, f"{key}[{number}]")


def _at(reader: Reader, key: str) -> str:
    return f"{reader.path}.{key}"


def _name(reader: Reader) -> str:
    name = _word(reader, "name", "")
    if not name:
        reader.fail("name", "missing")
    return name


def _word(reader: Reader, key: str, default: str) -> str:
    text = reader.text(key, default)
    if text and not model.is_name(text):
        reader.fail(key, f"{text[:80]!r} is not a safe name", NAME_HINT)
    return text


def _names(reader: Reader, key: str) -> tuple[str, ...]:
    names = reader.texts(key)
    if len(names) > MOST["qos"]:
        reader.fail(key, f"{len(names)} names, expected at most {MOST['qos']}")
    for name in names:
        if not model.is_name(name):
            reader.fail(key, f"{name[:80]!r} is not a safe name", NAME_HINT)
    return names


def _text(reader: Reader, key: str, default: str) -> str:
    text = reader.text(key, default)
    if not model.is_text(text):
        reader.fail(key, f"{text[:80]!r} cannot be used", "1 to 200 letters, digits, spaces and . , _ ( ) / : + @ & -")
    return text.lower()


def _limits(reader: Reader, known: Mapping[str, Shape]) -> dict[str, str]:
    section = reader.sub("limits")
    section.only(*known)
    return {name.lower(): _limit(section, name, known[name]) for name in section.data if section.has(name)}


def _limit(section: Reader, name: str, shape: Shape) -> str:
    value = section.data[name]
    if shape is Shape.COUNT:
        if section.number(name, 0) >= model.MOST:
            section.fail(name, f"{value} is too large, expected less than {model.MOST}")
        return str(value)
    text, canonical_value = value, None
    if shape is Shape.TRES and isinstance(value, dict):
        text = ",".join(f"{key}={amount}" for key, amount in value.items())
    if isinstance(text, str):
        canonical_value = model.tres(text) if shape is Shape.TRES else model.minutes(text)
    if not canonical_value:
        # YAML reads an unquoted 24:00:00 as the number 86400.
        section.fail(name, f"wanted {shape.value}, not {describe_value(value)}")
    return canonical_value
