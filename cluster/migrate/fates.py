"""The fate of each field of an object: used in the values, ignored for a reason, or reported. None has two.

A table of rules gives each path its fate, and the longest rule that fits a field wins. A field without a rule is
reported, so that a newer operator's fields are never dropped silently.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from cluster.migrate.objects import Fields, Object, field_error, show_path, walk_leaves
from ground.errors import one_line

SECRET = re.compile(
    r"pass(word|wd)?\b|StoragePass|Pass$|secret|token|credential|private_?key|api_?key|annotations", re.IGNORECASE
)
PLAIN = re.compile(r"[A-Za-z0-9 ._:/@,=+%*()-]*")
LONGEST = 60
LINE = "line "  # the last part of the path of a line of a text
TYPES = {dict: "a mapping", list: "a list", str: "text", int: "a number", bool: "true or false"}
UNKNOWN = "this plan does not know the field: look for its like in docs/reference/chart.md"
EMPTY = "nothing is set"


class FieldFate(enum.Enum):
    USED = "used"
    IGNORED = "ignored"
    REPORTED = "reported"


@dataclass(frozen=True, slots=True)
class Use:
    """Read the subtree; the function puts it into the values, or reports what it cannot use."""

    read: Callable[[Reading, Any], None]
    expects: type = dict


@dataclass(frozen=True, slots=True)
class Lines:
    """Read a text of configuration line by line; each line is a field of its own."""

    read: Callable[[Reading, str], None]


@dataclass(frozen=True, slots=True)
class Ignore:
    """The field has no meaning under minivm."""

    reason: str


@dataclass(frozen=True, slots=True)
class Report:
    """The chart has no counterpart."""

    todo: str


@dataclass(frozen=True, slots=True)
class Default:
    """The field has no meaning while it has one of these values, and no counterpart otherwise."""

    values: tuple[Any, ...]
    reason: str
    todo: str


Rule = Use | Lines | Ignore | Report | Default
# A field that another one's rule reads.
READ = Use(lambda _reading, _value: None, object)
Rules = dict[str, Rule]


@dataclass(frozen=True, slots=True)
class Item:
    """One field in the report."""

    file: str
    object: str
    field: str
    found: str
    text: str

    def __str__(self) -> str:
        return f"{self.object}: {self.field}\n    found: {self.found}\n    to do: {self.text}"


@dataclass(slots=True)
class Migration:
    """Values of the chart, files of a tree of scripts, and the fate of each field."""

    values: dict[str, Any] = field(default_factory=dict)
    scripts: dict[str, str] = field(default_factory=dict)
    config_maps: list[Object] = field(default_factory=list)
    used_maps: set[Object] = field(default_factory=set)
    move: str = ""  # the script that moves the cluster and its running jobs, and back
    secrets: dict[str, tuple[str, str]] = field(default_factory=dict)  # copy -> the Secret, and the command
    pools: dict[str, str] = field(default_factory=dict)  # Slurm name of the old node set -> pool
    fates: dict[tuple[Object, Fields], tuple[FieldFate, str]] = field(default_factory=dict)
    reported: list[Item] = field(default_factory=list)
    notes: list[Item] = field(default_factory=list)

    def note(self, item: Object, name: str, found: str, text: str) -> None:
        """Tell what no field of the object says, and what the person has to do about it."""
        if all((note.found, note.text) != (found, text) for note in self.notes):
            self.notes.append(Item(item.file, str(item), name, found, text))

    def count(self, fate: FieldFate) -> int:
        return sum(1 for each, _ in self.fates.values() if each is fate)


class Reading:
    """One object while its rules are applied. `base` is where its settings are in the chart's values."""

    def __init__(self, plan: Migration, item: Object, base: Fields = ()) -> None:
        self.plan, self.item, self.base, self.at = plan, item, base, Fields()
        self.volumes: dict[str, tuple[Fields, Mapping[str, Any]]] = {}
        self.named: set[tuple[str, Any]] = set()
        self.mounts: list[tuple[Fields, Mapping[str, Any]]] = []
        self.fates: dict[Fields, tuple[FieldFate, str]] = {}
        self.groups: dict[Fields, Fields] = {}  # reported leaf -> the field that the report names

    def get(self, *keys: str, base: Fields | None = None) -> Any:
        value: Any = self.plan.values
        for key in (*(self.base if base is None else base), *keys):
            value = value.get(key) if isinstance(value, dict) else None
        return value

    def put(self, value: Any, *keys: str, base: Fields | None = None) -> bool:
        """Set a value of the chart; a second and different one for the same key is reported instead."""
        path = (*(self.base if base is None else base), *keys)
        before = self.get(*path, base=())
        if before is not None and before != value:
            self.report(f"the chart has one {'.'.join(path)}, and another object sets it: choose one of the two")
            return False
        target = self.plan.values
        for key in path[:-1]:
            target = target.setdefault(key, {})
        target[path[-1]] = value
        return True

    def report(self, todo: str, *below: str) -> None:
        self._mark(FieldFate.REPORTED, todo, below)

    def ignore(self, reason: str, *below: str) -> None:
        self._mark(FieldFate.IGNORED, reason, below)

    def _mark(self, fate: FieldFate, text: str, below: Fields) -> None:
        root = (*self.at, *below)
        for path in self.fates:
            if path[: len(root)] == root:
                self.fates[path] = fate, text
                self.groups[path] = root

    def apply(self, rules: Rules, *after: Callable[[Reading], None]) -> None:
        """Give every field of the object its fate; `after` settles what depends on several fields."""
        parsed = Patterns({tuple(pattern.split(".")): rule for pattern, rule in rules.items()})
        fields = self._fields(parsed)
        owned: dict[Fields, tuple[Rule, dict[Fields, Any]]] = {}
        for path, value in fields.items():
            pattern, rule = parsed.best(path)
            root = path[: len(pattern)] if pattern else path[:3]
            owned.setdefault(root, (rule, {}))[1][path] = value
        for root, (rule, mine) in owned.items():
            self.at = root
            for path, value in mine.items():
                self.fates[path] = default_fate(rule, value)
                self.groups[path] = root
            if isinstance(rule, Use):
                value = self._below(root, mine)
                if not is_empty(value):
                    self.expect(value, rule.expects)
                    rule.read(self, value)
            elif isinstance(rule, Lines):
                for path, line in mine.items():
                    self.at = path
                    if not is_empty(line):
                        self.expect(line, str)
                        rule.read(self, line)
        for settle in after:
            settle(self)
        self._finish(fields)

    def expect(self, value: Any, wanted: type, *below: str) -> None:
        """Refuse a value of another type: no API server would have taken the object."""
        if not isinstance(value, wanted) or (isinstance(value, bool) and wanted is int):
            hint = "the object is damaged: write it again with kubectl get -o yaml"
            place = f"{self.item}: {show_path((*self.at, *below))}"
            raise field_error(self.item.file, place, value, TYPES[wanted], hint)

    def mappings(self, value: list[Any]) -> list[tuple[str, Mapping[str, Any]]]:
        """Return the entries of a list with their positions; each has to be a mapping."""
        for index, entry in enumerate(value):
            self.expect(entry, dict, str(index))
        return [(str(index), entry) for index, entry in enumerate(value)]

    def _fields(self, parsed: Patterns) -> dict[Fields, Any]:
        fields: dict[Fields, Any] = {}
        for path, value in walk_leaves(self.item.data):
            if isinstance(value, str) and isinstance(parsed.best(path)[1], Lines):
                fields |= {(*path, f"{LINE}{number}"): line for number, line in logical_lines(value)} or {path: ""}
            else:
                fields[path] = value
        return fields

    def _below(self, root: Fields, mine: Mapping[Fields, Any]) -> Any:
        """Return the value at `root`, without what other rules own."""
        if root in mine:
            return mine[root]
        value: Any = self.item.data
        for part in root:
            value = value[int(part)] if isinstance(value, list) else value[part]
        return only(value, root, mine)

    def _finish(self, fields: Mapping[Fields, Any]) -> None:
        groups: dict[tuple[Fields, str], dict[Fields, Any]] = {}
        for path, (fate, text) in self.fates.items():
            self.plan.fates[self.item, path] = fate, text
            if fate is FieldFate.REPORTED:
                groups.setdefault((self.groups[path], text), {})[path] = fields[path]
        for (group, text), found in groups.items():
            first, last = min(found), max(found)
            end = next((i for i, both in enumerate(zip(first, last, strict=False)) if both[0] != both[1]), len(first))
            root = first[: max(len(group), end)]
            self.plan.reported.append(
                Item(self.item.file, str(self.item), show_path(root), describe(root, found), text)
            )


