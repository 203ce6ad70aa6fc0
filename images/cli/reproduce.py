"""Build one lock twice from nothing and compare every layer and id."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from images.cli.aid import tools
from images.cli.session import Session
from images.engine.docker import Engine
from images.make.build import Maker, git_revision
from images.make.plan import Composed, Image
from images.make.progress import Reporter


@dataclass(frozen=True, slots=True)
class Made:
    """One image of one of the two builds."""

    id: str
    layers: tuple[str, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class Compared:
    """One image of both builds."""

    image: Image
    first: Made
    second: Made

    @property
    def equal(self) -> bool:
        return self.first.id == self.second.id and self.first.layers == self.second.layers

    @property
    def differing(self) -> list[int]:
        """Return the numbers of the layers that differ, counted from the base."""
        pairs = zip(self.first.layers, self.second.layers, strict=False)
        return [number for number, (a, b) in enumerate(pairs) if a != b]


def cold(session: Session, roles: Sequence[str], prefix: str, reporter: Reporter) -> tuple[Composed, dict[str, Made]]:
    """Build everything under separate names, reusing nothing; return what was made."""
    # The names differ between the builds; nothing of a name goes into a layer, and the labels are made of `shown`.
    settings = replace(session.settings, prefix=prefix)
    one = Session(session.repository, settings, session.definition, replace(session.place, settings=settings),
                  session.slices)  # fmt: skip
    composed = one.compose(roles)
    maker = Maker(one.place, composed, one.engine, reporter, git_revision(session.repository), session.settings.prefix,
                  tools(session, reporter))  # fmt: skip
    made = {}
    for image in composed.needed(roles):
        reporter.start(image.key, "cold")
        seconds = maker.make(image)
        reporter.done(image.key, seconds)
        layers = one.engine.inspect(image.reference)["RootFS"]["Layers"]
        made[image.key] = Made(one.engine.image_id(image.reference), tuple(layers), seconds)
    return composed, made


def clear(engine: Engine, composed: Composed) -> None:
    """Remove the build's images by name, the last first."""
    for image in reversed(list(composed.images.values())):
        if engine.has(image.reference):
            engine.untag(image.reference)


def build_twice(
    session: Session, roles: Sequence[str], reporter: Reporter, log: Callable[[str], None]
) -> list[Compared]:
    """Build twice, removing both builds, so that the second cannot reuse the first one's layers."""
    session.clear()
    found: list[Mapping[str, Made]] = []
    images: list[Image] = []
    for number in (1, 2):
        log(f"cold build {number} of 2")
        composed, made = cold(session, roles, f"minivm-reproduce-{number}", reporter)
        clear(session.engine, composed)
        found.append(made)
        images = composed.needed(roles)
    return [Compared(image, found[0][image.key], found[1][image.key]) for image in images]
