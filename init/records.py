"""Frozen, slotted records: what `dataclasses` gives, without its 15 ms and 3 MB on PID 1's way to the first service.

Type checkers see the real `dataclass`; the decorator below serves the forms this package uses: every field
annotated, defaults immutable, frozen or not.
"""

from __future__ import annotations

__all__ = ["fields", "record", "replace"]

_put = object.__setattr__  # past the refusal of frozen records

# By value, not imported: `typing` alone costs as much as everything else here. Type checkers know the name.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from dataclasses import dataclass as record
    from typing import Any, TypeVar

    T = TypeVar("T")
else:

    def record(*, frozen=True, slots=True):
        def make(cls):
            names = tuple(cls.__annotations__)
            defaults = {name: cls.__dict__[name] for name in names if name in cls.__dict__}
            body = {key: value for key, value in cls.__dict__.items() if key not in defaults and key != "__dict__"}
            body.pop("__weakref__", None)
            body |= {
                "__slots__": names,
                "__match_args__": names,
                "__init__": _initialiser(cls.__name__, names, defaults),
                "__eq__": _equal,
                "__repr__": _repr,
                "__hash__": _hash if frozen else None,
            }
            if frozen:
                body["__setattr__"] = _refuse
                body["__delattr__"] = _refuse
            return type(cls)(cls.__name__, cls.__bases__, body)

        return make


def _initialiser(cls_name: str, names: tuple[str, ...], defaults: dict[str, Any]) -> Any:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
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
            _put(self, name, values[name])
        if len(values) > len(names):
            unknown = next(name for name in kwargs if name not in names)
            raise TypeError(f"{cls_name} has no field {unknown}")

    return __init__


def _values(self: Any) -> tuple[Any, ...]:
    return tuple(getattr(self, name) for name in self.__slots__)


def _equal(self: Any, other: Any) -> Any:
    return _values(self) == _values(other) if other.__class__ is self.__class__ else NotImplemented


def _hash(self: Any) -> int:
    return hash((self.__class__, _values(self)))


def _repr(self: Any) -> str:
    return f"{type(self).__name__}({', '.join(f'{name}={getattr(self, name)!r}' for name in self.__slots__)})"


def _refuse(self: Any, name: str, value: Any = None) -> None:
    raise AttributeError(f"{type(self).__name__} is frozen: cannot change {name}")


def replace(item: T, **changes: Any) -> T:
    """The same record with some fields changed."""
    made = object.__new__(type(item))
    for name in type(item).__slots__:  # type: ignore[attr-defined]  # every record has them
        _put(made, name, changes.pop(name) if name in changes else getattr(item, name))
    if changes:
        raise TypeError(f"{type(item).__name__} has no field {next(iter(changes))}")
    return made


def fields(item: Any) -> dict[str, Any]:
    """A record's fields by name, one level deep."""
    return {name: getattr(item, name) for name in item.__slots__}
