"""The one way gitsync fails: "cannot X: why", with the file, the field and a hint where there are any."""

from __future__ import annotations

from pathlib import Path


def printable(text: str) -> str:
    """What a terminal and a log may be shown: names and messages come from servers, commits and users' processes."""
    return "".join(letter if letter.isprintable() or letter == "\n" else " " for letter in text)


def one_line(text: str) -> str:
    return printable(text).replace("\n", " ")


class GitsyncError(Exception):
    """A step that cannot be done now; the next cycle tries again."""

    def __init__(
        self,
        what: str,
        why: str,
        *,
        file: str | Path | None = None,
        field: str | None = None,
        hint: str | None = None,
    ) -> None:
        self.what = what
        self.why = printable(why)
        self.file = None if file is None else str(file)
        self.field = field
        self.hint = hint
        super().__init__(str(self))

    def __str__(self) -> str:
        place = ", ".join(part for part in (self.file, self.field) if part)
        text = f"cannot {self.what}: {self.why}"
        if place:
            text += f" ({place})"
        if self.hint:
            text += f"; {self.hint}"
        return text


class Refused(GitsyncError):
    """The commit itself is bad: it is quarantined, and not tried again until the ref moves."""


class Stalled(GitsyncError):
    """A check of the commit did not end in time: a busy node, or a bad commit. A few are forgiven."""


class TooLarge(GitsyncError):
    """The transfer was cut off at its limit. Nothing of it arrived, so the server names the commit to refuse."""


class Damaged(GitsyncError):
    """The local repository lacks what it should hold. It is only a cache: thrown away and fetched anew."""