def default_fate(rule: Rule, value: Any) -> tuple[FieldFate, str]:
    if isinstance(rule, Ignore):
        return FieldFate.IGNORED, rule.reason
    if isinstance(rule, Default) and value in rule.values:
        return FieldFate.IGNORED, rule.reason
    if is_empty(value):
        return FieldFate.IGNORED, EMPTY
    if isinstance(rule, (Default, Report)):
        return FieldFate.REPORTED, rule.todo
    return FieldFate.USED, ""


def is_empty(value: Any) -> bool:
    return value is None or value in ("", {}, [])


class Patterns:
    """The rules by their paths, where `*` is any one part."""

    def __init__(self, rules: Mapping[Fields, Rule]) -> None:
        self.rules = rules
        self.longest = max(map(len, rules))
        self.known: dict[Fields, Fields] = {}

    def best(self, path: Fields) -> tuple[Fields, Rule]:
        """Return the longest pattern that fits the beginning of the path, and its rule."""
        start = path[: self.longest]
        if start not in self.known:
            fitting = [
                pattern
                for pattern in self.rules
                if len(pattern) <= len(start)
                and all(want in ("*", part) for want, part in zip(pattern, start, strict=False))
            ]
            self.known[start] = max(fitting, key=lambda pattern: (len(pattern), -pattern.count("*")), default=())
        pattern = self.known[start]
        return pattern, self.rules[pattern] if pattern else Report(UNKNOWN)


