"""Typed readers for people's mappings: errors name the expected value, the place and the nearest match."""

from __future__ import annotations

from init.errors import ConfigError, nearest
from init.lean import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import NoReturn, TypeVar

    from init.lean import Choice

    E = TypeVar("E", bound=Choice)
    Variable = tuple[str, str | None]  # name, default

_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
# Texts are parsed by hand: loading `re` and compiling two patterns costs 4 ms of each boot.
_WORD_CHARACTERS = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_")
_NAME_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyz0123456789-_.")
ENDLESS = 1e10  # seconds, about 300 years: longer is no duration, nor are infinity and NaN
_LONE = ("", None)  # a dollar that starts no variable


@record(frozen=True, slots=True)
class Reader:
    """A mapping, its place, and the name of what it describes."""

    data: Mapping[str, object]
    what: str
    file: str
    path: str = ""

    def fail(self, key: str, why: str, hint: str = "") -> NoReturn:
        field = ".".join(part for part in (self.path, key) if part)
        raise ConfigError(f"read {self.what}", why, file=self.file, field=field, hint=hint)

    def only(self, *known: str) -> None:
        for key in self.data:
            if key not in known:
                self.fail(str(key), "unknown key", nearest(str(key), list(known)))

    def has(self, key: str) -> bool:
        return self.data.get(key) is not None

    def sub(self, key: str) -> Reader:
        value = self.data.get(key)
        path = ".".join(part for part in (self.path, key) if part)
        if value is None:
            return Reader({}, self.what, self.file, path)
        if not isinstance(value, dict):
            self.fail(key, f"wanted a mapping, not {describe_value(value)}")
        return Reader(value, self.what, self.file, path)

    def text(self, key: str, default: str = "") -> str:
        value = self.data.get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            self.fail(key, f"wanted text, not {describe_value(value)}", "quote it" if isinstance(value, bool) else "")
        return str(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.data.get(key, default)
        if not isinstance(value, bool):
            self.fail(key, f"wanted true or false, not {describe_value(value)}")
        return value

    def number(self, key: str, default: int, *, least: int = 0) -> int:
        value = self.data.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            self.fail(key, f"wanted a whole number, not {describe_value(value)}")
        if value < least:
            self.fail(key, f"wanted at least {least}, not {value}")
        return value

    def real(self, key: str, default: float, *, most: float) -> float:
        value = self.data.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            self.fail(key, f"wanted a number, not {describe_value(value)}")
        if not 0 <= value <= most:
            self.fail(key, f"wanted between 0 and {most:g}, not {value}")
        return float(value)

    def seconds(self, key: str, default: float) -> float:
        """Read a duration: a number of seconds, or text such as 500ms, 10s, 2m, 1h."""
        value = self.data.get(key)
        if value is None:
            return default
        if isinstance(value, int | float) and not isinstance(value, bool):
            if not 0 <= value < ENDLESS:
                self.fail(key, f"wanted a duration, not {value}")
            return float(value)
        parsed = duration(value) if isinstance(value, str) else None
        if parsed is None or parsed >= ENDLESS:
            self.fail(
                key, f"wanted a duration, not {describe_value(value)}", "a number of seconds, or 500ms, 10s, 2m, 1h"
            )
        return parsed

    def choice(self, key: str, kind: type[E], default: E) -> E:
        value = self.data.get(key)
        if value is None:
            return default
        chosen = next((item for item in kind if item.value == value), None)
        if chosen is None:
            names = [str(item.value) for item in kind]
            hint = nearest(value, names) if isinstance(value, str) else ""
            self.fail(key, f"{describe_value(value)} is not one of {', '.join(names)}", hint)
        return chosen

    def texts(self, key: str) -> tuple[str, ...]:
        value = self.data.get(key)
        if value is None:
            return ()
        if not isinstance(value, list):
            self.fail(key, f"wanted a list, not {describe_value(value)}")
        for item in value:
            if isinstance(item, bool) or not isinstance(item, str | int | float):
                self.fail(key, f"wanted a list of text, not {describe_value(item)} in it", "quote it")
        return tuple(str(item) for item in value)

    def numbers(self, key: str, *, least: int = 0) -> tuple[int, ...]:
        value = self.data.get(key)
        if value is None:
            return ()
        if not isinstance(value, list):
            self.fail(key, f"wanted a list, not {describe_value(value)}")
        for item in value:
            if isinstance(item, bool) or not isinstance(item, int) or item < least:
                self.fail(key, f"wanted whole numbers from {least} on, not {describe_value(item)} among them")
        return tuple(value)

    def names(self, key: str) -> tuple[str, ...]:
        listed = self.texts(key)
        for name in listed:
            if not is_name(name):
                self.fail(key, f"{name!r} is not a service's name", "lower case letters, digits, - _ .")
        if len(set(listed)) != len(listed):
            self.fail(key, "a name appears twice")
        return listed

    def command(self, key: str) -> tuple[str, ...]:
        """Read an argument vector. A single string is refused: there is no shell to split it."""
        value = self.data.get(key)
        if isinstance(value, str):
            self.fail(key, "wanted a list of arguments, not one string", f"write [{', '.join(value.split())}]")
        arguments = self.texts(key)
        if self.has(key) and not arguments:
            self.fail(key, "an empty command")
        for argument in arguments:
            self.placeholders(key, argument)
        return arguments

    def commands(self, key: str) -> tuple[tuple[str, ...], ...]:
        value = self.data.get(key)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(isinstance(item, list) for item in value):
            self.fail(key, "wanted a list of commands, each a list of arguments")
        return tuple(Reader({key: item}, self.what, self.file, self.path).command(key) for item in value)

    def placeholders(self, key: str, text: str, *, shown: bool = True) -> None:
        if _LONE in _parts(text):
            where = repr(text) if shown else "it"
            self.fail(key, f"a lone $ in {where}", "write ${NAME}, ${NAME:-default}, or $$ for a dollar")


def duration(text: str) -> float | None:
    """Parse seconds: a number and an optional unit."""
    text = text.strip()
    count = text.rstrip("mshd")
    unit = text[len(count) :] or "s"
    whole, dot, fraction = count.rstrip().partition(".")
    if unit not in _UNITS or not whole.isdecimal() or (dot and not fraction.isdecimal()):
        return None
    return float(count) * _UNITS[unit]


def number(text: str) -> int | None:
    """Parse a whole number in ASCII digits, below 10^18.

    `str.isdigit` accepts more than `int` reads: a superscript two, or five thousand nines.
    """
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 19 else None


def is_name(text: str) -> bool:
    """Tell if a text is a name: lower case, digits, and single - _ . between them; a letter first."""
    if not text or not _NAME_CHARACTERS.issuperset(text) or not text[0].isalpha():
        return False
    return all(text.replace("_", "-").replace(".", "-").split("-"))


def expand(text: str, env: Mapping[str, str]) -> str:
    """Substitute ${NAME} and ${NAME:-default} from the environment; $$ is a dollar.

    KeyError names an unset variable.
    """
    return "".join(part if isinstance(part, str) else _value(part, env) for part in _parts(text))


def _value(variable: Variable, env: Mapping[str, str]) -> str:
    if variable == _LONE:
        return "$"
    name, default = variable
    value = env.get(name, "")
    if value or (default is None and name in env):
        return value
    if default is None:
        raise KeyError(name)
    return default


def _parts(text: str) -> list[str | Variable]:
    """Split into plain text and variables. A dollar that starts none is _LONE."""
    plain, dollar, rest = text.partition("$")
    parts: list[str | Variable] = [plain]
    while dollar:
        if rest.startswith("$"):
            parts.append("$")
            rest = rest[1:]
        elif parsed := _variable(rest):
            variable, rest = parsed
            parts.append(variable)
        else:
            parts.append(_LONE)
        plain, dollar, rest = rest.partition("$")
        parts.append(plain)
    return parts


def _variable(text: str) -> tuple[Variable, str] | None:
    """Parse the `{NAME}` or `{NAME:-default}` at the start of a text; return it with the rest."""
    inside, brace, rest = text[1:].partition("}")
    name, colon, default = inside.partition(":-")
    if not (text.startswith("{") and brace and name and _WORD_CHARACTERS.issuperset(name) and not name[0].isdecimal()):
        return None
    return (name, default if colon else None), rest


def describe_value(value: object) -> str:
    """Describe a value. A nested list is cut: YAML can repeat a part, and a few lines of it would fill the memory."""
    if isinstance(value, list | dict):
        from reprlib import Repr  # imported late: only an error needs it

        brief = Repr()
        brief.maxlevel, brief.maxstring, brief.maxother = 2, 80, 80
        return f"{type(value).__name__} {brief.repr(value)}"
    return f"{type(value).__name__} {value!r}"
