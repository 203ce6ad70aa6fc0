"""Render the Helm chart with Helm's own engine, and report every mistake of a values file at once.

`render` serves `build.py up` (the chart on one machine) and `build.py migrate` (which lets the chart check its values).
Helm reports mistakes in two ways, and stops at the first way that fails:

1. The chart's schema (values.schema.json) checks names and types. `parse_schema_errors` makes one line of each message,
   `FIELD: what is wrong`, and collects the paths of the refused values.
2. The chart's templates check values against each other, and call `fail` with one line for each mistake.

After a failure of the schema, the templates' checks run once more on the values without the refused ones. So a person
sees the mistakes of both kinds together. Unknown messages are shown as Helm wrote them.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from cluster import ClusterError
from images.definition.load import UniqueLoader, read_yaml

CHART = Path(__file__).resolve().parent / "chart"

Document = dict[str, Any]
# Keys from the values' top to a value; a position in a list is its number as text.
ValuePath = tuple[str, ...]


def render(values: Mapping[str, Any], *, release: str, namespace: str, file: str = "") -> list[Document]:
    """Return the chart's objects, in the order of the templates."""
    documents: list[Document] = []
    texts = render_texts(values, release=release, namespace=namespace, file=file)
    for template, text in sorted(texts.items()):
        if not template.endswith((".yaml", ".yml")):
            continue
        try:
            documents += [document for document in yaml.load_all(text, Loader=UniqueLoader) if document]
        except yaml.YAMLError as error:
            raise ClusterError(f"read what {template} renders to", str(error)) from error
    return documents


def render_texts(
    values: Mapping[str, Any], *, release: str, namespace: str, chart: Path = CHART, file: str = ""
) -> dict[str, str]:
    """Return each template's text by its name. `file` is where the values come from, for the error."""
    import helm_python  # imported late: it takes 50 ms and 40 MB

    try:
        with helm_python.Chart.load(chart) as loaded:
            try:
                loaded.validate_schema(loaded.merge_values(dict(values)))
            except helm_python.HelmError as error:
                lines, refused = parse_schema_errors(str(error), values, loaded.values)
                lines = lines or [str(error).strip()]
                accepted = without_paths(values, refused)
                try:
                    loaded.validate_schema(loaded.merge_values(accepted))
                    loaded.render(accepted, name=release, namespace=namespace)
                except helm_python.HelmError as other:
                    lines += [line for line in parse_check_errors(str(other)) if not is_about(line, refused)]
                raise values_error(lines, file) from error
            return loaded.render(dict(values), name=release, namespace=namespace)
    except helm_python.HelmError as error:
        if lines := parse_check_errors(str(error)):
            raise values_error(lines, file) from error
        raise ClusterError(f"render {chart.name}", str(error).strip()) from error


def read_overrides(file: Path) -> dict[str, Any]:
    """Read a file of values; the chart's schema checks names and types."""
    what = "read the values"
    data = read_yaml(file, str(file), what)
    if data is None:
        return {}
    if not isinstance(data, dict):
        problem = f"{file} holds a {type(data).__name__}, not names with values"
        raise ClusterError(what, problem, hint="as in cluster/chart/values.yaml")
    return data


def values_error(lines: Sequence[str], file: str) -> ClusterError:
    """Return the error about all mistakes, one line each."""
    text = lines[0] if len(lines) == 1 else "\n".join(["", *(f"  {line}" for line in lines)])
    what = f"use the values of {file}" if file else "use the values"
    return ClusterError(what, text, hint="docs/reference/chart.md has the keys")


# Mistakes that the templates' checks find.

# Helm's prefix of a `fail` call: its place in the template is no help for a person who edits a values file.
_FAIL_PREFIX = re.compile(r"^execution error at \([^()]*\): ")


def parse_check_errors(text: str) -> list[str]:
    """Return one line for each mistake; none if the error is not of a `fail` call but of the chart itself."""
    text = text.strip()
    if not _FAIL_PREFIX.match(text):
        return []
    return [line for line in _FAIL_PREFIX.sub("", text).splitlines() if line.strip()]


