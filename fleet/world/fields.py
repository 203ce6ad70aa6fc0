"""Strict reading of JSON objects from other programs: one value of the wrong type makes the whole object unreadable."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import NoReturn

from fleet import FleetError

Object = Mapping[str, object]
BITS = 64
_DECODER = json.JSONDecoder()
_SPACE = re.compile(r"[ \t\n\r]*")


class Fields:
    """The fields of one JSON object, read by type. `path` names the object in errors."""

    __slots__ = ("data", "path")

    def __init__(self, value: object, path: str = "") -> None:
        """Treat null as an empty object."""
        self.path = path
        if value is not None and not isinstance(value, dict):
            raise FleetError(f"read {path or 'the object'}", f"wanted a mapping, not {type(value).__name__}")
        self.data: Object = value or {}

    def where(self, key: str) -> str:
        return f"{self.path}.{key}" if self.path else key

    def fail(self, key: str, why: str) -> NoReturn:
        raise FleetError(f"read {self.where(key)}", why)

    def sub(self, key: str) -> Fields:
        return Fields(self.data.get(key), self.where(key))

    def subs(self, key: str) -> list[Fields]:
        where = self.where(key)
        return [Fields(item, where) for item in self.items(key)]

    def items(self, key: str) -> list[object]:
        value = self.data.get(key)
        if value is None:
            return []
        if not isinstance(value, list | tuple):
            self.fail(key, f"wanted a list, not {type(value).__name__}")
        return list(value)

    def text(self, key: str, *, needed: bool = False) -> str:
        value = self.data.get(key)
        if value is None and not needed:
            return ""
        if not isinstance(value, str) or (needed and not value):
            self.fail(key, f"wanted text, not {type(value).__name__}")
        return value

    def texts(self, key: str) -> Mapping[str, str]:
        """Read a mapping of text to text."""
        fields = self.sub(key)
        return {name: fields.text(name) for name in fields.data}

    def strings(self, key: str) -> list[str]:
        """Read a list of text."""
        texts = self.items(key)
        for item in texts:
            if not isinstance(item, str) or not item:
                self.fail(key, f"wanted text, not {type(item).__name__}")
        return [str(item) for item in texts]

    def flag(self, key: str) -> bool:
        value = self.data.get(key, False)
        if value is not None and not isinstance(value, bool):
            self.fail(key, f"wanted true or false, not {type(value).__name__}")
        return bool(value)

    def number(self, key: str) -> int:
        """Read a whole number, or Slurm's {set, infinite, number}."""
        value = self.data.get(key)
        if isinstance(value, dict):
            value = value.get("number") if value.get("set") else 0
        if value is None:
            return 0
        if isinstance(value, bool) or not isinstance(value, int):
            self.fail(key, f"wanted a whole number, not {type(value).__name__}")
        if value.bit_length() > BITS:  # such a number overflows where it is used as a time
            self.fail(key, f"wanted a number of {BITS} bits")
        return value

    def moment(self, key: str) -> float:
        """Read a time as Kubernetes writes it, 2026-11-20T10:32:18Z with or without fractions; 0 if it is missing."""
        text = self.text(key)
        if not text:
            return 0.0
        try:
            return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()
        except (ValueError, OverflowError):
            self.fail(key, f"{text[:40]!r} is no time")


def iterate_items(text: str, key: str, rest: dict[str, object]) -> Iterator[object]:
    """Yield the items of one list of a JSON object, one by one, without keeping them.

    `rest` receives the other fields, and `key` as well if it is not a list. ValueError: the text is no such object.
    """
    cursor = _Cursor(text)
    cursor.take("{")
    for _ in cursor.until("}"):
        name = cursor.value()
        cursor.take(":")
        if not isinstance(name, str) or name in rest:
            raise ValueError(name)
        if name == key and cursor.next() == "[":
            rest[name] = None
            cursor.take("[")
            for _ in cursor.until("]"):
                yield cursor.value()
        else:
            rest[name] = cursor.value()
    if cursor.next():
        raise ValueError("more than one value")


class _Cursor:
    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0

    def next(self) -> str:
        """Return the next character; an empty text at the end."""
        if (space := _SPACE.match(self.text, self.at)) is not None:
            self.at = space.end()
        return self.text[self.at : self.at + 1]

    def take(self, letter: str) -> None:
        if self.next() != letter:
            raise ValueError(letter)
        self.at += 1

    def value(self) -> object:
        self.next()
        value, self.at = _DECODER.raw_decode(self.text, self.at)
        return value

    def until(self, end: str) -> Iterator[None]:
        """Stop before each item until the closing letter."""
        if self.next() != end:
            yield
            while self.next() == ",":
                self.take(",")
                yield
        self.take(end)
