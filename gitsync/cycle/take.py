"""Take one commit: verify, write, check and publish it, or quarantine it with the reason of the step that refused."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from gitsync.cycle.context import Cycle, refuse, report_to_ring
from gitsync.errors import RefusedCommit, Stalled
from gitsync.layout import ZERO
from gitsync.repo import transfer
from gitsync.repo.listing import CommitFile, Tip, as_published
from gitsync.settings import Ref
from gitsync.state import Candidate
from gitsync.tree import check, marker, publish
from gitsync.tree.admit import admit
from gitsync.tree.write import damage, write_tree

if TYPE_CHECKING:
    from gitsync.repo.reader import CommitReader

# A check that exceeds its deadline this often makes the commit bad, and not the node slow.
MAX_STALLS = 3


def take(cycle: Cycle, reader: CommitReader, tip: Tip, ref: Ref, *, manual: bool = False) -> None:
    """Verify, check and publish a commit; quarantine it if a step refuses.

    With `manual` the commit may be older than the published one, and a refusal is raised to the person who requested
    it instead of quarantining what the ref points to.
    """
    step = "verify"
    try:
        with cycle.timed("verify"):
            published = cycle.state.published
            newer_than = None if manual else published.committed if published else 0.0
            signer, entries = admit(
                cycle.settings, ref, tip, reader, newer_than=newer_than, had=lambda: _kinds_before(cycle)
            )
        step = "check"
        build(cycle, reader, tip, entries)
        _go_live(cycle, tip, ref, signer, entries)
    except RefusedCommit as error:
        if manual:
            raise
        refuse(cycle, tip.oid, tip.commit, step, error)
    except Stalled as error:
        candidate = cycle.state.candidate or Candidate(tip.oid, tip.commit, cycle.clock())
        cycle.state = cycle.state.waiting(replace(candidate, stalls=candidate.stalls + 1))
        if manual or candidate.stalls + 1 < MAX_STALLS:
            raise
        refuse(cycle, tip.oid, tip.commit, step, error)


def _kinds_before(cycle: Cycle) -> frozenset[str]:
    live = cycle.live
    return frozenset() if live is None else marker.kinds_on_disk(cycle.settings.layout.tree(live))


def build(cycle: Cycle, reader: CommitReader, tip: Tip, entries: list[CommitFile]) -> None:
    """Write and check trees/<commit>. An intact tree of that name is used as it is."""
    settings, layout = cycle.settings, cycle.settings.layout
    if layout.tree(tip.commit).is_dir() and damage(layout.tree(tip.commit), entries) is None:
        return
    live = None if cycle.live == ZERO else cycle.live
    old = reader.entries_if_known(live, settings.subdir) if live else None
    # Share unchanged files with the published tree by hard links.
    before = (layout.tree(live), old) if live and old is not None else None
    # Files of the published tree passed the checks of this image; a new image starts with generation zero.
    known_good = frozenset(old or ())
    with publish.beginning(layout) as target:
        with cycle.timed("write"):
            written = write_tree(target, entries, layout.repository, before)
        cycle.log.append(
            f"{tip.commit[:12]}: {len(entries)} files, {written.bytes} bytes in {len(written.files)} of them written"
        )
        with cycle.timed("check"):
            commands = [*check.standard_commands(target, entries)]
            if settings.check_command:
                commands.append(list(settings.check_command))
            check.check(target, entries, known_good, commands, settings.check_timeout)
            changed = damage(target, entries)
            if changed:
                raise RefusedCommit("run the commit's checks", f"they changed the tree: {changed}")
        with cycle.timed("publish"):
            publish.name_tree(layout, target, tip.commit, written)


def _go_live(cycle: Cycle, tip: Tip, ref: Ref, signer: str, entries: list[CommitFile]) -> None:
    settings = cycle.settings
    # Keep its objects: the next tree shares files with it, and a rollback works without the network.
    transfer.set_ref(settings.layout.repository, f"{transfer.KEPT}{tip.commit}", tip.commit, cycle.lock)
    publish.point(settings.layout, tip.commit)
    cycle.live = tip.commit
    now = cycle.clock()
    published = as_published(tip, ref, signer, entries, settings.policy(), now)
    cycle.state = cycle.state.with_published(published).looked_over(published, now)
    cycle.log.append(f"published {tip.commit[:12]} of {ref}" + (f", signed by {signer}" if signer else ""))
    cycle.save()
    report_to_ring(cycle, tip.commit, ok=True)
