"""One cycle: fetch, verify, check, publish, prune. Any step can be cut and the whole run again.

It runs in a process of seconds (the loop forks one), under the root's lock. What it changes, in the order in which it
changes it, is listed in fault.STEPS.
"""

from __future__ import annotations

from dataclasses import replace

from gitsync import fault, report
from gitsync.cycle.context import Cycle
from gitsync.cycle.prune import prune
from gitsync.cycle.quarantine import is_quarantined, refuse
from gitsync.cycle.recover import mend, recover
from gitsync.cycle.ring import is_my_turn, pass_on_reports
from gitsync.cycle.rollback import publish_by_hand, publish_zero
from gitsync.cycle.take import take
from gitsync.errors import Damaged, GitsyncError, TooLarge
from gitsync.layout import ZERO
from gitsync.pin import read_pin
from gitsync.repo import transfer
from gitsync.repo.listing import Tip
from gitsync.repo.lock import held
from gitsync.settings import Ref, RefKind, Settings
from gitsync.state import Candidate, State, load_state
from gitsync.tree import disk, publish

LOCK_WAIT = 30.0
# How often an unchanged tree is compared with its commit, beside the first cycle of a process.
LOOK_AT_TREE = 600.0


def run_cycle(
    settings: Settings, *, only: str | None = None, leave: bool = False, look: bool = True, lock_wait: float = LOCK_WAIT
) -> State:
    """One cycle, and its state. `only`: publish this commit whatever the ref says; `leave`: and do not come back to
    what the ref points to until it moves (a rollback).

    Raises for what concerns `only`; in a normal cycle what goes wrong is in the state, and the last good tree stays.
    """
    layout = settings.layout
    publish.prepare(layout)
    with held(layout.lock, lock_wait) as lock:
        fault.at("locked")
        healed = publish.heal(layout)
        cycle = Cycle(settings, lock, load_state(layout.state), publish.current(layout), healed)
        recover(cycle)
        fault.at("healed")
        cycle.state = cycle.state.attempted(cycle.clock())
        try:
            if only is not None:
                publish_by_hand(cycle, only, leave=leave)
            else:
                _attempt(cycle, look)
        except (GitsyncError, OSError) as error:
            text = str(error) if isinstance(error, GitsyncError) else f"cannot go on: {error}"
            cycle.state = cycle.state.failed(text, cycle.clock())
            if only is not None:
                _finish(cycle)
                raise
        _finish(cycle)
        return cycle.state


def begin(settings: Settings) -> None:
    """What a start does before anything slow: clean up, and a tree for readers. The server is not asked."""
    layout = settings.layout
    publish.prepare(layout)
    with held(layout.lock, LOCK_WAIT) as lock:
        cycle = Cycle(settings, lock, load_state(layout.state), publish.current(layout), publish.heal(layout))
        before = cycle.state
        recover(cycle)
        if cycle.state != before:
            cycle.save()
    for line in cycle.log:
        print(f"gitsync: {line}", flush=True)


def _attempt(cycle: Cycle, look: bool) -> None:
    try:
        advance(cycle, look)
    except Damaged as error:
        # The repository is a cache of the server's: once more with a new one.
        cycle.log.append(f"new repository, because: {error}")
        disk.remove(cycle.settings.layout.repository)
        advance(cycle, look)


def _finish(cycle: Cycle) -> None:
    """Prune, save, tell. Each is tried whatever became of the others: a full disk is when telling matters."""
    settings = cycle.settings
    try:
        with cycle.timed("prune"):
            prune(cycle)
    except (GitsyncError, OSError) as error:
        cycle.log.append(f"not pruned: {error}")
    try:
        cycle.save()
    except OSError as error:
        cycle.log.append(f"the state is not saved: {error}")
        cycle.state = cycle.state.unsaved(f"cannot save the state: {error}")
    fault.at("saved")
    pass_on_reports(cycle)
    report.write_metrics(cycle.state, settings, cycle.clock())
    report.condition(settings.control, report.trouble(cycle.state, settings))
    for line in cycle.log:
        print(f"gitsync: {line}", flush=True)


