"""The commands that check images or clean up: `reproduce`, `test` and `prune`.

`reproduce` builds every image twice from nothing and compares layers and ids. `test` runs the roles' container tests.
`prune` removes the names of images that a later build superseded, and keeps those that a cluster of this checkout is
pinned to (`images.pins`).
"""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from images import ImagesError, pins
from images.cli.publish import AS_JSON, open_session, open_sessions
from images.cli.session import Session, build_tools
from images.engine.docker import DockerEngine
from images.make.build import Maker, git_revision
from images.make.plan import Composed, PlannedImage
from images.make.progress import Reporter

if TYPE_CHECKING:
    from images.engine.store import ListedImage


# `reproduce`


@dataclass(frozen=True, slots=True)
class ColdBuild:
    """One image of one of the two builds from nothing."""

    id: str
    layers: tuple[str, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class BuildComparison:
    """One image of both builds."""

    image: PlannedImage
    first: ColdBuild
    second: ColdBuild

    @property
    def equal(self) -> bool:
        return self.first.id == self.second.id and self.first.layers == self.second.layers

    @property
    def differing(self) -> list[int]:
        """Return the numbers of the layers that differ, counted from the base."""
        pairs = zip(self.first.layers, self.second.layers, strict=False)
        return [number for number, (a, b) in enumerate(pairs) if a != b]


def build_cold(
    session: Session, roles: Sequence[str], prefix: str, reporter: Reporter
) -> tuple[Composed, dict[str, ColdBuild]]:
    """Build everything under separate names, reusing nothing; return what was made."""
    # The names differ between the builds; nothing of a name goes into a layer, and the labels are made of `shown`.
    settings = replace(session.settings, prefix=prefix)
    place = replace(session.place, settings=settings)
    fresh = Session(session.repository, settings, session.definition, place, session.slices)
    composed = fresh.compose(roles)
    maker = Maker(
        fresh.place, composed, fresh.engine, reporter, git_revision(session.repository), session.settings.prefix,
        build_tools(session, reporter),
    )  # fmt: skip
    images = {}
    for image in composed.list_needed(roles):
        reporter.start(image.key, "cold")
        seconds = maker.make(image)
        reporter.done(image.key, seconds)
        layers = fresh.engine.inspect(image.reference)["RootFS"]["Layers"]
        images[image.key] = ColdBuild(fresh.engine.image_id(image.reference), tuple(layers), seconds)
    return composed, images


def untag_images(engine: DockerEngine, composed: Composed) -> None:
    """Remove the build's images by name, the last first."""
    for image in reversed(list(composed.images.values())):
        if engine.has(image.reference):
            engine.untag(image.reference)


def build_twice(
    session: Session, roles: Sequence[str], reporter: Reporter, log: Callable[[str], None]
) -> list[BuildComparison]:
    """Build twice, removing both builds, so that the second cannot reuse the first one's layers."""
    session.remove_leftovers()
    results: list[Mapping[str, ColdBuild]] = []
    images: list[PlannedImage] = []
    for number in (1, 2):
        log(f"cold build {number} of 2")
        composed, made = build_cold(session, roles, f"minivm-reproduce-{number}", reporter)
        untag_images(session.engine, composed)
        results.append(made)
        images = composed.list_needed(roles)
    return [BuildComparison(image, results[0][image.key], results[1][image.key]) for image in images]


@click.command()
@click.argument("roles", nargs=-1)
@AS_JSON
@click.pass_context
def reproduce(ctx: click.Context, roles: Sequence[str], as_json: bool) -> None:
    """Build twice from nothing and compare every layer's digest and every image's id."""
    from images.make import progress
    from images.make.progress import Plain

    compared = []
    for session in open_sessions(ctx):
        names = session.select_targets(roles)
        session.require_lock(names, "fail", Plain())
        todo = session.compose(names).list_needed(names)
        session.check_architecture(todo)
        session.require_packages(todo, names, "fail", Plain())
        reporter = Plain(to=sys.stderr)
        compared += build_twice(session, names, reporter, reporter.log)
    if as_json:
        progress.print_json([{"image": c.image.key, "equal": c.equal, "ids": [c.first.id, c.second.id],
                         "layers": [list(c.first.layers), list(c.second.layers)]} for c in compared])  # fmt: skip
    else:
        rows = [(c.image.key, c.first.id[7:19], c.second.id[7:19], str(len(c.first.layers)),
                 "equal" if c.equal else f"DIFFERS in layers {c.differing or 'none: the configuration'}",
                 f"{c.first.seconds:.1f}", f"{c.second.seconds:.1f}") for c in compared]  # fmt: skip
        progress.print_table(("image", "first id", "second id", "layers", "verdict", "s", "s"), rows)
    if different := [c.image.key for c in compared if not c.equal]:
        raise ImagesError("reproduce", f"{', '.join(different)} differ")


# `test`


@click.command()
@click.argument("roles", nargs=-1)
@click.pass_context
def test(ctx: click.Context, roles: Sequence[str]) -> None:
    """Run the container tests of the roles, or of all."""
    files = list_container_tests(ctx.obj.repository, open_session(ctx).select_targets(roles))
    raise SystemExit(subprocess.run([sys.executable, "-m", "pytest", *map(str, files)], check=False).returncode)


def list_container_tests(repository: Path, roles: Iterable[str]) -> list[Path]:
    """List the tests of every image, then each role's own."""
    directory = repository / "tests/container/images"
    own = (directory / f"test_{name.replace('-', '_')}.py" for name in roles)
    return [directory / "test_common.py", *(path for path in own if path.exists())]


# `prune`


@click.command()
@click.option("--dry-run", is_flag=True, help="Only say what would go.")
@click.pass_context
def prune(ctx: click.Context, dry_run: bool) -> None:
    """Remove images that later builds of the same name superseded."""
    skipped, old = 0, list[str]()
    for session in open_sessions(ctx):
        removable = list_prunable(session, session.select_lock_targets(()))
        old += removable
        for name in removable:
            reason = "" if dry_run else session.engine.release(name)
            skipped += bool(reason)
            click.echo(f"{name}: {reason}" if reason else name)
        for name, cluster in list_pinned(session, session.select_lock_targets(())):
            click.echo(f"{name}: kept, the cluster {cluster} starts its pods from it")
    done = "would go" if dry_run else "removed"
    click.echo(f"{len(old) - skipped} {done}" + (f", {skipped} in use" if skipped else ""))


def select_superseded(images: Iterable[PlannedImage], names: Iterable[str], flavour: str) -> list[str]:
    """Select the names that a build of this variant and architecture made and would not make today.

    Only tags with minivm's hash count (not `latest`, nor tags that people set), and only images that the definition
    still has: an image that was renamed or belongs to another variant is left alone.
    """
    current: dict[str, set[str]] = {}
    for image in images:
        current.setdefault(image.repo, set()).add(image.tag)
    own_tag = re.compile(rf"(?:.+-)?{re.escape(flavour)}-[0-9a-f]{{12}}")
    references = []
    for name in names:
        repository, _, tag = name.rpartition(":")
        if repository in current and tag not in current[repository] and own_tag.fullmatch(tag):
            references.append(name)
    # Roles before the layers under them: the engine removes an image once no other image is built on it.
    return sorted(references, key=lambda name: ("/layer-" in name, name))


def list_prunable(session: Session, targets: Sequence[str]) -> list[str]:
    """List the superseded names of images that no cluster of this checkout is pinned to."""
    pinned_ids = map_pinned_images(session)
    return _list_superseded(session, targets, lambda image: image.id not in pinned_ids)


def list_pinned(session: Session, targets: Sequence[str]) -> list[tuple[str, str]]:
    """List the superseded names that stay, each with the cluster that is pinned to its image."""
    cluster_of = map_pinned_images(session)
    cluster_of_name = {
        name: cluster_of[image.id]
        for image in session.engine.images()
        if image.id in cluster_of
        for name in image.references
    }
    names = _list_superseded(session, targets, lambda image: image.id in cluster_of)
    return [(name, cluster_of_name[name]) for name in names]


def map_pinned_images(session: Session) -> dict[str, str]:
    """Map the id of each pinned image to the cluster of this checkout that is pinned to it."""
    return pins.map_pinned(session.repository / "build/cluster")


def _list_superseded(session: Session, targets: Sequence[str], wanted: Callable[[ListedImage], bool]) -> list[str]:
    names = [name for image in session.engine.images() if wanted(image) for name in image.references]
    return select_superseded(list_still_made(session, targets), names, session.place.choice.flavour)


def list_still_made(session: Session, targets: Sequence[str]) -> list[PlannedImage]:
    """List the images of the present definition in every release of Slurm and CUDA, which are kept side by side."""
    needed = session.compose(targets).list_needed(targets)
    for sibling in session.open_siblings():
        try:
            needed += list_buildable_images(sibling, targets)
        except ImagesError:
            # Some targets do not exist with every CUDA, as a compiler with 12.9: list those that do.
            for target in targets:
                with contextlib.suppress(ImagesError):
                    needed += list_buildable_images(sibling, [target])
    return needed


def list_buildable_images(session: Session, targets: Sequence[str]) -> list[PlannedImage]:
    """List the images under these targets; none where the lock does not fit."""
    return [] if session.list_stale_layers(targets) else session.compose(targets).list_needed(targets)
