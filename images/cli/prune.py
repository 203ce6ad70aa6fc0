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
    skipped, old = 0, list[str]()
    for session in each(ctx):
        removable = candidates(session, session.every_role(()))
        old += removable
        for name in removable:
            reason = "" if dry_run else session.engine.release(name)
            skipped += bool(reason)
            click.echo(f"{name}: {reason}" if reason else name)
        for name, cluster in pinned(session, session.every_role(())):
            click.echo(f"{name}: kept, the cluster {cluster} starts its pods from it")
    done = "would go" if dry_run else "removed"
    click.echo(f"{len(old) - skipped} {done}" + (f", {skipped} in use" if skipped else ""))


def superseded(images: Iterable[PlannedImage], names: Iterable[str], flavour: str) -> list[str]:
    """Select the names that a build of this variant and architecture made and would not make today.

    Only tags with our hash count (not `latest`, nor tags that people set), and only images that the definition still
    has: an image that was renamed or belongs to another variant is left alone.
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
    # Roles before the layers under them: an image goes when nothing stands on it any more.
    return sorted(references, key=lambda name: ("/layer-" in name, name))


def candidates(session: Session, targets: Sequence[str]) -> list[str]:
    """List the superseded names of images that no cluster of this checkout is pinned to."""
    in_use = held_by(session)
    return _superseded(session, targets, lambda image: image.id not in in_use)


def pinned(session: Session, targets: Sequence[str]) -> list[tuple[str, str]]:
    """List the superseded names that stay, each with the cluster that is pinned to its image."""
    in_use = held_by(session)
    owner = {
        name: in_use[image.id] for image in session.engine.images() if image.id in in_use for name in image.references
    }
    return [(name, owner[name]) for name in _superseded(session, targets, lambda image: image.id in in_use)]


def held_by(session: Session) -> dict[str, str]:
    return pins.pinned(session.repository / "build/cluster")


def _superseded(session: Session, targets: Sequence[str], wanted: Callable[[Present], bool]) -> list[str]:
    names = [name for image in session.engine.images() if wanted(image) for name in image.references]
    return superseded(still_made(session, targets), names, session.place.choice.flavour)


def still_made(session: Session, targets: Sequence[str]) -> list[PlannedImage]:
    """List the images of the present definition in every release of Slurm and CUDA, which are kept side by side."""
    needed = session.compose(targets).needed(targets)
    for session_beside in session.beside()[1:]:
        try:
            needed += made(session_beside, targets)
        except ImagesError:
            # Not all can be had with all, CUDA 12.9 not with a compiler: what can be had counts.
            for target in targets:
                with contextlib.suppress(ImagesError):
                    needed += made(session_beside, [target])
    return needed


def made(session: Session, targets: Sequence[str]) -> list[PlannedImage]:
    return [] if session.stale(targets) else session.compose(targets).needed(targets)
