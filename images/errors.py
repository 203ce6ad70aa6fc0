"""The one error of this package: what could not be done, why, where it stands, and what to do about it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path


class ImagesError(Exception):
    """Told to the user as it is, without a traceback. Anything else that is raised is a bug."""

    def __init__(
        self, what: str, why: str, *, file: str | Path | None = None, field: str | None = None, hint: str | None = None
    ) -> None:
        super().__init__(what, why)
        self.what, self.why, self.file, self.field, self.hint = what, why, file, field, hint

    def __str__(self) -> str:
        where = ", ".join(str(part) for part in (self.file, self.field) if part)
        text = f"cannot {self.what}: {self.why}" + (f" ({where})" if where else "")
        return text + (f"\nhint: {self.hint}" if self.hint else "")


def nearest(name: str, known: Iterable[str]) -> str | None:
    """A hint for a name that is not known: the closest one that is, or all of them where none is close."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    if close:
        return f"did you mean {close[0]!r}?"
    return f"known: {', '.join(names)}" if names else None
