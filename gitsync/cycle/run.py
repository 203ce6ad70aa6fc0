"""One cycle of gitsync: bring the newest commit of the ref to this node, or say why not.

`run_cycle` holds the root's lock, and every step can be interrupted and the cycle run again:

1. `recover` gives readers a tree and makes the state agree with the published link.
2. `advance` fetches the ref. A new commit becomes the candidate; when its ring's turn has come, it is verified,
   written, checked and published, or else quarantined with the reason of the step that refused it.
3. `prune` removes old trees. Then the state, the metrics and the pod's condition are written.

The loop forks a process for each cycle. Tests kill a cycle at every step that changes the
disk (tests/process/gitsync_faults.py lists them in order).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from gitsync import rings
from gitsync.errors import Damaged, GitsyncError, RefusedCommit, Stalled, TooLarge
from gitsync.layout import ZERO
from gitsync.repo import transfer
from gitsync.repo.child import HeldLock, hold_lock
from gitsync.repo.reader import CommitFile, CommitReader, Tip, as_published, open_repository
from gitsync.rings import RingView, reason_to_wait
from gitsync.settings import GitsyncSettings, Ref, RefKind
from gitsync.state import (
    Candidate,
    GitsyncState,
    Published,
    Quarantine,
    describe_trouble,
    load_state,
    read_pin,
    render_metrics,
    save_state,
    set_condition,
)
from gitsync.tree import check, publish
from gitsync.tree.admit import admit, list_kinds_on_disk
from gitsync.tree.publish import find_damage, write_tree
from ground.files import write_if_possible


@dataclass(slots=True)
class Cycle:
    """Settings, lock, state and log of one running cycle: the only mutable object in it."""

    settings: GitsyncSettings
    lock: HeldLock
    state: GitsyncState
    live: str | None
    log: list[str] = field(default_factory=list)

    def save(self) -> None:
        save_state(self.settings.layout.state, self.state)

    @contextlib.contextmanager
    def timed(self, step: str) -> Iterator[None]:
        started = time.monotonic()
        try:
            yield
        finally:
            self.state = self.state.record_duration(step, time.monotonic() - started)


# The node's ring: ask whether this node may take a commit, and report this node's result.


def is_my_turn(cycle: Cycle, tip: Tip) -> bool:
    """Tell whether this node may take the commit now; if not, store the reason with the candidate."""
    settings, candidate = cycle.settings, cycle.state.candidate
    assert candidate is not None
    view: RingView | None = None
    if settings.ring_url and settings.canary_percent > 0:
        view = rings.ask(settings.ring_url, tip.commit)
    reason = reason_to_wait(
        settings.pod, settings.canary_percent, settings.ring_delay, time.time(), candidate.seen, view,
        ring_asked=settings.ring_url is not None,
    )  # fmt: skip
    if reason:
        cycle.state = cycle.state.record_candidate(replace(candidate, reason=reason))
    return not reason


def report_to_ring(cycle: Cycle, commit: str, *, ok: bool, reason: str = "") -> None:
    """Report this node's result with a commit to the ring, if there is one."""
    settings = cycle.settings
    if settings.ring_url:
        rings.send_result(settings.ring_url, settings.pod, commit, ok=ok, reason=reason, secret=settings.ring_secret)


def forward_reports(cycle: Cycle) -> None:
    """Forward to the ring what the runner reported about broken scripts."""
    settings = cycle.settings
    if any(settings.layout.reports.glob("*.json")):
        rings.forward_reports(settings.ring_url, settings.pod, settings.layout.reports, settings.ring_secret)


# Quarantine of refused commits: until the ref moves, or the settings that refused the commit change.


def refuse(cycle: Cycle, oid: str, commit: str, step: str, error: GitsyncError) -> None:
    """Quarantine a commit and report it to the ring. The published tree stays."""
    reason = str(error)
    quarantine = Quarantine(oid, commit, step, reason, time.time(), cycle.settings.policy())
    cycle.state = cycle.state.record_refusal(quarantine)
    cycle.log.append(f"refused {commit[:12] or oid[:12]}: {reason}")
    cycle.save()
    report_to_ring(cycle, commit or oid, ok=False, reason=reason)


