"""What is known of a commit and of its files, read by repo.py. Pure: judged, written and tested without git."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tip:
    """What a ref points to: a commit, directly or through an annotated tag."""

    oid: str
    commit: str
    tag: str | None
    author: str
    committed: float
    subject: str


@dataclass(frozen=True, slots=True)
class Entry:
    """One file of a commit, as the commit states it. `mode` is raw."""

    path: str
    mode: int
    oid: str
    size: int

    @property
    def is_link(self) -> bool:
        return self.mode >> 12 == 0o12

    @property
    def is_executable(self) -> bool:
        return not self.is_link and bool(self.mode & 0o111)