def advance(cycle: Cycle, look: bool) -> None:
    settings = cycle.settings
    pin = read_pin(settings.layout)
    if pin == ZERO:
        publish_zero(cycle)
        return _succeeded(cycle)
    if settings.repo is None:
        return _succeeded(cycle)
    ref = Ref(RefKind.COMMIT, pin) if pin else settings.ref
    transfer.ensure_repository(settings.layout.repository)
    with cycle.timed("fetch"):
        if not _fetch(cycle, ref):
            return _succeeded(cycle)
    fault.at("fetched")
    if _nothing_new(cycle, look):
        return _succeeded(cycle)

    # GitPython costs more than all else in a cycle that finds nothing new.
    from gitsync.repo.reader import opened

    with opened(settings.layout.repository) as reader:
        tip = reader.tip(transfer.FETCHED)
        fault.at("resolved")
        if pin is None:
            cycle.state = cycle.state.following(tip.oid)
        if cycle.state.quarantine is not None and not is_quarantined(cycle, tip.oid):
            cycle.state = cycle.state.released()
        refused = cycle.state.quarantine is not None
        if tip.commit == cycle.live and (refused or _judged(cycle)):
            mend(cycle, reader, tip)
            _know(cycle, tip, ref)
            return _succeeded(cycle)
        if refused:
            return _succeeded(cycle)
        known = cycle.state.candidate
        if known is None or known.oid != tip.oid:
            cycle.state = cycle.state.waiting(Candidate(tip.oid, tip.commit, cycle.clock()))
            cycle.save()
        fault.at("candidate-saved")
        if pin is not None or tip.commit == cycle.live or is_my_turn(cycle, tip):
            take(cycle, reader, tip, ref)
    return _succeeded(cycle)


def _judged(cycle: Cycle) -> bool:
    """Whether the live commit passed under the settings of today. If not (other signers, another subdirectory, a lost
    state) it is judged again; refused, it stays all the same, and says so."""
    return cycle.state.published is not None and cycle.state.published.policy == cycle.settings.policy()


def _know(cycle: Cycle, tip: Tip, ref: Ref) -> None:
    """What the state should say of the live commit, where it was lost or another ref led to it."""
    published = cycle.state.published
    assert published is not None
    known = replace(
        published, oid=tip.oid, ref=str(ref), author=tip.author, subject=tip.subject, committed=tip.committed
    )
    cycle.state = cycle.state.looked_over(known, cycle.clock())


def _succeeded(cycle: Cycle) -> None:
    cycle.state = cycle.state.succeeded(cycle.clock())


def _fetch(cycle: Cycle, ref: Ref) -> bool:
    """Whether there is something to look at. False: the commit that was too large to fetch is still the newest."""
    settings, quarantine = cycle.settings, cycle.state.quarantine
    if quarantine is not None and quarantine.step == "transfer":
        oid = transfer.remote_oid(settings, ref, cycle.lock)
        if is_quarantined(cycle, oid):
            return False
    try:
        transfer.fetch(settings, ref, cycle.lock)
    except TooLarge as error:
        oid = transfer.remote_oid(settings, ref, cycle.lock)
        refuse(cycle, oid, "", "transfer", error)
        return False
    return True


def _nothing_new(cycle: Cycle, look: bool) -> bool:
    """The quick way out of most cycles: the ref is where it was, and nothing is left to do about it."""
    oid, published = transfer.fetched_oid(cycle.settings.layout.repository), cycle.state.published
    if not oid or look or cycle.clock() - cycle.state.looked_at > LOOK_AT_TREE:
        return False
    if cycle.state.quarantine is not None:
        return is_quarantined(cycle, oid)
    return published is not None and published.oid == oid and published.commit == cycle.live and _judged(cycle)
