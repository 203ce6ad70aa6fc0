"""Format the mistakes in a values file that the chart's schema and checks found, one line each. Pure."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

_LINE = re.compile(r"\s*- at '(?P<at>[^']*)': (?P<what>.*)")
_GOT = re.compile(r"(?P<bound>minimum: |maximum: |)got (?P<got>.*), want (?P<want>.*)")
_BOUNDS = {"minimum: ": "at least ", "maximum: ": "at most ", "": ""}
_EXTRA = re.compile(r"additional properties (?P<keys>.*) not allowed")
_NAME = re.compile(r"invalid propertyName '(?P<name>.*)'")
_CHOICE = "value must be one of "
_ONE_OF = "'oneOf' failed, none matched"
_MISSING = re.compile(r"missing property '(?P<key>[^']*)'")
_PATTERN = re.compile(r"'.*' does not match pattern (?P<pattern>'.*')", re.DOTALL)
# Helm's prefix, the `fail` call's place in the template: no help for a person who edits a values file.
_PLACE = re.compile(r"^execution error at \([^()]*\): ")
_SECRET = re.compile(r"secret|password|token|key", re.IGNORECASE)
LONGEST = 60

Path = tuple[str, ...]


def of_schema(text: str, values: Mapping[str, Any], defaults: Mapping[str, Any]) -> tuple[list[str], list[Path]]:
    """Return the schema's errors as `FIELD: what is wrong`, and the paths of the refused values.

    A line of unknown form is kept as it is.
    """
    lines: list[str] = []
    refused: list[Path] = []
    alternatives: dict[str, list[str]] = {}
    name = ""
    messages = text.strip().splitlines()[1:]
    for line, next_line in zip(messages, [*messages[1:], ""], strict=True):
        if not (match := _LINE.fullmatch(line)):
            lines.append(line.strip())
            continue
        at, what = match["at"], match["what"]
        path = tuple(part.replace("~1", "/").replace("~0", "~") for part in at.split("/")[1:])
        field = ".".join(path) or "the values"
        if what == _ONE_OF:
            alternatives[at] = []
            lines.append(at)  # replaced below, once its alternatives are known
            refused.append(path)
        elif at in alternatives and (missing := _MISSING.fullmatch(what)):
            alternatives[at].append(missing["key"])
        elif what.endswith(", want null") or (what.endswith("failed") and _indent(next_line) > _indent(line)):
            continue  # other lines have the details
        elif named := _NAME.fullmatch(what):
            name = named["name"]  # the schema does not say where
            places = list(_places(name, values))
            refused += places
            field = ".".join(places[0][:-1]) if places else ""
            lines.append(f"{field or 'the values'}: no such key: {name!r}")  # the next message says why
        elif not path and lines and lines[-1].endswith(f"no such key: {name!r}"):
            choices = dict.fromkeys(re.findall(r"'([^']*)'", what.removeprefix(_CHOICE)))
            lines[-1] += _nearest(name, choices) if what.startswith(_CHOICE) else f", which {what.split(' ', 1)[1]}"
        elif extra := _EXTRA.fullmatch(what):
            keys = re.findall(r"'([^']*)'", extra["keys"])
            refused += [(*path, key) for key in keys]
            known = _at(_like(path), defaults)
            lines += [f"{field}: no such key: {key!r}{_nearest(key, known)}" for key in keys]
        else:
            refused.append(path)
            lines.append(f"{field}: {_expected(what, _shown(path, _at(path, values)))}")
    for at, keys in alternatives.items():
        field = ".".join(at.split("/")[1:])
        lines = [f"{field}: one of {', '.join(keys)} is missing" if line == at else line for line in lines]
    return lines, refused


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _expected(what: str, shown: str) -> str:
    """Return what the schema expected, and what it found."""
    if got := _GOT.fullmatch(what):
        return f"it must be {_BOUNDS[got['bound']]}{got['want']}, not {shown or got['got']}"
    if what.startswith(_CHOICE):
        return f"{what}, not {shown}" if shown else what
    if what == "'not' failed":
        return f"{shown or 'this value'} is not allowed here"
    if pattern := _PATTERN.fullmatch(what):
        return f"{shown or 'it'} does not match pattern {pattern['pattern']}"
    return what


def _shown(path: Path, value: Any) -> str:
    """Return the value that was found, short and on one line; "" for one that may be secret or is a mapping."""
    if any(_SECRET.search(part) for part in path) or isinstance(value, Mapping | list) or value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    text = repr(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."


def _nearest(key: str, known: Any) -> str:
    """Return the known key that is close to an unknown one, as a suggestion."""
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.6) if isinstance(known, Mapping) else []
    return f" (did you mean {close[0]}?)" if close else ""


def _like(path: Path) -> Path:
    """Return the path in the defaults that lists this path's keys; a pool's keys are in workers.defaults."""
    return ("workers", "defaults", *path[3:]) if path[:2] == ("workers", "pools") and len(path) > 2 else path


def _at(path: Path, values: Any) -> Any:
    for part in path:
        if isinstance(values, Mapping):
            values = values.get(part)
        elif isinstance(values, list) and part.isdigit() and int(part) < len(values):
            values = values[int(part)]
        else:
            return None
    return values


def _places(name: str, values: Mapping[str, Any], above: Path = ()) -> Iterator[Path]:
    """Yield the paths of every key of this name."""
    for key, value in values.items():
        if key == name:
            yield (*above, key)
        if isinstance(value, Mapping):
            yield from _places(name, value, (*above, str(key)))


def of_checks(text: str) -> list[str]:
    """Return the mistakes that the chart's own checks found, one line each."""
    return [line for line in _PLACE.sub("", text.strip()).splitlines() if line.strip()]


def is_check(text: str) -> bool:
    """Tell a check's answer about values from an error of the chart itself."""
    return bool(_PLACE.match(text.strip()))


def beside(
    values: Mapping[str, Any], refused: Sequence[Path], check: Callable[[Mapping[str, Any]], list[str]]
) -> list[str]:
    """Check the values again without the refused ones, and return the mistakes of other fields.

    A refused value inside a list takes the list along.
    """
    left = dict(values)
    for path in refused:
        left = _without(left, path)
    fields = tuple(f"{'.'.join(path)}{end}" for path in refused for end in (":", " ", "."))
    return [line for line in check(left) if not line.startswith(fields)]


def _without(values: Mapping[str, Any], path: Path) -> dict[str, Any]:
    if not path:
        return {}
    key, *rest = path
    below = values.get(key)
    if rest and isinstance(below, Mapping):
        return {**values, key: _without(below, tuple(rest))}
    return {name: value for name, value in values.items() if name != key}
