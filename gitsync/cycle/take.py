"""What becomes of one commit: its turn, verification, checks, publishing; or its refusal; or a step back."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from gitsync import fault
from gitsync.cycle.context import Cycle
from gitsync.errors import Damaged, GitsyncError, Refused, Stalled
from gitsync.layout import ZERO
from gitsync.repo import transfer, verify
from gitsync.repo.listing import Entry, Tip
from gitsync.schedule import RingView, Turn, ring_decision
from gitsync.settings import Ref, RefKind, Settings
from gitsync.state import Candidate, Published, Quarantine
from gitsync.tree import check, marker, publish
from gitsync.tree import write as tree
from gitsync.tree.admit import judge_marker, refuse_violations

if TYPE_CHECKING:
    from gitsync.repo.reader import Reader

# How many times a check may run out of time before the commit and not the node is held to blame.
STALLS = 3


def still_quarantined(cycle: Cycle, oid: str) -> bool:
    """The ref has not moved, and what refused the commit has not changed."""
    quarantine = cycle.state.quarantine
    if quarantine is None or quarantine.oid != oid:
        return False
    # A person's rollback has no policy: only a moving ref ends it.
    return quarantine.policy in {"", cycle.settings.policy()}


def my_turn(cycle: Cycle, tip: Tip) -> bool:
    """Whether this node's ring takes the commit now; the reason is kept with the candidate where not."""
    settings, candidate = cycle.settings, cycle.state.candidate
    assert candidate is not None
    view: RingView | None = None
    if settings.ring_url and settings.canary_percent > 0:
        from gitsync.rings import client as ring  # urllib, for those who have rings

        view = ring.ask(settings.ring_url, tip.commit)
    decision = ring_decision(
        settings.pod, settings.canary_percent, settings.ring_delay, time.time(), candidate.seen, view,
        ring_asked=settings.ring_url is not None,
    )  # fmt: skip
    if decision.turn is not Turn.TAKE:
        cycle.state = replace(cycle.state, candidate=replace(candidate, reason=decision.reason))
    return decision.turn is Turn.TAKE


def take(cycle: Cycle, reader: Reader, tip: Tip, ref: Ref, *, manual: bool = False) -> None:
    """Verify, check and publish; a refusal is recorded with the step that refused. By hand, it may go backward, and
    whoever asked hears of the refusal: it is no quarantine of what the ref points to."""
    step = "verify"
    try:
        with cycle.timed("verify"):
            signer = verify.signature(cycle.settings, ref, tip)
            if not manual:
                verify.not_backward(cycle.settings, ref, tip, _published_date(cycle), marker.floor(cycle.settings))
            entries = reader.entries(tip.commit, cycle.settings.subdir)
            refuse_violations(entries, cycle.settings)
            judge_marker(cycle.settings, ref, entries, _kinds_before(cycle))
        fault.at("verified")
        step = "check"
        build(cycle, reader, tip, entries)
        _go_live(cycle, tip, ref, signer, entries)
    except Refused as error:
        if manual:
            raise
        refuse(cycle, tip.oid, tip.commit, step, error)
    except Stalled as error:
        candidate = cycle.state.candidate or Candidate(tip.oid, tip.commit, time.time())
        cycle.state = replace(cycle.state, candidate=replace(candidate, stalls=candidate.stalls + 1))
        if manual or candidate.stalls + 1 < STALLS:
            raise
        refuse(cycle, tip.oid, tip.commit, step, error)


def _published_date(cycle: Cycle) -> float:
    return cycle.state.published.committed if cycle.state.published else 0.0


def _kinds_before(cycle: Cycle) -> frozenset[str]:
    live = cycle.live
    return frozenset() if live is None else marker.kinds_on_disk(cycle.settings.layout.tree(live))


def _basis(cycle: Cycle, reader: Reader) -> list[Entry] | None:
    """The published tree's entries, to share unchanged files with. None where the repository no longer knows it."""
    if cycle.live is None or cycle.live == ZERO:
        return None
    try:
        return reader.entries(cycle.live, cycle.settings.subdir)
    except (Refused, Damaged, ValueError):
        return None


def build(cycle: Cycle, reader: Reader, tip: Tip, entries: list[Entry]) -> None:
    """trees/<commit>, whole and checked. A tree that is there already is taken as it is when it is intact."""
    settings, layout = cycle.settings, cycle.settings.layout
    if layout.tree(tip.commit).is_dir() and tree.damage(layout.tree(tip.commit), entries) is None:
        return
    before = None
    known_good: frozenset[Entry] = frozenset()
    old = _basis(cycle, reader)
    if old is not None and cycle.live is not None:
        before = (layout.tree(cycle.live), old)
        # They passed here before; the checks' own version is part of the image, and an image starts with none.
        known_good = frozenset(old)
    target = publish.unfinished(layout.trees, "new")
    try:
        with cycle.timed("write"):
            written = tree.write(target, entries, layout.repository, before)
        cycle.log.append(
            f"{tip.commit[:12]}: {len(entries)} files, {written.bytes} bytes in {len(written.files)} of them written"
        )
        with cycle.timed("check"):
            commands = [*check.standard_commands(target, entries)]
            if settings.check_command:
                commands.append(list(settings.check_command))
            check.check(target, entries, known_good, commands, settings.check_timeout)
            changed = tree.damage(target, entries)
            if changed:
                raise Refused("run the commit's checks", f"they changed the tree: {changed}")
        fault.at("checked")
        with cycle.timed("publish"):
            publish.name_tree(layout, target, tip.commit, written)
    finally:
        if target.exists():
            tree.remove(target)