def leave_alone(cycle: Cycle, oid: str, commit: str, reason: str) -> None:
    """Quarantine a commit that a person rolled back from. An empty policy marks a person's decision."""
    cycle.state = cycle.state.record_rollback(Quarantine(oid, commit, "rollback", reason, time.time(), ""))


# Publication at a person's request.


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
        cycle.state = cycle.state.record_publication(Published(ZERO, time.time()))
        cycle.log.append("published generation zero")


def _publish_commit(cycle: Cycle, commit: str) -> None:
    settings, layout = cycle.settings, cycle.settings.layout
    ref = Ref(RefKind.COMMIT, commit)
    try:
        if settings.repo is None:
            raise GitsyncError("fetch", "no repository is set", field="MINIVM_GITSYNC_REPO")
        transfer.ensure_repository(layout.repository)
        transfer.fetch(settings, ref, cycle.lock)
        with open_repository(layout.repository) as reader:
            tip = reader.tip(commit)
            take(cycle, reader, tip, ref, manual=True)
    except RefusedCommit:
        raise
    except GitsyncError:
        # The server does not answer. A tree that was published here was verified and checked here: use it.
        old = cycle.state.find_former(commit)
        if old is None or not layout.tree(commit).is_dir():
            raise
        publish.point(layout, commit)
        cycle.live = commit
        cycle.state = cycle.state.record_publication(replace(old, at=time.time()))


LOCK_WAIT = 30.0
# Seconds between comparisons of an unchanged tree with its commit; the first cycle of a process always compares.
COMPARE_PERIOD = 600.0


def run_cycle(
    settings: GitsyncSettings,
    *,
    only: str | None = None,
    leave: bool = False,
    compare: bool = True,
    lock_wait: float = LOCK_WAIT,
) -> GitsyncState:
    """Run one cycle and return its state.

    `only` publishes this commit wherever the ref points; `leave` also ignores what the ref points to until it moves (a
    rollback). `compare` compares the published tree with its commit even when the ref has not moved.

    With `only` an error is raised; otherwise it is recorded in the state. The last good tree stays in both cases.
    """
    layout = settings.layout
    publish.prepare(layout)
    with hold_lock(layout.lock, lock_wait) as lock:
        healed = publish.heal(layout)
        cycle = Cycle(settings, lock, load_state(layout.state), publish.read_current(layout), healed)
        recover(cycle)
        cycle.state = cycle.state.record_attempt(time.time())
        try:
            if only is not None:
                publish_by_hand(cycle, only, leave=leave)
            else:
                _attempt(cycle, compare)
        except (GitsyncError, OSError) as error:
            text = str(error) if isinstance(error, GitsyncError) else f"cannot finish the cycle: {error}"
            cycle.state = cycle.state.record_failure(text, time.time())
            if only is not None:
                _finish(cycle)
                raise
        _finish(cycle)
        return cycle.state


def begin(settings: GitsyncSettings) -> None:
    """Clean up after an interrupted cycle and give readers a tree, without asking the server."""
    layout = settings.layout
    publish.prepare(layout)
    with hold_lock(layout.lock, LOCK_WAIT) as lock:
        cycle = Cycle(settings, lock, load_state(layout.state), publish.read_current(layout), publish.heal(layout))
        before = cycle.state
        recover(cycle)
        if cycle.state != before:
            cycle.save()
    for line in cycle.log:
        print(f"gitsync: {line}", flush=True)


def recover(cycle: Cycle) -> None:
    """Give readers a tree and make the state agree with the link, before any other step."""
    layout = cycle.settings.layout
    if cycle.live is None:
        trees = set(publish.list_trees(layout))
        last_good = next((each.commit for each in cycle.state.commits if each.commit in trees), None)
        if last_good is None and layout.zero.is_dir():
            last_good = ZERO
        if last_good is not None:
            publish.point(layout, last_good)
            cycle.log.append(f"published {last_good}: the link was missing or led nowhere")
            cycle.live = last_good
    published = cycle.state.published
    if cycle.live is not None and (published is None or published.commit != cycle.live):
        old = cycle.state.find_former(cycle.live) or Published(cycle.live, 0.0)
        cycle.state = cycle.state.record_publication(
            replace(old, at=publish.read_link_time(layout, otherwise=time.time()))
        )


