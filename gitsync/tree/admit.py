"""Admission of a commit, on a node and in the mirror: its signature, age, list of files and marker file."""

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
    """Return the signer and the files, or raise Refused with the reason.

    `newer_than` is the date of the published commit, None to allow an older one; `had` returns the kinds of scripts in
    the published tree.
    """
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
    if problems := rules.violations(entries, limits):
        raise Refused("use the commit", "; ".join(problems))
