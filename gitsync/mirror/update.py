"""One update of the mirror: fetch from the git server, verify, then serve the commit.

The mirror starts it as a process (`python -m gitsync.mirror.update`), which keeps GitPython out of the server.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace

from gitsync.errors import GitsyncError, RefusedCommit
from gitsync.repo import transfer
from gitsync.repo.child import HeldLock, hold_lock
from gitsync.repo.reader import CommitReader, Tip, as_published, open_repository
from gitsync.settings import GitsyncSettings, Ref, RefKind, from_environment
from gitsync.state import GitsyncState, Quarantine, load_state, save_state, summarise
from gitsync.tree import publish
from gitsync.tree.admit import admit, list_kinds

# Branch under which the mirror serves a commit that MINIVM_GITSYNC_REF names by its hash.
PINNED = "refs/heads/pinned"


def inside(settings: GitsyncSettings) -> GitsyncSettings:
    """Return the settings with the mirror's own root, beside what the node itself published."""
    return replace(settings, root=settings.root / "mirror")


def show_ref(ref: Ref) -> str:
    return PINNED if ref.kind is RefKind.COMMIT else ref.remote


def update(settings: GitsyncSettings) -> GitsyncState:
    """Run one update and return its state. `settings` are the mirror's own (see `inside`)."""
    if settings.repo is None:
        raise GitsyncError("mirror", "no repository is set", field="MINIVM_GITSYNC_REPO")
    layout = settings.layout
    publish.prepare(layout)
    with hold_lock(layout.lock, 30.0) as lock:
        publish.heal(layout)
        state = before = load_state(layout.state).record_attempt(time.time())
        try:
            state = _fetch_and_verify(settings, state, lock, time.time()).record_success(time.time())
        except (GitsyncError, OSError) as error:
            state = state.record_failure(str(error), time.time())
        save_state(layout.state, state)
        if state.published != before.published:
            print(f"gitsync mirror: serves {summarise(state, settings)}", flush=True)
        return state


def _fetch_and_verify(settings: GitsyncSettings, state: GitsyncState, lock: HeldLock, now: float) -> GitsyncState:
    repository = settings.layout.repository
    transfer.ensure_repository(repository)
    transfer.fetch(settings, settings.ref, lock)
    oid = transfer.read_fetched_oid(repository)
    if state.published is not None and oid == state.published.oid:
        return state.end_quarantine()
    if state.is_quarantined(oid, settings.policy()):
        return state
    with open_repository(repository) as reader:
        tip = reader.tip(transfer.FETCHED)
        try:
            signer, entries = admit(
                settings, settings.ref, tip, reader,
                newer_than=state.published.committed if state.published else 0.0,
                kinds_before=lambda: _list_kinds_before(settings, reader, state),
            )  # fmt: skip
        except RefusedCommit as error:
            quarantine = Quarantine(tip.oid, tip.commit, "verify", str(error), now, settings.policy())
            print(f"gitsync mirror: refused {tip.commit[:12]}: {error}", flush=True)
            return state.record_refusal(quarantine)
    _serve_commit(settings, tip, lock)
    published = as_published(tip, settings.ref, signer, entries, settings.policy(), now)
    state = state.record_publication(published).end_quarantine()
    transfer.drop_kept(repository, {each.commit for each in state.commits}, lock)
    transfer.tidy(settings, lock)
    return state


def _list_kinds_before(settings: GitsyncSettings, reader: CommitReader, state: GitsyncState) -> frozenset[str]:
    """Return the kinds of scripts in the commit served now, read from the repository: the mirror has no trees."""
    entries = reader.entries_if_known(state.published.commit, settings.subdir) if state.published else None
    return list_kinds(entry.path for entry in entries or ())


def _serve_commit(settings: GitsyncSettings, tip: Tip, lock: HeldLock) -> None:
    """Point the served branch or tag at a verified commit, and keep the commit's objects."""
    repository = settings.layout.repository
    transfer.set_ref(repository, f"{transfer.KEPT}{tip.commit}", tip.commit, lock)
    name = show_ref(settings.ref)
    transfer.local(repository, "symbolic-ref", "HEAD", name)
    transfer.set_ref(repository, name, tip.oid, lock)


def main() -> int:
    try:
        state = update(inside(from_environment(os.environ)))
    except GitsyncError as error:
        print(f"gitsync mirror: {error}", file=sys.stderr, flush=True)
        return 1
    return 1 if state.failures else 0


if __name__ == "__main__":
    sys.exit(main())