def repair(cycle: Cycle, reader: CommitReader, tip: Tip) -> None:
    """Compare the published tree with its commit; replace a damaged tree atomically."""
    layout = cycle.settings.layout
    entries = reader.entries(tip.commit, cycle.settings.subdir)
    damaged = find_damage(layout.tree(tip.commit), entries)
    if damaged is None:
        return
    with publish.beginning(layout) as target:
        # No checks: the same bytes passed them when the commit was published.
        written = write_tree(target, entries, layout.repository, (layout.tree(tip.commit), entries))
        publish.name_tree(layout, target, tip.commit, written)
    cycle.log.append(f"repaired {tip.commit[:12]}: {damaged}")


def prune(cycle: Cycle) -> None:
    """Remove old trees and the git objects that only they need."""
    settings, layout = cycle.settings, cycle.settings.layout
    # Read the link again: a step that failed just after the swap left `cycle.live` out of date.
    cycle.live = publish.read_current(layout)
    if cycle.live is None:
        return
    history = [(each.commit, each.at) for each in cycle.state.commits]
    prunable = publish.list_prunable(
        publish.list_trees(layout), cycle.live, history, settings.keep, settings.keep_seconds, time.time()
    )
    for commit in prunable:
        if publish.remove_tree(layout, commit) and layout.repository.is_dir():
            transfer.set_ref(layout.repository, f"{transfer.KEPT}{commit}", "", cycle.lock)
    published = cycle.state.published
    if layout.repository.is_dir() and published is not None and published.at >= cycle.state.last_attempt:
        transfer.tidy(settings, cycle.lock)


def _attempt(cycle: Cycle, compare: bool) -> None:
    try:
        advance(cycle, compare)
    except Damaged as error:
        # The repository is only a cache of the server's: start again with a new one.
        cycle.log.append(f"fetching into a new repository: {error}")
        publish.remove(cycle.settings.layout.repository)
        advance(cycle, compare)


def _finish(cycle: Cycle) -> None:
    """Prune, save and report. Each runs even if an earlier one failed: reports matter most when the disk is full."""
    settings = cycle.settings
    try:
        with cycle.timed("prune"):
            prune(cycle)
    except (GitsyncError, OSError) as error:
        cycle.log.append(f"cannot prune: {error}")
    try:
        cycle.save()
    except OSError as error:
        cycle.log.append(f"cannot save the state: {error}")
        cycle.state = cycle.state.record_save_failure(f"cannot save the state: {error}")
    forward_reports(cycle)
    write_if_possible(settings.metrics, render_metrics(cycle.state, settings, time.time()))
    set_condition(settings.control, describe_trouble(cycle.state, settings))
    for line in cycle.log:
        print(f"gitsync: {line}", flush=True)


def advance(cycle: Cycle, compare: bool) -> None:
    """Fetch, and take the newest commit if it is new, not quarantined, and this node's turn has come."""
    settings = cycle.settings
    pin = read_pin(settings.layout)
    if pin == ZERO:
        publish_zero(cycle)
        return _record_success(cycle)
    if settings.repo is None:
        return _record_success(cycle)
    ref = Ref(RefKind.COMMIT, pin) if pin else settings.ref
    transfer.ensure_repository(settings.layout.repository)
    with cycle.timed("fetch"):
        if not _fetch(cycle, ref):
            return _record_success(cycle)
    if _is_up_to_date(cycle, compare):
        return _record_success(cycle)

    with open_repository(settings.layout.repository) as reader:
        tip = reader.tip(transfer.FETCHED)
        if pin is None:
            cycle.state = cycle.state.record_tip(tip.oid)
        if cycle.state.quarantine is not None and not cycle.state.is_quarantined(tip.oid, cycle.settings.policy()):
            cycle.state = cycle.state.end_quarantine()
        refused = cycle.state.quarantine is not None
        if tip.commit == cycle.live and (refused or _passed_current_policy(cycle)):
            repair(cycle, reader, tip)
            _record_details(cycle, tip, ref)
            return _record_success(cycle)
        if refused:
            return _record_success(cycle)
        candidate = cycle.state.candidate
        if candidate is None or candidate.oid != tip.oid:
            cycle.state = cycle.state.record_candidate(Candidate(tip.oid, tip.commit, time.time()))
            cycle.save()
        if pin is not None or tip.commit == cycle.live or is_my_turn(cycle, tip):
            take(cycle, reader, tip, ref)
    return _record_success(cycle)


