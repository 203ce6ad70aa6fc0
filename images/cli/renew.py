"""Keep the lock usable before a build: resolve again, if requested, when it is stale or packages vanished."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from images.errors import ImagesError

if TYPE_CHECKING:
    from images.cli.session import Session
    from images.make.plan import PlannedImage
    from images.make.progress import Reporter

RELOCK = "relock"
HINT = "`build.py lock` resolves anew; so does `build --when-vanished relock`"
SHOWN = 40


def if_stale(session: Session, roles: Sequence[str], when_vanished: str, reporter: Reporter) -> None:
    """Make sure that the lock has every layer; resolve again or fail."""
    found = session.stale(roles)
    if not found:
        return
    if when_vanished != RELOCK:
        why = f"the lock does not fit {', '.join(found)}"
        raise ImagesError("build as locked", why, file=session.place.directory, hint=HINT)
    reporter.log(f"lock: {', '.join(found)} changed; resolving every package anew")
    tell(session.relock(roles), reporter)


def if_gone(
    session: Session, todo: Sequence[PlannedImage], roles: Sequence[str], when_vanished: str, reporter: Reporter
) -> bool:
    """Check that the archive has what is about to be installed; return True if a new lock requires a new plan."""
    found = session.gone(todo)
    if not found:
        return False
    listed = "\n".join(f"  {item}" for item in found)
    if when_vanished != RELOCK:
        why = f"the archive moved on:\n{listed}"
        raise ImagesError("build as locked", why, file=session.place.directory, hint=HINT)
    reporter.log(f"lock: the archive moved on; RESOLVING ANEW, so this build differs from the last one:\n{listed}")
    tell(session.relock(roles), reporter)
    return True


def tell(moved: Sequence[str], reporter: Reporter) -> None:
    for text in (*moved[:SHOWN], *([f"and {len(moved) - SHOWN} more"] if len(moved) > SHOWN else ())):
        reporter.log(f"lock: {text}")
