"""The adapter file of a product: where its pods are, who may do what in them, and how it is scaled and configured."""

from __future__ import annotations

import difflib
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

ROLES = ("controller", "login", "worker", "accounting")
DAEMONS = ("slurmctld", "slurmd", "slurmdbd")


class AdapterError(Exception):
    """An adapter file that cannot be used: which file, which field, what was found and what is expected."""


@dataclass(frozen=True, slots=True)
class Role:
    """The pods of one role, and the container of theirs that has Slurm."""

    selector: str
    container: str


@dataclass(frozen=True, slots=True)
class Person:
    """The place of a command: the role whose pod runs it, and the words before it."""

    name: str
    role: str
    command: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Field:
    """A field of an object, such as `spec.replicas` of `statefulset/slurm-worker`."""

    object: str
    path: tuple[str, ...]

    def merge_patch(self, value: Any) -> dict[str, Any]:
        patch: Any = value
        for key in reversed(self.path):
            patch = {key: patch}
        return dict(patch)

    def value_in(self, found: Mapping[str, Any]) -> Any:
        """Return the field's value; None where it is absent."""
        value: Any = found
        for key in self.path:
            value = value.get(key) if isinstance(value, Mapping) else None
        return value


@dataclass(frozen=True, slots=True)
class Ssh:
    service: str
    port: int


@dataclass(frozen=True, slots=True)
class Metrics:
    """An address inside a role's container that answers Prometheus, and a name that it must show."""

    role: str
    port: int
    path: str
    shows: str


@dataclass(frozen=True, slots=True)
class Adapter:
    product: str
    namespace: str
    roles: Mapping[str, Role]
    administrator: Person
    user: Person
    note: str = ""
    other_user: Person | None = None
    node_name: tuple[str, ...] = ("metadata", "name")
    daemons: Mapping[str, str] = field(default_factory=dict)
    shared_directory: str = ""
    scale: Field | None = None
    roll: Mapping[str, Field] = field(default_factory=dict)
    configuration: Field | None = None
    ssh: Ssh | None = None
    metrics: tuple[Metrics, ...] = ()
    # Check -> why the product does not offer it.
    not_offered: Mapping[str, str] = field(default_factory=dict)
    # Check -> why it says nothing here though the product may offer it.
    not_tried: Mapping[str, str] = field(default_factory=dict)
    # Every deadline times this: more for a slow cluster.
    patience: float = 1.0


KEYS = (*Adapter.__dataclass_fields__, "names")


def load(path: Path, names: Mapping[str, str] | None = None) -> Adapter:
    """Read an adapter file; `names` replaces values of its section `names`, which `${NAME}` stands for."""
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise AdapterError(f"cannot read {path}: {error}") from error
    reader = Reader(path)
    whole = reader.mapping(data, "the file", KEYS)
    known = {key: reader.text(value, f"names.{key}") for key, value in whole.pop("names", {}).items()}
    for name in names or {}:
        reader.refuse_unknown(name, known, "names")
    try:
        whole = substituted(whole, known | dict(names or {}))
    except (KeyError, ValueError) as error:
        raise AdapterError(f"{path}: cannot substitute {error}: names has {', '.join(known) or 'nothing'}") from error
    return reader.adapter(whole)


def pairs(names: Sequence[str]) -> dict[str, str]:
    """Read NAME=VALUE of the command line."""
    for name in names:
        if "=" not in name:
            raise AdapterError(f"--name {name}: expected NAME=VALUE, such as --name namespace=slurm")
    return dict(name.partition("=")[::2] for name in names)


def substituted(value: Any, names: Mapping[str, str]) -> Any:
    if isinstance(value, str):
        return string.Template(value).substitute(names)
    if isinstance(value, dict):
        return {key: substituted(part, names) for key, part in value.items()}
    return [substituted(part, names) for part in value] if isinstance(value, list) else value


