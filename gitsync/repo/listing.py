"""What is known of a commit and of its files, read by reader.py. Pure: judged, written and tested without git."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gitsync.settings import Ref
from gitsync.state import Published


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


def as_published(tip: Tip, ref: Ref, signer: str, entries: Sequence[Entry], policy: str, at: float) -> Published:
    """What the state keeps of a commit that has gone live."""
    return Published(
        commit=tip.commit, at=at, oid=tip.oid, ref=str(ref), signer=signer, author=tip.author, subject=tip.subject,
        committed=tip.committed, files=len(entries), bytes=sum(entry.size for entry in entries), policy=policy,
    )  # fmt: skip
