"""The plan for each image of a build, and its result. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from images.make.plan import Image


@dataclass(frozen=True, slots=True)
class Planned:
    """The plan for one image."""

    image: Image
    present: bool
    why: tuple[str, ...]


@dataclass(slots=True)
class Result:
    """The result for one image."""

    image: Image
    why: tuple[str, ...]
    seconds: float = 0.0
    built: bool = False
