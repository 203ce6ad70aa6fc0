"""The base of every package's error ("cannot X: why", with file, field and hint), and text for people."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path


class Problem(Exception):
    """Base of a package's one error. The command line catches it once; any other exception is a bug."""

    hinted = "\nhint: "  # separates the message from the hint

    def __init__(
        self, what: str, why: str, *, file: str | Path | None = None, field: str | None = None, hint: str | None = None
    ) -> None:
        super().__init__(what, why)
        self.what, self.why, self.field, self.hint = what, printable(why), field, hint
        self.file = None if file is None else str(file)

    def __str__(self) -> str:
        place = ", ".join(part for part in (self.file, self.field) if part)
        text = f"cannot {self.what}: {self.why}" + (f" ({place})" if place else "")
        return text + (f"{self.hinted}{self.hint}" if self.hint else "")


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Suggest the known name closest to `name`, or list all known names when none is close."""
    import difflib  # imported late: only a typo needs it

    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    if close:
        return f"did you mean {close[0]!r}?"
    return f"known: {', '.join(names)}" if names else None


def counted(number: int, noun: str, plural: str = "") -> str:
    """Write a number before its noun: `1 job`, `2 jobs`."""
    return f"{number:,} {noun if number == 1 else plural or f'{noun}s'}"


def printable(text: str) -> str:
    """Replace control characters: servers, commits and users' processes supply text that reaches terminals and logs."""
    return "".join(letter if letter.isprintable() or letter == "\n" else " " for letter in text)


def one_line(text: str) -> str:
    """Make text printable on a single line."""
    return printable(text).replace("\n", " ")
