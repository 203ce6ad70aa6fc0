"""Reads what other programs answer: each value by its type; an object that is not as promised is refused as a whole."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from datetime import datetime

from fleet.errors import FleetError

Object = Mapping[str, object]
BITS = 64
_DECODER = json.JSONDecoder()
_SPACE = re.compile(r"[ \t\n\r]*")


def mapping(value: object, where: str) -> Object:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise FleetError(f"read {where}", f"wanted a mapping, not {type(value).__name__}")
    return value


def items(value: object, where: str) -> list[object]:
    if value is None:
        return []
    if not isinstance(value, list | tuple):
        raise FleetError(f"read {where}", f"wanted a list, not {type(value).__name__}")
    return list(value)


def text(value: object, where: str, *, needed: bool = False) -> str:
    if value is None and not needed:
        return ""
    if not isinstance(value, str) or (needed and not value):
        raise FleetError(f"read {where}", f"wanted text, not {type(value).__name__}")
    return value


def texts(value: object, where: str) -> Mapping[str, str]:
    return {key: text(item, f"{where}.{key}") for key, item in mapping(value, where).items()}


def flag(value: object, where: str) -> bool:
    if value is None:
        return False
    if not isinstance(value, bool):
        raise FleetError(f"read {where}", f"wanted true or false, not {type(value).__name__}")
    return value


def number(value: object, where: str) -> int:
    """A whole number, or Slurm's {set, infinite, number}."""
    if isinstance(value, dict):
        value = value.get("number") if value.get("set") else 0
    if value is None:
        return 0
    if isinstance(value, bool) or not isinstance(value, int):
        raise FleetError(f"read {where}", f"wanted a whole number, not {type(value).__name__}")
    if value.bit_length() > BITS:  # some are reckoned with as hours, and what is larger by far is none
        raise FleetError(f"read {where}", f"wanted a number of {BITS} bits")
    return value


def moment(value: object, where: str) -> float:
    """Kubernetes writes 2026-11-20T10:32:18Z, and with fractions in leases; 0 where there is none."""
    said = text(value, where)
    if not said:
        return 0.0
    try:
        return datetime.fromisoformat(said.replace("Z", "+00:00")).timestamp()
    except (ValueError, OverflowError):
        raise FleetError(f"read {where}", f"{said[:40]!r} is no time") from None


def each(text: str, key: str, rest: dict[str, object]) -> Iterator[object]:
    """The items of one list of a JSON object, one by one and none kept; `rest` gets what else it says, also `key` where
    that is no list. ValueError: it is no such object."""
    here = _Cursor(text)
    here.take("{")
    for _ in here.until("}"):
        name = here.value()
        here.take(":")
        if not isinstance(name, str) or name in rest:
            raise ValueError(name)
        if name == key and here.next() == "[":
            rest[name] = None
            here.take("[")
            for _ in here.until("]"):
                yield here.value()
        else:
            rest[name] = here.value()
    if here.next():
        raise ValueError("more than one value")


class _Cursor:
    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0

    def next(self) -> str:
        """ "" at the end."""
        if (space := _SPACE.match(self.text, self.at)) is not None:
            self.at = space.end()
        return self.text[self.at : self.at + 1]

    def take(self, letter: str) -> None:
        if self.next() != letter:
            raise ValueError(letter)
        self.at += 1

    def value(self) -> object:
        self.next()
        found, self.at = _DECODER.raw_decode(self.text, self.at)
        return found

    def until(self, end: str) -> Iterator[None]:
        """Stands before each item, as long as there is another one."""
        if self.next() != end:
            yield
            while self.next() == ",":
                self.take(",")
                yield
        self.take(end)
