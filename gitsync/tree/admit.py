"""Whether a commit may become a tree at all, on a node or in the mirror: who signed it, that it goes forward, its list
of files, and what it says of itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from gitsync.errors import Refused
from gitsync.repo import rules, verify
from gitsync.repo.listing import Entry, Tip
from gitsync.settings import Ref, Settings
from gitsync.tree import marker
from gitsync.tree.write import read_blobs

if TYPE_CHECKING:
    from gitsync.repo.reader import Reader


def admit(
    settings: Settings, ref: Ref, tip: Tip, reader: Reader, *, newer_than: float | None,
    had: Callable[[], frozenset[str]],
) -> tuple[str, list[Entry]]:  # fmt: skip
    """The signer and the files; Refused with the reason otherwise. `newer_than` is the date of what is published, None
    where going backward is meant; `had` tells which kinds of scripts the tree before it has."""
    signer = verify.signature(settings, ref, tip)
    if newer_than is not None:
        verify.not_backward(settings, ref, tip, newer_than, marker.floor(settings))
    entries = reader.entries(tip.commit, settings.subdir)
    _refuse_violations(entries, settings)
    marker.judge(settings, ref, entries, lambda entry: next(read_blobs(settings.layout.repository, [entry])), had())
    return signer, entries


def _refuse_violations(entries: list[Entry], settings: Settings) -> None:
    limits = rules.Limits(
        (*settings.paths, marker.MARKER), settings.max_bytes, settings.max_file_bytes, settings.max_files
    )
    wrong = rules.violations(entries, limits)
    if wrong:
        raise Refused("use the commit", "; ".join(wrong))
