"""Errors of gitsync: "cannot X: why", with file, field and hint."""

from __future__ import annotations

from ground.errors import Problem


class GitsyncError(Problem):
    """A step failed for now; the next cycle tries again."""

    hinted = "; "


class RefusedCommit(GitsyncError):
    """The commit itself is bad: gitsync quarantines it and does not try it again until the ref moves."""


class Stalled(GitsyncError):
    """A check of the commit exceeded its deadline: a busy node or a bad commit. The cycle retries a few times."""


class TooLarge(GitsyncError):
    """The transfer exceeded its limit. Nothing arrived, so the server must name the commit to refuse."""


class Damaged(GitsyncError):
    """The local repository lacks an object. It is only a cache: the cycle deletes it and fetches again."""
