"""Types for a commit and its files, as reader.py reads them. Pure, so that rules and tests need no git."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gitsync.settings import Ref
from gitsync.state import Published


@dataclass(frozen=True, slots=True)
class Tip:
    """The commit that a ref points to, directly or through an annotated tag."""

    oid: str
    commit: str
    tag: str | None
    author: str
    committed: float
    subject: str


@dataclass(frozen=True, slots=True)
class CommitFile:
    """One file of a commit. `mode` is raw, as the tree object has it."""

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


def as_published(tip: Tip, ref: Ref, signer: str, entries: Sequence[CommitFile], policy: str, at: float) -> Published:
    """Build the state's record of a commit that has been published."""
    return Published(
        commit=tip.commit, at=at, oid=tip.oid, ref=str(ref), signer=signer, author=tip.author, subject=tip.subject,
        committed=tip.committed, files=len(entries), bytes=sum(entry.size for entry in entries), policy=policy,
    )  # fmt: skip
