"""What a build would make of each image, and what it made. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from images.make.plan import Composed, Image, key_of


@dataclass(frozen=True, slots=True)
class Planned:
    """What would happen to one image."""

    image: Image
    present: bool
    why: tuple[str, ...]


@dataclass(slots=True)
class Result:
    """What happened to one image."""

    image: Image
    why: tuple[str, ...]
    seconds: float = 0.0
    built: bool = False


def needed_only(composed: Composed, planned: Sequence[Planned], roles: Iterable[str]) -> list[Planned]:
    """Without the builders whose only consumers are present already: nobody would look at what they make."""
    by_key = {item.image.key: item for item in planned}
    wanted: set[str] = set()

    def visit(key: str) -> None:
        if key in wanted:
            return
        wanted.add(key)
        item = by_key[key]
        for other in item.image.needs:
            if not item.present or other == item.image.parent:
                visit(other)

    for target in roles:
        visit(key_of(target))
    return [item for item in planned if item.image.key in wanted]