@dataclass(frozen=True, slots=True)
class Reader:
    """Reads parts of one file strictly, and names the file and the field in each error."""

    path: Path

    def adapter(self, data: dict[str, Any]) -> Adapter:
        for key in ("product", "namespace", "roles", "administrator", "user"):
            if key not in data:
                raise AdapterError(f"{self.path}: {key} is missing")
        roles = self.mapping(data["roles"], "roles", ROLES)
        for needed in ROLES[:3]:
            if needed not in roles:
                raise AdapterError(f"{self.path}: roles.{needed} is missing")
        found: dict[str, Any] = {
            "product": self.text(data["product"], "product"),
            "namespace": self.text(data["namespace"], "namespace"),
            "roles": {role: self.made(Role, of, f"roles.{role}") for role, of in roles.items()},
            "administrator": self.person(data["administrator"], "administrator", roles),
            "user": self.person(data["user"], "user", roles),
        }
        readers: dict[str, Any] = {
            "note": self.text,
            "shared_directory": self.text,
            "node_name": self.words,
            "other_user": lambda of, where: self.person(of, where, roles),
            "scale": self.field,
            "configuration": self.field,
            "ssh": lambda of, where: self.made(Ssh, of, where),
            "patience": self.number,
            "daemons": lambda of, where: {
                name: self.role(role, f"{where}.{name}", roles)
                for name, role in self.mapping(of, where, DAEMONS).items()
            },
            "roll": lambda of, where: {
                role: self.field(part, f"{where}.{role}") for role, part in self.mapping(of, where, roles).items()
            },
            "metrics": lambda of, where: tuple(
                self.made(Metrics, part, f"{where}[{number}]") for number, part in enumerate(self.list(of, where))
            ),
            "not_offered": self.reasons,
            "not_tried": self.reasons,
        }
        found |= {key: read(data[key], key) for key, read in readers.items() if key in data}
        for number, part in enumerate(found.get("metrics", ())):
            self.role(part.role, f"metrics[{number}].role", roles)
        return Adapter(**found)

    def refuse_unknown(self, name: str, known: Any, where: str) -> None:
        if name not in known:
            near = difflib.get_close_matches(str(name), [str(key) for key in known], 1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(map(str, known)) or 'none'}"
            raise AdapterError(f"{self.path}: {where} has no {name!r}: {hint}")

    def mapping(self, of: Any, where: str, known: Any = None) -> dict[str, Any]:
        if not isinstance(of, dict):
            raise AdapterError(f"{self.path}: {where} is {of!r}: expected a mapping")
        for key in of if known is not None else ():
            self.refuse_unknown(key, known, where)
        return dict(of)

    def list(self, of: Any, where: str) -> list[Any]:
        if not isinstance(of, list):
            raise AdapterError(f"{self.path}: {where} is {of!r}: expected a list")
        return of

    def text(self, of: Any, where: str) -> str:
        if not isinstance(of, str) or not of:
            raise AdapterError(f"{self.path}: {where} is {of!r}: expected text")
        return of

    def reasons(self, of: Any, where: str) -> dict[str, str]:
        return {str(name): self.text(why, f"{where}.{name}") for name, why in self.mapping(of, where).items()}

    def number(self, of: Any, where: str) -> float:
        if isinstance(of, bool) or not isinstance(of, int | float) or of <= 0:
            raise AdapterError(f"{self.path}: {where} is {of!r}: expected a number above 0")
        return float(of)

    def words(self, of: Any, where: str) -> tuple[str, ...]:
        return tuple(self.text(word, f"{where}[{number}]") for number, word in enumerate(self.list(of, where)))

    def role(self, of: Any, where: str, roles: Mapping[str, Any]) -> str:
        self.refuse_unknown(of, roles, where)
        return str(of)

    def person(self, of: Any, where: str, roles: Mapping[str, Any]) -> Person:
        data = self.mapping(of, where, ("name", "role", "command"))
        role = self.role(data.get("role"), f"{where}.role", roles)
        command = self.words(data.get("command", []), f"{where}.command")
        return Person(self.text(data.get("name"), f"{where}.name"), role, command)

    def field(self, of: Any, where: str) -> Field:
        data = self.mapping(of, where, ("object", "path"))
        path = self.words(data.get("path"), f"{where}.path")
        if not path:
            raise AdapterError(f"{self.path}: {where}.path is empty: expected the keys that lead to the field")
        return Field(self.text(data.get("object"), f"{where}.object"), path)

    def made(self, kind: type[Any], of: Any, where: str) -> Any:
        """Make a dataclass whose fields are texts and whole numbers, all of them needed."""
        data = self.mapping(of, where, kind.__dataclass_fields__)
        for name, about in kind.__dataclass_fields__.items():
            if about.type == "int":
                if type(data.get(name)) is not int:
                    raise AdapterError(f"{self.path}: {where}.{name} is {data.get(name)!r}: expected a whole number")
            else:
                self.text(data.get(name), f"{where}.{name}")
        return kind(**data)
