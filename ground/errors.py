"""How a package fails: "cannot X: why", with the file, the field and a hint where there are any; and safe words."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path


class Problem(Exception):
    """The base of a package's one error, caught once, in its command line; anything else that is raised is a bug."""

    hinted = "\nhint: "  # what stands before the hint

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
    """A hint for a name that is not known: the closest one that is, or all of them where none is close."""
    import difflib  # only a mistake pays for it

    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    if close:
        return f"did you mean {close[0]!r}?"
    return f"known: {', '.join(names)}" if names else None


def printable(text: str) -> str:
    """What a terminal and a log may be shown: names and messages come from servers, commits and users' processes."""
    return "".join(letter if letter.isprintable() or letter == "\n" else " " for letter in text)


def one_line(text: str) -> str:
    return printable(text).replace("\n", " ")
