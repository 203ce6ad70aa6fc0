"""SCIM's filters and attribute paths (RFC 7644, 3.4.2.2 and 3.5.2): parse them and match resources. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from fleet import FleetError

Resource = Mapping[str, Any]
Filter = Callable[[Resource], bool]

USER = "urn:ietf:params:scim:schemas:core:2.0:User"
GROUP = "urn:ietf:params:scim:schemas:core:2.0:Group"
# What SCIM's core has no attribute for: ssh keys and the uid.
EXTENSION = "urn:ietf:params:scim:schemas:extension:minivm:2.0:User"
LONGEST, DEEPEST, MOST_TERMS = 4096, 10, 50
OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    "eq": lambda have, want: have == want,
    "ne": lambda have, want: have != want,
    "co": lambda have, want: want in have,
    "sw": lambda have, want: have.startswith(want),
    "ew": lambda have, want: have.endswith(want),
    "gt": lambda have, want: have > want,
    "ge": lambda have, want: have >= want,
    "lt": lambda have, want: have < want,
    "le": lambda have, want: have <= want,
}
# Compared without case; ids and all else are compared exactly.
CASELESS = frozenset({"username", "displayname", "display"})
_TOKEN = re.compile(r'\s*(?:([()\[\]])|("(?:[^"\\]|\\.)*")|([^\s()\[\]"]+))')
_PATH = re.compile(r"([^\[\]]{1,200}?)(?:\[(.*)\])?(?:\.([A-Za-z$][A-Za-z0-9_$-]{0,60}))?", re.DOTALL)


class ScimError(FleetError):
    """A refused request, as SCIM answers it: HTTP status, scimType of RFC 7644 (3.12) or "", and the reason."""

    def __init__(self, status: int, detail: str, scim_type: str = "") -> None:
        super().__init__("serve SCIM", detail)
        self.status, self.detail, self.scim_type = status, detail, scim_type


def attribute(name: str) -> tuple[str, ...]:
    """Split an attribute's name, with or without its schema, into its parts in lower case."""
    lower = name.strip().lower()
    for schema in (USER, GROUP):
        lower = lower.removeprefix(f"{schema.lower()}:")
    extension = EXTENSION.lower()
    if lower == extension:
        return (extension,)
    if lower.startswith(f"{extension}:"):
        return (extension, *lower.removeprefix(f"{extension}:").split("."))
    return (lower,) if lower.startswith("urn:") else tuple(lower.split("."))


def values(resource: Any, parts: tuple[str, ...]) -> Iterator[Any]:
    """Yield the simple values at a path: those of a list's elements, and a complex attribute's `value`."""
    if isinstance(resource, list):
        for item in resource:
            yield from values(item, parts)
    elif isinstance(resource, Mapping):
        wanted, rest = (parts[0], parts[1:]) if parts else ("value", ())
        for key, value in resource.items():
            if key.lower() == wanted:
                yield from values(value, rest)
    elif not parts and resource not in (None, ""):
        yield resource


