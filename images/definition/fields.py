"""Strict reader of a mapping from YAML: refuses unknown keys and wrong types. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import TypeVar

from images.definition.spec import Selected
from images.errors import ImagesError, nearest

T = TypeVar("T")


class DefinitionFields:
    """A mapping read strictly: each key once, by type; a leftover key is an error."""

    def __init__(self, data: object, file: str, known: Iterable[str], where: str = "") -> None:
        self.file, self.where = file, where
        if data is None:
            data = {}
        if not isinstance(data, dict):
            raise self.error("", f"expected a mapping, found {kind(data)}")
        self.data: dict[str, object] = data
        known = set(known)
        for key in data:
            if key not in known:
                raise self.error(str(key), f"unknown key {key!r}", nearest(str(key), known))

    def error(self, key: str, why: str, hint: str | None = None) -> ImagesError:
        field = ".".join(part for part in (self.where, key) if part)
        return ImagesError("read the definition", why, file=self.file, field=field or None, hint=hint)

    def __contains__(self, key: str) -> bool:
        return key in self.data

    def text(self, key: str, default: str | None = None) -> str:
        value = self.data.get(key, default)
        if value is None:
            raise self.error(key, f"{key!r} is missing")
        return self.worded(key, value)

    def worded(self, field: str, value: object) -> str:
        if not isinstance(value, str):
            raise self.error(field, f"expected text, found {kind(value)}", quoting(value))
        return value

    def optional(self, key: str) -> str | None:
        return self.text(key) if self.data.get(key) is not None else None

    def number(self, key: str) -> int:
        value = self.data.get(key)
        if not isinstance(value, int) or isinstance(value, bool):
            raise self.error(key, f"expected a number, found {kind(value)}")
        return value

    def mode(self, key: str) -> int | None:
        text = self.optional(key)
        if text is None:
            return None
        if not re.fullmatch(r"[0-7]{4}", text):
            raise self.error(key, f"expected four octal digits, found {text!r}", 'for instance "0644"')
        return int(text, 8)

    def flag(self, key: str, default: bool) -> bool:
        value = self.data.get(key, default)
        if not isinstance(value, bool):
            raise self.error(key, f"expected true or false, found {kind(value)}")
        return value

    def items(self, key: str) -> list[object]:
        value = self.data.get(key)
        if value is None:
            return []
        if not isinstance(value, list):
            raise self.error(key, f"expected a list, found {kind(value)}")
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        return tuple(self.worded(f"{key}[{index}]", value) for index, value in enumerate(self.items(key)))

    def mapping(self, key: str) -> dict[str, object]:
        value = self.data.get(key)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise self.error(key, f"expected a mapping, found {kind(value)}")
        return value

    def text_map(self, key: str) -> dict[str, str]:
        return {str(name): self.worded(f"{key}.{name}", value) for name, value in self.mapping(key).items()}

    def selected(self, key: str, one: Callable[[str, object], T], selectors: frozenset[str]) -> Selected[T]:
        """Read a list, or a map of selectors to lists."""
        value = self.data.get(key)
        if value is None:
            return Selected()
        groups = value if isinstance(value, dict) else {"all": value}
        parts = []
        for when, listed in groups.items():
            names = frozenset(str(when).split("+"))
            for name in names - selectors:
                raise self.error(f"{key}.{when}", f"unknown selector {name!r}", nearest(name, selectors))
            field = f"{key}.{when}" if isinstance(value, dict) else key
            if not isinstance(listed, list):
                raise self.error(field, f"expected a list, found {kind(listed)}")
            parts.append((names, tuple(one(f"{field}[{index}]", item) for index, item in enumerate(listed))))
        return Selected(tuple(parts))

    def selected_text(self, key: str, selectors: frozenset[str], *, line: bool = False) -> Selected[str]:
        def one(field: str, item: object) -> str:
            text = self.worded(field, item)
            if line and "\n" in text.strip():
                raise self.error(field, "a command is one line", "use a template in images/templates/ (component)")
            return text.strip() if line else text

        return self.selected(key, one, selectors)


def kind(value: object) -> str:
    names = {dict: "a mapping", list: "a list", str: "text", bool: "true/false", int: "a number", type(None): "nothing"}
    return names.get(type(value), type(value).__name__)


def quoting(value: object) -> str | None:
    """Suggest quotes: YAML reads 24.11 as a number, no as false, 2020-01-01 as a date."""
    return None if value is None or isinstance(value, dict | list) else "put it in quotes"
