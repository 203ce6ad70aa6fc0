"""The command prune: remove images whose name has another tag in the present definition."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import click

from images import pins
from images.cli.publish import each
from images.errors import ImagesError

if TYPE_CHECKING:
    from images.cli.session import Session
    from images.engine.look import Present
    from images.make.plan import PlannedImage


@click.command()
@click.option("--dry-run", is_flag=True, help="Only say what would go.")
@click.pass_context
def prune(ctx: click.Context, dry_run: bool) -> None:
    """Remove images that later builds of the same name superseded."""
    kept, old = 0, list[str]()
    for session in each(ctx):
        found = candidates(session, session.every_role(()))
        old += found
        for name in found:
            reason = "" if dry_run else session.engine.release(name)
            kept += bool(reason)
            click.echo(f"{name}: {reason}" if reason else name)
        for name, cluster in pinned(session, session.every_role(())):
            click.echo(f"{name}: kept, the cluster {cluster} starts its pods from it")
    done = "would go" if dry_run else "removed"
    click.echo(f"{len(old) - kept} {done}" + (f", {kept} in use" if kept else ""))


def superseded(images: Iterable[PlannedImage], names: Iterable[str], flavour: str) -> list[str]:
    """Select the names that a build of this variant and architecture made and would not make today.

    Only tags with our hash count (not `latest`, nor tags that people set), and only images that the definition still
    has: an image that was renamed or belongs to another variant is left alone.
    """
    current: dict[str, set[str]] = {}
    for image in images:
        current.setdefault(image.repo, set()).add(image.tag)
    ours = re.compile(rf"(?:.+-)?{re.escape(flavour)}-[0-9a-f]{{12}}")
    found = []
    for name in names:
        repository, _, tag = name.rpartition(":")
        if repository in current and tag not in current[repository] and ours.fullmatch(tag):
            found.append(name)
    # Roles before the layers under them: an image goes when nothing stands on it any more.
    return sorted(found, key=lambda name: ("/layer-" in name, name))


def candidates(session: Session, targets: Sequence[str]) -> list[str]:
    """List the superseded names of images that no cluster of this checkout is pinned to."""
    held = held_by(session)
    return _superseded(session, targets, lambda image: image.id not in held)


def pinned(session: Session, targets: Sequence[str]) -> list[tuple[str, str]]:
    """List the superseded names that stay, each with the cluster that is pinned to its image."""
    held = held_by(session)
    owner = {name: held[image.id] for image in session.engine.images() if image.id in held for name in image.references}
    return [(name, owner[name]) for name in _superseded(session, targets, lambda image: image.id in held)]


def held_by(session: Session) -> dict[str, str]:
    return pins.pinned(session.repository / "build/cluster")


def _superseded(session: Session, targets: Sequence[str], wanted: Callable[[Present], bool]) -> list[str]:
    names = [name for image in session.engine.images() if wanted(image) for name in image.references]
    return superseded(still_made(session, targets), names, session.place.choice.flavour)


def still_made(session: Session, targets: Sequence[str]) -> list[PlannedImage]:
    """List the images of the present definition in every release of Slurm and CUDA, which are kept side by side."""
    found = session.compose(targets).needed(targets)
    for one in session.beside()[1:]:
        try:
            found += made(one, targets)
        except ImagesError:
            # Not all can be had with all, CUDA 12.9 not with a compiler: what can be had counts.
            for target in targets:
                with contextlib.suppress(ImagesError):
                    found += made(one, [target])
    return found


def made(session: Session, targets: Sequence[str]) -> list[PlannedImage]:
    return [] if session.stale(targets) else session.compose(targets).needed(targets)
