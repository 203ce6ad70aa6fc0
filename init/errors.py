"""What can go wrong because of someone else's data or machine; anything that is not ORDINARY is our own bug."""

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


def raise_all(what: str, errors: list[ConfigError]) -> None:
    if len(errors) == 1:
        raise errors[0]
    if errors:
        raise ManyErrors(what, errors)


class RequestError(InitError):
    """A request over the control socket that cannot be fulfilled; PID 1 answers it and goes on."""


class CannotStart(Exception):
    """The reason of a failed start; apart from it what is quoted from the service's file, which can hold secrets."""

    def __init__(self, why: str, quoted: str = "") -> None:
        super().__init__(f"{why}: {quoted}" if quoted else why)
        self.why, self.quoted = why, quoted


# What the machine, and what others wrote, can do to code that is right. Whoever owns the call that ends so is told, and
# the others go on (`init.pid1.wait`: `scope`, `poller`); any other exception is our bug and stops everything in order.
ORDINARY = (OSError, MemoryError, RecursionError, ImportError, ValueError, ArithmeticError, InitError, CannotStart)


def in_words(error: BaseException) -> str:
    """An ordinary error in a few words."""
    if isinstance(error, OSError):
        return (f"{error.filename}: " if error.filename else "") + (error.strerror or str(error))
    if isinstance(error, MemoryError):
        return "out of memory"
    if isinstance(error, RecursionError):
        return "nested too deeply"
    if isinstance(error, CannotStart):
        return error.why  # the quoted part is not for everybody
    return str(error) or type(error).__name__


def nearest(name: str, known: list[str]) -> str:
    """A hint that names the closest of the known names, or lists them when nothing is close."""
    import difflib  # only a mistake pays for it

    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    if close:
        return f"did you mean {close[0]}?"
    return f"known: {', '.join(sorted(known))}" if known else ""
