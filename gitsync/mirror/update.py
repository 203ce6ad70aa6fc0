"""One update of the mirror: fetch from the git server, verify, and only then show it to the fleet.

A process of its own (`python -m gitsync.mirror.update`), started by the mirror: GitPython stays out of the server.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from gitsync import report
from gitsync.errors import GitsyncError, Refused
from gitsync.repo import transfer
from gitsync.repo.listing import Tip, as_published
from gitsync.repo.lock import Held, held
from gitsync.settings import Ref, RefKind, Settings, from_environment
from gitsync.state import Quarantine, State, load_state, save_state
from gitsync.tree import marker, publish
from gitsync.tree.admit import admit

if TYPE_CHECKING:
    from gitsync.repo.reader import Reader

# Commits that stay fetchable by their hash, for rollbacks and pins in the fleet.
KEEP = 20
# Where an exact commit is shown: it has no name of its own.
PINNED = "refs/heads/pinned"


def inside(settings: Settings) -> Settings:
    """The mirror's own root, beside what the node itself has published."""
    return replace(settings, root=settings.root / "mirror")


def shown(ref: Ref) -> str:
    return PINNED if ref.kind is RefKind.COMMIT else ref.remote


def update(settings: Settings, clock: Callable[[], float] = time.time) -> State:
    """`settings` are the mirror's own (see inside())."""
    if settings.repo is None:
        raise GitsyncError("mirror", "no repository is set", field="MINIVM_GITSYNC_REPO")
    layout = settings.layout
    publish.prepare(layout)
    with held(layout.lock, 30.0) as lock:
        publish.heal(layout)
        known = load_state(layout.state).attempted(clock())
        before = known
        try:
            known = _bring(settings, known, lock, clock())
            known = known.succeeded(clock())
        except (GitsyncError, OSError) as error:
            known = known.failed(str(error), clock())
        save_state(layout.state, known)
        if known.published != before.published:
            print(f"gitsync mirror: shows {report.summary(known, settings)}", flush=True)
        return known


def _bring(settings: Settings, known: State, lock: Held, now: float) -> State:
    repository = settings.layout.repository
    transfer.ensure_repository(repository)
    transfer.fetch(settings, settings.ref, lock)
    oid = transfer.fetched_oid(repository)
    if known.published is not None and oid == known.published.oid:
        return known.released()
    refused = known.quarantine
    if refused is not None and refused.oid == oid and refused.policy == settings.policy():
        return known

    from gitsync.repo.reader import opened  # GitPython, only where there is something new

    with opened(repository) as reader:
        tip = reader.tip(transfer.FETCHED)
        try:
            signer, entries = admit(
                settings, settings.ref, tip, reader,
                newer_than=known.published.committed if known.published else 0.0,
                had=lambda: _kinds_before(settings, reader, known),
            )  # fmt: skip
        except Refused as error:
            quarantine = Quarantine(tip.oid, tip.commit, "verify", str(error), now, settings.policy())
            print(f"gitsync mirror: refused {tip.commit[:12]}: {error}", flush=True)
            return known.refused(quarantine)
    _show(settings, tip, lock)
    published = as_published(tip, settings.ref, signer, entries, settings.policy(), now)
    known = known.with_published(published).released()
    for old in known.history[KEEP:]:
        transfer.set_ref(repository, f"{transfer.KEPT}{old.commit}", "", lock)
    transfer.tidy(settings, lock)
    return known


def _kinds_before(settings: Settings, reader: Reader, known: State) -> frozenset[str]:
    """Of what is shown now, as far as the repository still knows it: there are no trees here."""
    shown = reader.entries_if_known(known.published.commit, settings.subdir) if known.published else None
    return marker.kinds(entry.path for entry in shown or ())


def _show(settings: Settings, tip: Tip, lock: Held) -> None:
    repository = settings.layout.repository
    transfer.set_ref(repository, f"{transfer.KEPT}{tip.commit}", tip.commit, lock)
    name = shown(settings.ref)
    transfer.local(repository, "symbolic-ref", "HEAD", name)
    transfer.set_ref(repository, name, tip.oid, lock)


def main() -> int:
    try:
        settings = inside(from_environment(os.environ))
        known = update(settings)
    except GitsyncError as error:
        print(f"gitsync mirror: {error}", file=sys.stderr, flush=True)
        return 1
    return 1 if known.failures else 0


if __name__ == "__main__":
    sys.exit(main())
