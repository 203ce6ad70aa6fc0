"""Whether a commit may become a tree at all: by its list of files, and by what it says of itself."""

from __future__ import annotations

from gitsync.errors import Refused
from gitsync.repo import rules
from gitsync.repo.listing import Entry
from gitsync.settings import Ref, Settings
from gitsync.tree import marker
from gitsync.tree import write as tree


def refuse_violations(entries: list[Entry], settings: Settings) -> None:
    limits = rules.Limits(
        (*settings.paths, marker.MARKER), settings.max_bytes, settings.max_file_bytes, settings.max_files
    )
    wrong = rules.violations(entries, limits)
    if wrong:
        raise Refused("use the commit", "; ".join(wrong))


def judge_marker(settings: Settings, ref: Ref, entries: list[Entry], had: frozenset[str]) -> None:
    def read(entry: Entry) -> bytes:
        return next(tree.read_blobs(settings.layout.repository, [entry]))

    marker.judge(settings, ref, entries, read, had)
