"""Old trees go, and with them what only they need of the repository."""

from __future__ import annotations

from gitsync.cycle.context import Cycle
from gitsync.repo import transfer
from gitsync.tree import publish


def prune(cycle: Cycle) -> None:
    settings, layout = cycle.settings, cycle.settings.layout
    # By the link and not by what we believe: a step that failed just after the swap left us behind.
    cycle.live = publish.current(layout)
    if cycle.live is None:
        return
    history = [(each.commit, each.at) for each in cycle.state.commits]
    gone = publish.prunable(
        publish.present(layout), cycle.live, history, settings.keep, settings.keep_seconds, cycle.clock()
    )
    for commit in gone:
        if publish.remove_tree(layout, commit) and layout.repository.is_dir():
            transfer.set_ref(layout.repository, f"{transfer.KEPT}{commit}", "", cycle.lock)
    published = cycle.state.published
    if layout.repository.is_dir() and published is not None and published.at >= cycle.state.last_attempt:
        transfer.tidy(settings, cycle.lock)