def only(value: Any, path: Fields, mine: Mapping[Fields, Any]) -> Any:
    if isinstance(value, Mapping) and value:
        trimmed = {key: only(below, (*path, str(key)), mine) for key, below in value.items()}
        return {key: below for key, below in trimmed.items() if below is not MISSING} or MISSING
    if isinstance(value, list) and value:
        return [only(below, (*path, str(index)), mine) for index, below in enumerate(value)]
    return value if path in mine else MISSING


MISSING = object()


def logical_lines(text: str) -> list[tuple[int, str]]:
    """Return the lines with their numbers; a backslash at the end of a line joins the next one."""
    lines: list[tuple[int, str]] = []
    joined = False
    for number, line in enumerate(text.splitlines(), start=1):
        if joined:
            first, before = lines.pop()
            lines.append((first, f"{before}{line}"))
        else:
            lines.append((number, line))
        joined = line.endswith("\\")
        if joined:
            lines[-1] = (lines[-1][0], lines[-1][1].removesuffix("\\"))
    return lines


def describe(root: Fields, found: Mapping[Fields, Any]) -> str:
    """Return what was found, short and on one line. Nothing that may be a secret is shown."""
    if list(found) != [root]:
        names = dict.fromkeys(path[len(root)] for path in found)
        label = found.get((*root, "name"))
        if isinstance(label, str) and len(names) == 1:
            return repr(one_line(label)[:LONGEST])
        text = f"{len(names)} entries" if all(name.isdigit() for name in names) else f"settings {', '.join(names)}"
        return one_line(f"{label!r}: {text}" if isinstance(label, str) else text)[:200]
    value = found[root]
    if isinstance(value, bool | int | float):
        return str(value).lower()
    text = str(value)
    name = text.partition("=")[0]
    if any(SECRET.search(part) for part in (*root, text)) or not PLAIN.fullmatch(text):
        plain = root[-1].startswith(LINE) and PLAIN.fullmatch(name) and len(name) <= LONGEST
        return f"{name}=..." if plain and "=" in text else f"a text of {len(text)} characters"
    return repr(text if len(text) <= LONGEST else f"{text[:LONGEST]}...")
