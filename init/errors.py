"""Errors caused by data or machines; anything that is not ORDINARY is a bug of minivm."""

from __future__ import annotations


class InitError(Exception):
    """An error "cannot X: reason", with its place (file and field) and a hint."""

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
    """A service, a role's plan or a setting is invalid. Found before anything starts."""


class ManyErrors(ConfigError):
    """All errors of a check, so that a person need not fix them one by one."""

    def __init__(self, what: str, errors: list[ConfigError]) -> None:
        super().__init__(what, f"{len(errors)} errors")
        self.errors = errors

    def __str__(self) -> str:
        return "\n".join(str(error) for error in self.errors)


def raise_all(what: str, errors: list[ConfigError]) -> None:
    if len(errors) == 1:
        raise errors[0]
    if errors:
        raise ManyErrors(what, errors)


class RequestError(InitError):
    """A request over the control socket that cannot be fulfilled; PID 1 answers it and continues."""


class CannotStart(Exception):
    """Reason of a failed start. Text from the service's file is kept apart, since it can hold secrets."""

    def __init__(self, why: str, quoted: str = "") -> None:
        super().__init__(f"{why}: {quoted}" if quoted else why)
        self.why, self.quoted = why, quoted


# Errors that machines and data can cause in correct code. The owner of the call gets them, and the rest continues
# (`init.pid1.wait`: `scope`, `poller`); any other exception is a bug and stops everything in order.
ORDINARY = (OSError, MemoryError, RecursionError, ImportError, ValueError, ArithmeticError, InitError, CannotStart)


def describe_error(error: BaseException) -> str:
    """Describe an ordinary error in a few words."""
    if isinstance(error, OSError):
        return (f"{error.filename}: " if error.filename else "") + (error.strerror or str(error))
    if isinstance(error, MemoryError):
        return "out of memory"
    if isinstance(error, RecursionError):
        return "nested too deeply"
    if isinstance(error, CannotStart):
        return error.why  # not every user may read the quoted part
    return str(error) or type(error).__name__


def nearest(name: str, known: list[str]) -> str:
    """Return a hint with the closest known name, or with all names when none is close."""
    import difflib  # imported late: only a mistake needs it

    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    if close:
        return f"did you mean {close[0]}?"
    return f"known: {', '.join(sorted(known))}" if known else ""
