"""Planned images, the composed set of them, and each one's result: pure data. `compose.py` makes it."""

from __future__ import annotations

import hashlib
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field

from images.archive.locked import Slice
from images.archive.wheels import Wheel
from images.definition.spec import Artifact
from images.make import render
from images.make.content import Entry
from images.make.toolkit import ToolkitWheels

LAYER = "layer:"
NATIVE = f"{LAYER}native"  # no role stands on it: `images.make.native`


@dataclass(frozen=True, slots=True)
class PlannedImage:
    """One planned image: its name, its content, and the images that it needs."""

    key: str  # layer:NAME or role:NAME
    name: str
    repo: str
    tag: str  # its beginning, until `inputs` are known
    describe: str
    parent: str  # the key of the image below; empty: the base
    step: render.DockerfileContent
    entries: tuple[Entry, ...]
    slices: tuple[Slice, ...]  # of every layer up to here
    provides: tuple[str, ...]
    base: str = ""  # what FROM names where there is no parent; empty: bootstrapped
    artifacts: tuple[tuple[Artifact, str], ...] = ()
    absent: Mapping[str, str] = field(default_factory=dict)
    dpkg_options: tuple[str, ...] = ()
    wheels: tuple[Wheel, ...] = ()  # of every layer up to here
    toolkit: ToolkitWheels = field(default_factory=ToolkitWheels)  # those of CUDA that this one adds
    libraries: tuple[Wheel, ...] = ()  # and those of Python
    hash: str = ""  # of `inputs`
    inputs: Mapping[str, str] = field(default_factory=dict)
    directories: Mapping[str, Entry] = field(default_factory=dict)  # all that this image or one below declared

    @property
    def needs(self) -> tuple[str, ...]:
        """The keys of the images that must exist before this one."""
        return (*([self.parent] if self.parent else []), *(other for _, other in self.artifacts))

    @property
    def reference(self) -> str:
        return f"{self.repo}:{self.tag}"

    @property
    def is_role(self) -> bool:
        return self.key.startswith("role:")

    @property
    def bootstrapped(self) -> bool:
        return not self.parent and not self.base


@dataclass(frozen=True, slots=True)
class Composed:
    """Every image of one choice, parents first."""

    images: Mapping[str, PlannedImage]
    slurm: str

    def role(self, name: str) -> PlannedImage:
        return self.images[f"role:{name}"]

    def needed(self, roles: Iterable[str], present: Container[str] = ()) -> list[PlannedImage]:
        """List the images under these targets in build order, with the builders of their artifacts.

        A builder is left out if all images that use its artifacts are among the references that are `present`.
        """
        keys: set[str] = set()

        def visit(key: str) -> None:
            if key in keys:
                return
            keys.add(key)
            image = self.images[key]
            for other in image.needs:
                if image.reference not in present or other == image.parent:
                    visit(other)

        for target in roles:
            visit(key_of(target))
        return [image for key, image in self.images.items() if key in keys]


def key_of(target: str) -> str:
    """Return the key of a command line's target: a role, or layer:NAME."""
    return target if target.startswith(LAYER) else f"role:{target}"


def digest(data: str | bytes) -> str:
    return hashlib.sha256(data.encode() if isinstance(data, str) else data).hexdigest()


def short(name: str) -> str:
    """Shorten an input's name to its path in the repository."""
    return name.partition(" as /")[0]


def changed(before: Mapping[str, str] | None, after: Mapping[str, str]) -> list[str]:
    """List by name the inputs that differ from those of the last build."""
    if before is None:
        return ["never built here"]
    lines = []
    for name in sorted(before.keys() | after.keys()):
        if name not in after:
            lines.append(f"{short(name)} (removed)")
        elif name not in before:
            lines.append(f"{short(name)} (new)")
        elif before[name] != after[name]:
            lines.append(short(name))
    return lines


# The plan for each image of a build, and its result. Pure.
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
