"""The one way gitsync fails: "cannot X: why", with the file, the field and a hint where there are any."""

from __future__ import annotations

from ground.errors import Problem


class GitsyncError(Problem):
    """A step that cannot be done now; the next cycle tries again."""

    hinted = "; "


class Refused(GitsyncError):
    """The commit itself is bad: it is quarantined, and not tried again until the ref moves."""


class Stalled(GitsyncError):
    """A check of the commit did not end in time: a busy node, or a bad commit. A few are forgiven."""


class TooLarge(GitsyncError):
    """The transfer was cut off at its limit. Nothing of it arrived, so the server names the commit to refuse."""


class Damaged(GitsyncError):
    """The local repository lacks what it should hold. It is only a cache: thrown away and fetched anew."""
