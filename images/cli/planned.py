"""What a build would make of each image, and what it made. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from images.make.plan import Image


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
