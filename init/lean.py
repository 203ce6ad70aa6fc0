"""Small stand-ins for parts of the standard library whose import would delay PID 1's first service.

- `signal`, `heapq`: the C half of each module. `signal` itself turns each number into an enum, and `heapq` repeats in
  Python what its C half does.
- `read_json`: the C scanner. `json` compiles six regular expressions on import.
- `record`, `replace`, `fields`, `Choice`: the one form of `dataclasses` and `enum` that this package uses. A record is
  frozen, each field is annotated and each default immutable. It has no real slots: those need a second class for each
  record, to refuse what a frozen record refuses anyway. A choice's members are its only instances, each with name and
  value, found by value, iterated in order, compared by identity.

Type checkers see the real modules. The costs: docs/decisions/pid-1-start-in-instructions.md.
"""

from __future__ import annotations

__all__ = ["Choice", "fields", "heapq", "read_json", "record", "replace", "signal"]

# A literal, not imported: `typing` alone costs as much as everything else here. Type checkers know the name.
TYPE_CHECKING = False
if TYPE_CHECKING:
    import heapq
    import signal
    from dataclasses import dataclass as record
    from enum import Enum as Choice
    from typing import Any, TypeVar

    T = TypeVar("T")
else:
    import _heapq as heapq
    import _signal as signal

    def record(*, frozen=True, slots=True):  # the only values used here
        def make(cls):
            names = cls.__match_args__ = tuple(cls.__annotations__)
            defaults = {name: cls.__dict__[name] for name in names if name in cls.__dict__}
            cls.__init__ = _initialiser(cls.__name__, names, defaults)
            cls.__eq__, cls.__hash__, cls.__repr__ = _equal, _hash, _repr
            cls.__setattr__ = cls.__delattr__ = _refuse
            return cls

        return make

    class _Closed(type):
        def __new__(cls, class_name, bases, body):
            made = super().__new__(cls, class_name, bases, body)
            members = {}
            for name, value in body.items():
                if name.startswith("_"):
                    continue
                member = members[value] = object.__new__(made)
                member.__dict__.update(name=name, value=value)
                setattr(made, name, member)
            made._members = members
            return made

        def __call__(cls, value):
            try:
                return cls._members[value]
            except KeyError:
                raise ValueError(f"{value!r} is not a {cls.__name__}") from None

        def __iter__(cls):
            return iter(cls._members.values())

        def __len__(cls):
            return len(cls._members)

    class Choice(metaclass=_Closed):
        def __setattr__(self, name, value):
            raise AttributeError(f"{self} is a closed choice: cannot change {name}")

        def __repr__(self):
            return f"{type(self).__name__}.{self.name}"

        def __reduce__(self):  # copies and pickles keep identity, by which members are compared
            return type(self), (self.value,)


def read_json(text: str) -> object:
    """Parse JSON like `json.loads`, which takes over for anything that is not one valid value."""
    from _json import make_scanner

    try:
        value, end = make_scanner(_Rules)(text, 0)  # type: ignore[arg-type]  # typeshed knows one user of it
        if not text[end:].strip():
            return value
    except (StopIteration, ValueError, SystemError):
        pass  # without `json` loaded the scanner cannot report the error and may raise the wrong exception
    from json import loads

    return loads(text)


class _Rules:
    """The decoder attributes that the scanner reads; defaults of `json.JSONDecoder`."""

    strict = True
    object_hook = None
    object_pairs_hook = None
    parse_float = float
    parse_int = int
    parse_constant = float  # float() reads NaN, Infinity and -Infinity


def _initialiser(cls_name: str, names: tuple[str, ...], defaults: dict[str, Any]) -> Any:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807  # becomes the class's own
        placed = dict(zip(names, args, strict=False))
        if len(args) > len(names):
            raise TypeError(f"{cls_name} takes {len(names)} fields, not {len(args)}")
        for name in kwargs:
            if name in placed:
                raise TypeError(f"{cls_name}: {name} given twice")
        values = {**defaults, **placed, **kwargs}
        for name in names:
            if name not in values:
                raise TypeError(f"{cls_name} lacks {name}")
        if len(values) > len(names):
            unknown = next(name for name in kwargs if name not in names)
            raise TypeError(f"{cls_name} has no field {unknown}")
        self.__dict__.update(values)  # bypasses the refusal of frozen records

    return __init__


def _values(self: Any) -> tuple[Any, ...]:
    return tuple(getattr(self, name) for name in self.__match_args__)


def _equal(self: Any, other: Any) -> Any:
    return _values(self) == _values(other) if other.__class__ is self.__class__ else NotImplemented


def _hash(self: Any) -> int:
    return hash((self.__class__, _values(self)))


def _repr(self: Any) -> str:
    return f"{type(self).__name__}({', '.join(f'{name}={getattr(self, name)!r}' for name in self.__match_args__)})"


def _refuse(self: Any, name: str, value: Any = None) -> None:
    raise AttributeError(f"{type(self).__name__} is frozen: cannot change {name}")


def replace(item: T, **changes: Any) -> T:
    """Return a copy of the record with some fields changed."""
    values: dict[str, Any] = item.__dict__
    if unknown := changes.keys() - values.keys():
        raise TypeError(f"{type(item).__name__} has no field {min(unknown)}")
    made = object.__new__(type(item))
    made.__dict__.update(values)
    made.__dict__.update(changes)
    return made


def fields(item: Any) -> dict[str, Any]:
    """Return a record's fields by name, one level deep."""
    return {name: getattr(item, name) for name in item.__match_args__}
