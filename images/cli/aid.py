"""Prepare a build: keep its lock usable, and build the helpers that another architecture's images need."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from images import architectures
from images.cli.session import Session
from images.errors import ImagesError
from images.make.plan import LAYER, NATIVE

if TYPE_CHECKING:
    from images.engine.builder import Tools
    from images.make.plan import PlannedImage
    from images.make.progress import Reporter

# Keep the lock usable before a build: resolve again, if requested, when it is stale or packages vanished.
RELOCK = "relock"
HINT = "`build.py lock` resolves anew; so does `build --when-vanished relock`"
SHOWN = 40


def if_stale(session: Session, roles: Sequence[str], when_vanished: str, reporter: Reporter) -> None:
    """Make sure that the lock has every layer; resolve again or fail."""
    stale = session.stale(roles)
    if not stale:
        return
    if when_vanished != RELOCK:
        reason = f"the lock does not fit {', '.join(stale)}"
        raise ImagesError("build as locked", reason, file=session.place.directory, hint=HINT)
    reporter.log(f"lock: {', '.join(stale)} changed; resolving every package anew")
    tell(session.relock(roles), reporter)


def if_gone(
    session: Session, todo: Sequence[PlannedImage], roles: Sequence[str], when_vanished: str, reporter: Reporter
) -> bool:
    """Check that the archive has what is about to be installed; return True if a new lock requires a new plan."""
    missing = session.gone(todo)
    if not missing:
        return False
    listed = "\n".join(f"  {item}" for item in missing)
    if when_vanished != RELOCK:
        reason = f"the archive moved on:\n{listed}"
        raise ImagesError("build as locked", reason, file=session.place.directory, hint=HINT)
    reporter.log(f"lock: the archive moved on; RESOLVING ANEW, so this build differs from the last one:\n{listed}")
    tell(session.relock(roles), reporter)
    return True


def tell(moved: Sequence[str], reporter: Reporter) -> None:
    for text in (*moved[:SHOWN], *([f"and {len(moved) - SHOWN} more"] if len(moved) > SHOWN else ())):
        reporter.log(f"lock: {text}")


def tools(session: Session, reporter: Reporter, when_vanished: str = "fail") -> Tools | None:
    """Return the helper programs, building them if needed; None if the build does not use them.

    It does not for the engine's own architecture, on a base image, with BuildKit, or with another machine's engine.
    """
    place, engine = session.place, session.engine
    if place.choice.arch == engine.arch or place.base or engine.builder.buildx or engine.arch != architectures.own():
        return None
    if NATIVE.removeprefix(LAYER) not in place.definition.layers:
        return None
    # By the place: it is where the packages come from while they pass through a cache.
    own = Session.of(session.repository, place.settings, place.definition, engine.arch)
    if_stale(own, [NATIVE], when_vanished, reporter)
    composed, planned = own.plan([NATIVE], own.present())
    todo = [item.image for item in planned if not item.present]
    if todo and if_gone(own, todo, [NATIVE], when_vanished, reporter):
        composed, planned = own.plan([NATIVE], own.present())
    if todo:
        own.build(composed, planned, reporter)
    from images.make.build import (
        native_tools,  # imported late: it loads docker's library, which a build with nothing to do spares
    )

    return native_tools(composed.images[NATIVE].reference)
