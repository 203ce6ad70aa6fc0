"""The plan for each image of a build, and its result. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from images.make.plan import PlannedImage


@dataclass(frozen=True, slots=True)
class Planned:
    """The plan for one image."""

    image: PlannedImage
    present: bool
    why: tuple[str, ...]


@dataclass(slots=True)
class BuildResult:
    """The result for one image."""

    image: PlannedImage
    why: tuple[str, ...]
    seconds: float = 0.0
    built: bool = False
