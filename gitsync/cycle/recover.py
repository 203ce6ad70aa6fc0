"""What makes good what was cut, lost or changed: readers have a tree, and it is what its commit says."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from gitsync.cycle.context import Cycle
from gitsync.layout import ZERO
from gitsync.repo.listing import Tip
from gitsync.state import Published
from gitsync.tree import publish
from gitsync.tree.write import damage, write_tree

if TYPE_CHECKING:
    from gitsync.repo.reader import Reader


def recover(cycle: Cycle) -> None:
    """Readers have a tree, and the state agrees with the link, before anything else is tried."""
    layout = cycle.settings.layout
    if cycle.live is None:
        there = set(publish.present(layout))
        good = next((each.commit for each in cycle.state.commits if each.commit in there), None)
        if good is None and layout.zero.is_dir():
            good = ZERO
        if good is not None:
            publish.point(layout, good)
            cycle.log.append(f"published {good}: there was no link, or it led nowhere")
            cycle.live = good
    published = cycle.state.published
    if cycle.live is not None and (published is None or published.commit != cycle.live):
        old = cycle.state.formerly(cycle.live) or Published(cycle.live, 0.0)
        at = publish.since(layout, otherwise=cycle.clock())
        cycle.state = cycle.state.with_published(replace(old, at=at))


def mend(cycle: Cycle, reader: Reader, tip: Tip) -> None:
    """The live tree is what its commit says, or is replaced by one that is, in one step."""
    layout = cycle.settings.layout
    entries = reader.entries(tip.commit, cycle.settings.subdir)
    because = damage(layout.tree(tip.commit), entries)
    if because is None:
        return
    with publish.beginning(layout) as target:
        # Checked when it was published: the same bytes need no second look.
        written = write_tree(target, entries, layout.repository, (layout.tree(tip.commit), entries))
        publish.name_tree(layout, target, tip.commit, written)
    cycle.log.append(f"mended {tip.commit[:12]}: {because}")
