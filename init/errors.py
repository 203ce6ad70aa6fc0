"""What can go wrong because of someone else's data or machine; anything that is not an InitError is our own bug."""

from __future__ import annotations


class InitError(Exception):
    """Says "cannot X: why", where (file and field), and what to do about it."""

    def __init__(self, what: str, why: str, *, file: str = "", field: str = "", hint: str = "") -> None:
        super().__init__(what, why, file, field, hint)
        self.what = what
        self.why = why
        self.file = file
        self.field = field
        self.hint = hint

    def __str__(self) -> str:
        where = ": ".join(part for part in (self.file, self.field) if part)
        text = f"cannot {self.what}: {self.why}"
        if where:
            text = f"{where}: {text}"
        return f"{text} ({self.hint})" if self.hint else text


class ConfigError(InitError):
    """A service, a role's plan or a setting that is wrong. Found before anything is started."""


class ManyErrors(ConfigError):
    """Everything that a whole check found, so that nobody mends one mistake at a time."""

    def __init__(self, what: str, errors: list[ConfigError]) -> None:
        super().__init__(what, f"{len(errors)} errors")
        self.errors = errors

    def __str__(self) -> str:
        return "\n".join(str(error) for error in self.errors)


class RequestError(InitError):
    """A request over the control socket that cannot be fulfilled; PID 1 answers it and goes on."""


def nearest(name: str, known: list[str]) -> str:
    """A hint that names the closest of the known names, or lists them when nothing is close."""
    import difflib  # only a mistake pays for it

    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    if close:
        return f"did you mean {close[0]}?"
    return f"known: {', '.join(sorted(known))}" if known else ""