class _Parser:
    """Descend through a filter: `or` binds less than `and`, which binds less than `not` and brackets."""

    def __init__(self, text: str) -> None:
        if len(text) > LONGEST:
            self.fail(f"{len(text)} characters, more than {LONGEST}")
        self.tokens: list[str] = []
        at, end = 0, len(text.rstrip())
        while at < end:
            match = _TOKEN.match(text, at)
            if not match:
                self.fail(f"no word at {text[at : at + 20]!r}")
            self.tokens.append(match[0].strip())
            at = match.end()
        self.terms = 0

    def fail(self, why: str) -> NoReturn:
        raise ScimError(400, f"the filter cannot be read: {why}", "invalidFilter")

    def peek(self) -> str:
        return self.tokens[0].lower() if self.tokens else ""

    def take(self, *wanted: str) -> str:
        if not self.tokens or (wanted and self.peek() not in wanted):
            self.fail(f"expected {' or '.join(wanted) or 'a word'} at {' '.join(self.tokens[:3])[:40]!r}")
        return self.tokens.pop(0)

    def whole(self) -> Filter:
        expression = self.either(0)
        if self.tokens:
            self.fail(f"nothing may follow at {self.tokens[0][:40]!r}")
        return expression

    def either(self, depth: int) -> Filter:
        if depth > DEEPEST:
            self.fail("nested too deeply")
        terms = self.joined("or", lambda: self.both(depth))
        return terms[0] if len(terms) == 1 else lambda resource: any(term(resource) for term in terms)

    def both(self, depth: int) -> Filter:
        terms = self.joined("and", lambda: self.term(depth))
        return terms[0] if len(terms) == 1 else lambda resource: all(term(resource) for term in terms)

    def joined(self, word: str, read: Callable[[], Filter]) -> list[Filter]:
        """Read filters with this word between them."""
        terms = [read()]
        while self.peek() == word:
            self.take()
            terms.append(read())
        return terms

    def term(self, depth: int) -> Filter:
        self.terms += 1
        if self.terms > MOST_TERMS:
            self.fail(f"more than {MOST_TERMS} terms")
        is_negated = self.peek() == "not"
        if is_negated:
            self.take()
        if is_negated or self.peek() == "(":
            self.take("(")
            inner = self.either(depth + 1)
            self.take(")")
            return (lambda resource: not inner(resource)) if is_negated else inner
        parts = attribute(self.take())
        if self.peek() == "[":
            self.take()
            element = self.either(depth + 1)
            self.take("]")
            return lambda resource: any(element(item) for item in _elements(resource, parts))
        operator = self.take("pr", *OPERATORS).lower()
        if operator == "pr":
            return lambda resource: any(True for _ in values(resource, parts))
        return _comparison(parts, operator, self.literal())

    def literal(self) -> Any:
        token = self.take()
        try:
            value = json.loads(token if token.startswith('"') else token.lower())
        except ValueError:
            self.fail(f"{token[:40]!r} is no value; write text in double quotes")
        if isinstance(value, (dict, list)):
            self.fail("a value is text, a number, true, false or null")
        return value


def _comparison(parts: tuple[str, ...], operator: str, want: Any) -> Filter:
    compare, caseless = OPERATORS[operator], parts[-1] in CASELESS
    want = want.lower() if caseless and isinstance(want, str) else want

    def matches(have: Any) -> bool:
        if type(have) is not type(want):
            return operator == "ne"
        if not isinstance(have, str) and operator in ("co", "sw", "ew"):
            return False
        return compare(have.lower() if caseless and isinstance(have, str) else have, want)

    def accepts(resource: Resource) -> bool:
        have = list(values(resource, parts))
        if operator == "ne":
            return all(map(matches, have))
        return any(map(matches, have)) or (want is None and not have and operator == "eq")

    return accepts


def _elements(resource: Resource, parts: tuple[str, ...]) -> Iterator[Resource]:
    for key, value in resource.items():
        if len(parts) == 1 and key.lower() == parts[0] and isinstance(value, list):
            yield from (item for item in value if isinstance(item, Mapping))


def parse_filter(text: str) -> Filter:
    return _Parser(text).whole()


@dataclass(frozen=True, slots=True)
class Path:
    """The target of a PATCH operation: an attribute, elements of it that match, and a part of each."""

    parts: tuple[str, ...]
    element: Filter | None = None
    sub: str = ""


def parse_path(text: str) -> Path:
    match = _PATH.fullmatch(text.strip()) if len(text) <= LONGEST else None
    if not match:
        raise ScimError(400, f"{text[:60]!r} is no path of an attribute", "invalidPath")
    name, element, sub = match.groups()
    if element is None:
        return Path(attribute(text))
    return Path(attribute(name), parse_filter(element), (sub or "").lower())