def is_about(line: str, paths: Sequence[ValuePath]) -> bool:
    """Return whether a check's line begins with one of these fields."""
    return line.startswith(tuple(f"{'.'.join(path)}{end}" for path in paths for end in (":", " ", ".")))


def without_paths(values: Mapping[str, Any], paths: Sequence[ValuePath]) -> dict[str, Any]:
    """Return the values without those at these paths. A refused value inside a list takes the list along."""
    rest = dict(values)
    for path in paths:
        rest = _without_path(rest, path)
    return rest


def _without_path(values: Mapping[str, Any], path: ValuePath) -> dict[str, Any]:
    if not path:
        return {}
    key, *below = path
    inner = values.get(key)
    if below and isinstance(inner, Mapping):
        return {**values, key: _without_path(inner, tuple(below))}
    return {name: value for name, value in values.items() if name != key}


# Mistakes that the schema finds: a line for each, indented below the line that it explains.
#
#   - at '/workers/pools/a': additional properties 'repliccas' not allowed
#   - at '/mounts/data': 'oneOf' failed, none matched
#     - at '/mounts/data': missing property 'claim'
#     - at '/mounts/data': missing property 'nfs'

_MESSAGE = re.compile(r"\s*- at '(?P<at>[^']*)': (?P<problem>.*)")
_GOT = re.compile(r"(?P<bound>minimum: |maximum: |)got (?P<got>.*), want (?P<want>.*)")
_BOUNDS = {"minimum: ": "at least ", "maximum: ": "at most ", "": ""}
_UNKNOWN_KEYS = re.compile(r"additional properties (?P<keys>.*) not allowed")
_UNKNOWN_NAME = re.compile(r"invalid propertyName '(?P<name>.*)'")
_CHOICE = "value must be one of "
_ONE_OF = "'oneOf' failed, none matched"
_MISSING = re.compile(r"missing property '(?P<key>[^']*)'")
_PATTERN = re.compile(r"'.*' does not match pattern (?P<pattern>'.*')", re.DOTALL)
_SECRET = re.compile(r"secret|password|token|key", re.IGNORECASE)
_LONGEST_VALUE = 60


def parse_schema_errors(
    text: str, values: Mapping[str, Any], defaults: Mapping[str, Any]
) -> tuple[list[str], list[ValuePath]]:
    """Return the schema's messages as `FIELD: what is wrong`, and the paths of the refused values."""
    errors = _SchemaErrors(values, defaults)
    messages = text.strip().splitlines()[1:]  # the first line is a title
    for line, next_line in zip(messages, [*messages[1:], ""], strict=True):
        if match := _MESSAGE.fullmatch(line):
            errors.add(match["at"], match["problem"], is_explained=_indent(next_line) > _indent(line))
        else:
            errors.lines.append(line.strip())
    return [str(line) for line in errors.lines], errors.refused


@dataclass(slots=True)
class _OneOf:
    """A value of none of several forms: the messages below its own name the forms, or a mapping's missing keys."""

    place: str
    shown: str
    keys: list[str] = field(default_factory=list)
    forms: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        if self.keys:
            return f"{self.place}: one of {', '.join(self.keys)} is missing"
        return f"{self.place}: it must be {' or '.join(self.forms)}{self.shown and f', not {self.shown}'}"

    def add(self, problem: str) -> None:
        if match := _MISSING.fullmatch(problem):
            self.keys.append(match["key"])
        elif match := _GOT.fullmatch(problem):
            self.forms.append(f"{_BOUNDS[match['bound']]}{match['want']}")
        elif match := _PATTERN.fullmatch(problem):
            self.forms.append(f"a text that matches {match['pattern']}")
        else:
            self.forms.append(problem.removeprefix("value must be "))