def _go_live(cycle: Cycle, tip: Tip, ref: Ref, signer: str, entries: list[Entry]) -> None:
    settings = cycle.settings
    # Its objects stay, for the next tree to share with and for a rollback without the network.
    transfer.set_ref(settings.layout.repository, f"{transfer.KEPT}{tip.commit}", tip.commit, cycle.lock)
    publish.point(settings.layout, tip.commit)
    cycle.live = tip.commit
    now = time.time()
    published = Published(
        commit=tip.commit, at=now, oid=tip.oid, ref=str(ref), signer=signer, author=tip.author, subject=tip.subject,
        committed=tip.committed, files=len(entries), bytes=sum(entry.size for entry in entries),
        policy=settings.policy(),
    )  # fmt: skip
    cycle.state = replace(cycle.state.with_published(published), candidate=None, looked_at=now)
    cycle.log.append(f"published {tip.commit[:12]} of {ref}" + (f", signed by {signer}" if signer else ""))
    cycle.save()
    fault.at("published-saved")
    _tell_ring(settings, tip.commit, ok=True, reason="")


def refuse(cycle: Cycle, oid: str, commit: str, step: str, error: GitsyncError) -> None:
    """Quarantine: not tried again until the ref moves or the policy changes. What is live stays live."""
    reason = str(error)
    quarantine = Quarantine(oid, commit, step, reason, time.time(), cycle.settings.policy())
    cycle.state = replace(
        cycle.state, quarantine=quarantine, candidate=None, refused_total=cycle.state.refused_total + 1
    )
    cycle.log.append(f"refused {commit[:12] or oid[:12]}: {reason}")
    cycle.save()
    _tell_ring(cycle.settings, commit or oid, ok=False, reason=reason)


def _tell_ring(settings: Settings, commit: str, *, ok: bool, reason: str) -> None:
    if settings.ring_url:
        from gitsync.rings import client as ring

        ring.tell(settings.ring_url, settings.pod, commit, ok=ok, reason=reason, secret=settings.ring_secret)


def mend(cycle: Cycle, reader: Reader, tip: Tip) -> None:
    """The live tree is what its commit says, or is replaced by one that is, in one step."""
    layout = cycle.settings.layout
    entries = reader.entries(tip.commit, cycle.settings.subdir)
    because = tree.damage(layout.tree(tip.commit), entries)
    if because is None:
        return
    target = publish.unfinished(layout.trees, "new")
    try:
        # Checked when it was published: the same bytes need no second look.
        written = tree.write(target, entries, layout.repository, (layout.tree(tip.commit), entries))
        publish.name_tree(layout, target, tip.commit, written)
    finally:
        if target.exists():
            tree.remove(target)
    cycle.log.append(f"mended {tip.commit[:12]}: {because}")


def publish_zero(cycle: Cycle) -> None:
    """Generation zero, because a person asked for it."""
    layout = cycle.settings.layout
    if not layout.zero.is_dir():
        raise GitsyncError("publish generation zero", "the image's tree is missing", file=layout.zero)
    if cycle.live != ZERO:
        publish.point(layout, ZERO)
        cycle.live = ZERO
        cycle.state = cycle.state.with_published(Published(ZERO, time.time()))
        cycle.log.append("published generation zero")


def by_hand(cycle: Cycle, commit: str, *, leave: bool) -> None:
    """Publish `commit` now; with `leave`, what the ref points to is left alone until it moves."""
    left = cycle.state.published
    tip_oid = cycle.state.tip_oid
    if commit == ZERO:
        publish_zero(cycle)
    else:
        _publish_commit(cycle, commit)
    if leave and tip_oid and left is not None and left.commit != commit:
        # The marker of a person's decision is the empty policy: see still_quarantined.
        cycle.state = replace(
            cycle.state,
            candidate=None,
            quarantine=Quarantine(
                tip_oid, left.commit, "rollback", f"rolled back by hand to {commit[:12]}", time.time(), ""
            ),
        )


def _publish_commit(cycle: Cycle, commit: str) -> None:
    settings, layout = cycle.settings, cycle.settings.layout
    ref = Ref(RefKind.COMMIT, commit)
    from gitsync.repo import reader as repo

    try:
        if settings.repo is None:
            raise GitsyncError("fetch", "no repository is set", field="MINIVM_GITSYNC_REPO")
        transfer.ensure_repository(layout.repository)
        transfer.fetch(settings, ref, cycle.lock)
        with repo.opened(layout.repository) as reader:
            tip = repo.require(reader.tip(commit), commit)
            take(cycle, reader, tip, ref, manual=True)
    except Refused:
        raise
    except GitsyncError:
        # Without the server and its objects: a tree that was published here was verified and checked here.
        old = next((each for each in cycle.state.history if each.commit == commit), None)
        if old is None or not layout.tree(commit).is_dir():
            raise
        publish.point(layout, commit)
        cycle.live = commit
        cycle.state = cycle.state.with_published(replace(old, at=time.time()))


def prune(cycle: Cycle) -> None:
    settings, layout = cycle.settings, cycle.settings.layout
    # By the link and not by what we believe: a step that failed just after the swap left us behind.
    cycle.live = publish.current(layout)
    if cycle.live is None:
        return
    live = [each for each in (cycle.state.published, *cycle.state.history) if each is not None]
    history = [(each.commit, each.at) for each in live]
    gone = publish.prunable(
        publish.present(layout), cycle.live, history, settings.keep, settings.keep_seconds, time.time()
    )
    for commit in gone:
        outcome = publish.remove_tree(layout, commit)
        if outcome.removed and layout.repository.is_dir():
            transfer.set_ref(layout.repository, f"{transfer.KEPT}{commit}", "", cycle.lock)
    published = cycle.state.published
    if layout.repository.is_dir() and published is not None and published.at >= cycle.state.last_attempt:
        transfer.tidy(settings, cycle.lock)