def _passed_current_policy(cycle: Cycle) -> bool:
    """Tell whether the published commit passed under the current settings.

    If not (other signers, another subdirectory, a lost state), the cycle verifies and checks it again. A refusal is
    reported, and the tree stays published.
    """
    return cycle.state.published is not None and cycle.state.published.policy == cycle.settings.policy()


def _record_details(cycle: Cycle, tip: Tip, ref: Ref) -> None:
    """Restore the published commit's details in the state: the state was lost, or another ref led to the commit."""
    published = cycle.state.published
    assert published is not None
    complete = replace(
        published, oid=tip.oid, ref=str(ref), author=tip.author, subject=tip.subject, committed=tip.committed
    )
    cycle.state = cycle.state.record_check(complete, time.time())


def _record_success(cycle: Cycle) -> None:
    cycle.state = cycle.state.record_success(time.time())


def _fetch(cycle: Cycle, ref: Ref) -> bool:
    """Fetch the ref; return False while its newest commit is too large to fetch."""
    settings, quarantine = cycle.settings, cycle.state.quarantine
    if quarantine is not None and quarantine.step == "transfer":
        oid = transfer.read_remote_oid(settings, ref, cycle.lock)
        if cycle.state.is_quarantined(oid, cycle.settings.policy()):
            return False
    try:
        transfer.fetch(settings, ref, cycle.lock)
    except TooLarge as error:
        oid = transfer.read_remote_oid(settings, ref, cycle.lock)
        refuse(cycle, oid, "", "transfer", error)
        return False
    return True


def _is_up_to_date(cycle: Cycle, compare: bool) -> bool:
    """Tell whether the ref has not moved and no work is left: the end of most cycles."""
    oid, published = transfer.read_fetched_oid(cycle.settings.layout.repository), cycle.state.published
    if not oid or compare or time.time() - cycle.state.looked_at > COMPARE_PERIOD:
        return False
    if cycle.state.quarantine is not None:
        return cycle.state.is_quarantined(oid, cycle.settings.policy())
    is_live = published is not None and published.oid == oid and published.commit == cycle.live
    return is_live and _passed_current_policy(cycle)


# Take one commit: verify, write, check and publish it, or quarantine it with the reason of the step that refused.

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
                cycle.settings, ref, tip, reader, newer_than=newer_than, kinds_before=lambda: _list_kinds_before(cycle)
            )
        step = "check"
        build(cycle, reader, tip, entries)
        _go_live(cycle, tip, ref, signer, entries)
    except RefusedCommit as error:
        if manual:
            raise
        refuse(cycle, tip.oid, tip.commit, step, error)
    except Stalled as error:
        candidate = cycle.state.candidate or Candidate(tip.oid, tip.commit, time.time())
        cycle.state = cycle.state.record_candidate(replace(candidate, stalls=candidate.stalls + 1))
        if manual or candidate.stalls + 1 < MAX_STALLS:
            raise
        refuse(cycle, tip.oid, tip.commit, step, error)


def _list_kinds_before(cycle: Cycle) -> frozenset[str]:
    live = cycle.live
    return frozenset() if live is None else list_kinds_on_disk(cycle.settings.layout.tree(live))


def build(cycle: Cycle, reader: CommitReader, tip: Tip, entries: list[CommitFile]) -> None:
    """Write and check trees/<commit>. An intact tree of that name is used as it is."""
    settings, layout = cycle.settings, cycle.settings.layout
    if layout.tree(tip.commit).is_dir() and find_damage(layout.tree(tip.commit), entries) is None:
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
            commands = [*check.list_standard_commands(target, entries)]
            if settings.check_command:
                commands.append(list(settings.check_command))
            check.check(target, entries, known_good, commands, settings.check_timeout)
            changed = find_damage(target, entries)
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
    now = time.time()
    published = as_published(tip, ref, signer, entries, settings.policy(), now)
    cycle.state = cycle.state.record_publication(published).record_check(published, now)
    cycle.log.append(f"published {tip.commit[:12]} of {ref}" + (f", signed by {signer}" if signer else ""))
    cycle.save()
    report_to_ring(cycle, tip.commit, ok=True)
