"""Helpers for a build for another architecture: this engine's own programs, built first if they are missing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from images import architectures
from images.cli import renew
from images.cli.session import Session
from images.make import native
from images.make.plan import LAYER, NATIVE

if TYPE_CHECKING:
    from images.engine.builder import Tools
    from images.make.progress import Reporter


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
    renew.if_stale(own, [NATIVE], when_vanished, reporter)
    composed, planned = own.plan([NATIVE], own.present())
    todo = [item.image for item in planned if not item.present]
    if todo and renew.if_gone(own, todo, [NATIVE], when_vanished, reporter):
        composed, planned = own.plan([NATIVE], own.present())
    if todo:
        own.build(composed, planned, reporter)
    return native.tools(composed.images[NATIVE].reference)
