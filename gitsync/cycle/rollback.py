"""Publish a commit, or the image's own tree, because a person requested it."""

from __future__ import annotations

from dataclasses import replace

from gitsync.cycle.context import Cycle
from gitsync.cycle.quarantine import leave_alone
from gitsync.cycle.take import take
from gitsync.errors import GitsyncError, Refused
from gitsync.layout import ZERO
from gitsync.repo import transfer
from gitsync.settings import Ref, RefKind
from gitsync.state import Published
from gitsync.tree import publish


def publish_by_hand(cycle: Cycle, commit: str, *, leave: bool) -> None:
    """Publish `commit` now; with `leave`, ignore what the ref points to until it moves."""
    previous = cycle.state.published
    tip_oid = cycle.state.tip_oid
    if commit == ZERO:
        publish_zero(cycle)
    else:
        _publish_commit(cycle, commit)
    if leave and tip_oid and previous is not None and previous.commit != commit:
        leave_alone(cycle, tip_oid, previous.commit, f"rolled back by hand to {commit[:12]}")


def publish_zero(cycle: Cycle) -> None:
    """Publish generation zero."""
    layout = cycle.settings.layout
    if not layout.zero.is_dir():
        raise GitsyncError("publish generation zero", "the image's tree is missing", file=layout.zero)
    if cycle.live != ZERO:
        publish.point(layout, ZERO)
        cycle.live = ZERO
        cycle.state = cycle.state.with_published(Published(ZERO, cycle.clock()))
        cycle.log.append("published generation zero")


def _publish_commit(cycle: Cycle, commit: str) -> None:
    settings, layout = cycle.settings, cycle.settings.layout
    ref = Ref(RefKind.COMMIT, commit)
    from gitsync.repo.reader import opened

    try:
        if settings.repo is None:
            raise GitsyncError("fetch", "no repository is set", field="MINIVM_GITSYNC_REPO")
        transfer.ensure_repository(layout.repository)
        transfer.fetch(settings, ref, cycle.lock)
        with opened(layout.repository) as reader:
            tip = reader.tip(commit)
            take(cycle, reader, tip, ref, manual=True)
    except Refused:
        raise
    except GitsyncError:
        # The server does not answer. A tree that was published here was verified and checked here: use it.
        old = cycle.state.formerly(commit)
        if old is None or not layout.tree(commit).is_dir():
            raise
        publish.point(layout, commit)
        cycle.live = commit
        cycle.state = cycle.state.with_published(replace(old, at=cycle.clock()))
