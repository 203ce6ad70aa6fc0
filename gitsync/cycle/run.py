"""One cycle: fetch, verify, check, publish, prune. Any step can be cut and the whole run again.

It runs in a process of seconds (the loop forks one), under the root's lock. What it changes, in the order in which it
changes it, is listed in fault.STEPS.
"""

from __future__ import annotations

import json
import time
from dataclasses import replace

from gitsync import fault, report
from gitsync import state as state_
from gitsync.cycle.context import Cycle
from gitsync.cycle.take import by_hand, mend, my_turn, prune, publish_zero, refuse, still_quarantined, take
from gitsync.errors import Damaged, GitsyncError, TooLarge
from gitsync.layout import ZERO, is_commit
from gitsync.repo import transfer
from gitsync.repo.listing import Tip
from gitsync.repo.lock import held
from gitsync.settings import Ref, RefKind, Settings
from gitsync.state import Candidate, Published, State
from gitsync.tree import publish
from gitsync.tree import write as tree

LOCK_WAIT = 30.0
# How often an unchanged tree is compared with its commit, beside the first cycle of a process.
LOOK_AT_TREE = 600.0


def read_pin(settings: Settings) -> str | None:
    try:
        commit = json.loads(settings.layout.pin.read_text())["commit"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return commit if isinstance(commit, str) and (is_commit(commit) or commit == ZERO) else None


def run(
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
        cycle = Cycle(settings, lock, state_.load(layout.state), publish.current(layout), healed)
        recover(cycle)
        fault.at("healed")
        cycle.state = replace(cycle.state, last_attempt=time.time())
        try:
            if only is not None:
                by_hand(cycle, only, leave=leave)
            else:
                _attempt(cycle, look)
        except (GitsyncError, OSError) as error:
            text = str(error) if isinstance(error, GitsyncError) else f"cannot go on: {error}"
            cycle.state = replace(
                cycle.state, failures=cycle.state.failures + 1, last_error=text, last_error_at=time.time()
            )
            if only is not None:
                _finish(cycle)
                raise
        _finish(cycle)
        return cycle.state


def settle(settings: Settings) -> None:
    """What a start does before anything slow: clean up, and a tree for readers. The server is not asked."""
    layout = settings.layout
    publish.prepare(layout)
    with held(layout.lock, LOCK_WAIT) as lock:
        cycle = Cycle(settings, lock, state_.load(layout.state), publish.current(layout), publish.heal(layout))
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
        tree.remove(cycle.settings.layout.repository)
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
        cycle.state = replace(cycle.state, last_error=cycle.state.last_error or f"cannot save the state: {error}")
    fault.at("saved")
    if any(settings.layout.reports.glob("*.json")):
        from gitsync.rings import client as ring

        ring.pass_on(settings.ring_url, settings.pod, settings.layout.reports, settings.ring_secret)
    report.write_metrics(cycle.state, settings, time.time())
    report.condition(settings.control, report.trouble(cycle.state, settings))
    for line in cycle.log:
        print(f"gitsync: {line}", flush=True)


def recover(cycle: Cycle) -> None:
    """Readers have a tree, and the state agrees with the link, before anything else is tried."""
    layout = cycle.settings.layout
    if cycle.live is None:
        there = set(publish.present(layout))
        known = [each.commit for each in (cycle.state.published, *cycle.state.history) if each is not None]
        good = next((commit for commit in known if commit in there), None)
        if good is None and layout.zero.is_dir():
            good = ZERO
        if good is not None:
            publish.point(layout, good)
            cycle.log.append(f"published {good}: there was no link, or it led nowhere")
            cycle.live = good
    if cycle.live is not None and (cycle.state.published is None or cycle.state.published.commit != cycle.live):
        old = next((each for each in cycle.state.history if each.commit == cycle.live), None)
        at = publish.since(layout)
        cycle.state = cycle.state.with_published(replace(old, at=at) if old else Published(cycle.live, at))


def advance(cycle: Cycle, look: bool) -> None:
    settings = cycle.settings
    pin = read_pin(settings)
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

    from gitsync.repo import reader as repo  # GitPython costs more than all else in a cycle that finds nothing new

    with repo.opened(settings.layout.repository) as reader:
        tip = repo.require(reader.tip(transfer.FETCHED), transfer.FETCHED)
        fault.at("resolved")
        if pin is None:
            cycle.state = replace(cycle.state, tip_oid=tip.oid)
        if cycle.state.quarantine is not None and not still_quarantined(cycle, tip.oid):
            cycle.state = replace(cycle.state, quarantine=None)
        refused = cycle.state.quarantine is not None
        if tip.commit == cycle.live and (refused or _judged(cycle)):
            mend(cycle, reader, tip)
            _know(cycle, tip, ref)
            return _succeeded(cycle)
        if refused:
            return _succeeded(cycle)
        known = cycle.state.candidate
        if known is None or known.oid != tip.oid:
            cycle.state = replace(cycle.state, candidate=Candidate(tip.oid, tip.commit, time.time()))
            cycle.save()
        fault.at("candidate-saved")
        if pin is not None or tip.commit == cycle.live or my_turn(cycle, tip):
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
    cycle.state = replace(cycle.state, published=known, candidate=None, looked_at=time.time())


def _succeeded(cycle: Cycle) -> None:
    cycle.state = replace(cycle.state, failures=0, last_error="", last_success=time.time())


def _fetch(cycle: Cycle, ref: Ref) -> bool:
    """Whether there is something to look at. False: the commit that was too large to fetch is still the newest."""
    settings, quarantine = cycle.settings, cycle.state.quarantine
    if quarantine is not None and quarantine.step == "transfer":
        oid = transfer.remote_oid(settings, ref, cycle.lock)
        if still_quarantined(cycle, oid):
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
    if not oid or look or time.time() - cycle.state.looked_at > LOOK_AT_TREE:
        return False
    if cycle.state.quarantine is not None:
        return still_quarantined(cycle, oid)
    return published is not None and published.oid == oid and published.commit == cycle.live and _judged(cycle)