class _SchemaErrors:
    """The lines and refused values of the messages so far."""

    def __init__(self, values: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        self.values, self.defaults = values, defaults
        self.lines: list[str | _OneOf] = []
        self.refused: list[ValuePath] = []
        self._one_of: dict[str, _OneOf] = {}
        self._unknown_name = ""  # the message after that of an unknown name lists the known ones

    def add(self, at: str, problem: str, *, is_explained: bool) -> None:
        """Read the message about the value `at`; `is_explained` if the next message is below this one."""
        path = tuple(part.replace("~1", "/").replace("~0", "~") for part in at.split("/")[1:])
        shown_field = ".".join(path) or "the values"
        if problem == _ONE_OF:
            self._one_of[at] = _OneOf(shown_field, _show_value(path, _value_at(path, self.values)))
            self.lines.append(self._one_of[at])
            self.refused.append(path)
        elif at in self._one_of:
            self._one_of[at].add(problem)
        elif problem.endswith(", want null") or (problem.endswith("failed") and is_explained):
            pass  # other messages have the details
        elif match := _UNKNOWN_NAME.fullmatch(problem):
            self._add_unknown_name(match["name"])
        elif not path and self.lines and str(self.lines[-1]).endswith(f"no such key: {self._unknown_name!r}"):
            self.lines[-1] = f"{self.lines[-1]}{self._known_names(problem)}"
        elif match := _UNKNOWN_KEYS.fullmatch(problem):
            keys = re.findall(r"'([^']*)'", match["keys"])
            known = _value_at(_path_in_defaults(path), self.defaults)
            self.lines += [f"{shown_field}: no such key: {key!r}{_suggestion(key, known)}" for key in keys]
            self.refused += [(*path, key) for key in keys]
        else:
            self.lines.append(
                f"{shown_field}: {_describe_expected(problem, _show_value(path, _value_at(path, self.values)))}"
            )
            self.refused.append(path)

    def _add_unknown_name(self, name: str) -> None:
        """Add the message about a key that its mapping does not allow; the schema does not say of which mapping."""
        places = list(_find_key(name, self.values))
        mapping = ".".join(places[0][:-1]) if places else ""
        self.lines.append(f"{mapping or 'the values'}: no such key: {name!r}")
        self.refused += places
        self._unknown_name = name

    def _known_names(self, problem: str) -> str:
        if not problem.startswith(_CHOICE):
            match = _PATTERN.fullmatch(problem)
            return f", which does not match pattern {match['pattern']}" if match else f": {problem}"
        names = re.findall(r"'([^']*)'", problem.removeprefix(_CHOICE))
        return _suggestion(self._unknown_name, dict.fromkeys(names))


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _describe_expected(problem: str, shown: str) -> str:
    """Say what the schema expected, and the value that it refused, if that may be shown."""
    if match := _GOT.fullmatch(problem):
        quotes = ": put it in quotes" if shown and (match["got"], match["want"]) == ("number", "string") else ""
        return f"it must be {_BOUNDS[match['bound']]}{match['want']}, not {shown or match['got']}{quotes}"
    if problem.startswith(_CHOICE):
        return f"{problem}, not {shown}" if shown else problem
    if problem == "'not' failed":
        return f"{shown or 'this value'} is not allowed here"
    if match := _PATTERN.fullmatch(problem):
        return f"{shown or 'it'} does not match pattern {match['pattern']}"
    return problem


def _show_value(path: ValuePath, value: Any) -> str:
    """Return a value, short and on one line; "" for one that may be secret or is a mapping."""
    if any(_SECRET.search(part) for part in path) or isinstance(value, Mapping | list) or value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    text = repr(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}..."


def _suggestion(key: str, known: Any) -> str:
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.6) if isinstance(known, Mapping) else []
    return f" (did you mean {close[0]}?)" if close else ""


def _path_in_defaults(path: ValuePath) -> ValuePath:
    """Return where the defaults list this path's keys; those of a pool are in workers.defaults."""
    return ("workers", "defaults", *path[3:]) if path[:2] == ("workers", "pools") and len(path) > 2 else path


def _value_at(path: ValuePath, values: Any) -> Any:
    for part in path:
        if isinstance(values, Mapping):
            values = values.get(part)
        elif isinstance(values, list) and part.isdigit() and int(part) < len(values):
            values = values[int(part)]
        else:
            return None
    return values


def _find_key(name: str, values: Mapping[str, Any], above: ValuePath = ()) -> Iterator[ValuePath]:
    """Yield the path of every key of this name."""
    for key, value in values.items():
        if key == name:
            yield (*above, key)
        if isinstance(value, Mapping):
            yield from _find_key(name, value, (*above, str(key)))
