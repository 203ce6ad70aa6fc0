"""Frozen records: like `dataclasses`, without its 15 ms and 3 MB before PID 1's first service.

Type checkers see the real `dataclass` and check its slots. The decorator below implements the one form that this
package uses: every field annotated, defaults immutable, frozen. Real slots would need a second class for each record, a
million instructions in all, to refuse what a frozen record refuses anyway.
"""

from __future__ import annotations

__all__ = ["fields", "record", "replace"]

# A literal, not imported: `typing` alone costs as much as everything else here. Type checkers know the name.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from dataclasses import dataclass as record
    from typing import Any, TypeVar

    T = TypeVar("T")
else:

    def record(*, frozen=True, slots=True):  # the only values used here
        def make(cls):
            names = cls.__match_args__ = tuple(cls.__annotations__)
            defaults = {name: cls.__dict__[name] for name in names if name in cls.__dict__}
            cls.__init__ = _initialiser(cls.__name__, names, defaults)
            cls.__eq__, cls.__hash__, cls.__repr__ = _equal, _hash, _repr
            cls.__setattr__ = cls.__delattr__ = _refuse
            return cls

        return make


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
