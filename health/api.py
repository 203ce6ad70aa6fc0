"""What a file in `scripts/health.d` imports: the declaration of a check, its sources, and what it may say.

A check is a module with three names:

    CHECK = Check(name=..., about=..., class_=..., period_s=..., when=..., sources=(...), thresholds="gpu")
    def parse(inputs: Inputs) -> T            # pure: text of real tools -> measurements; Unreadable if it is not that
    def judge(measured: T, context: Context) -> Iterable[Finding]     # pure: measurements against thresholds

Neither opens a file or runs a program: the sources say what is to be read, and the same two functions judge a
recording, an evidence capsule and a live node. This module is an interface between an image and a tree that changes
more often: only add to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from health.verdict import Class, Finding, Result

__all__ = [
    "Builtin",
    "Capture",
    "Check",
    "Class",
    "Command",
    "Context",
    "Failure",
    "Files",
    "Finding",
    "Hardware",
    "Inputs",
    "Limits",
    "Result",
    "Source",
    "Unreadable",
    "UserMade",
    "When",
    "ok",
    "problem",
    "unknown",
]


class When(StrEnum):
    PROLOG = "prolog"
    BACKGROUND = "background"
    EPILOG = "epilog"
    BOOT = "boot"
    # Minutes long, or it needs the whole node: only when somebody asks, or at pod start where that is wished.
    DEEP = "deep"


class Hardware(StrEnum):
    ANY = "any"
    GPU = "gpu"
    IB = "ib"
    NVME = "nvme"


class UserMade(StrEnum):
    """Whether a job's user can bring about, or forge, what a check sees; then its class is at most `user`.

    Of a check that says "partly" each finding is taken for the user's that does not say otherwise (`user_made=False`).
    """

    NO = "no"
    PARTLY = "partly"
    YES = "yes"


class Failure(StrEnum):
    """Why a source gave nothing."""

    MISSING = "missing"
    TIMEOUT = "timeout"
    FAILED = "failed"
    TRUNCATED = "truncated"


class Unreadable(ValueError):
    """The text is not what this tool prints: the verdict is "unknown"."""


@dataclass(frozen=True, slots=True)
class Command:
    """A program's output, standard error included. `each` runs it once for every path that the pattern matches."""

    name: str
    argv: tuple[str, ...]
    deadline_s: float = 10.0
    # Exit codes that count as an answer; empty: any.
    accept: tuple[int, ...] = (0,)
    each: str = ""
    # Kept in an evidence capsule whichever check failed.
    evidence: bool = False


@dataclass(frozen=True, slots=True)
class Files:
    """Small files, as `tail -n +1 FILES...` prints them: a line "==> path <==" before each."""

    name: str
    patterns: tuple[str, ...]
    evidence: bool = False


@dataclass(frozen=True, slots=True)
class Builtin:
    """What the collector reads itself: see `health/checks/builtin.py` for the names."""

    name: str
    evidence: bool = False


Source = Command | Files | Builtin


@dataclass(frozen=True, slots=True)
class Capture:
    """What a source gave: text, or why not."""

    text: str = ""
    failure: Failure | None = None
    why: str = ""
    # The program's exit code, where there was one.
    code: int | None = None


class Inputs(Mapping[str, str]):
    """The sources' texts by name. A source that failed is absent here and told by `failure`."""

    def __init__(self, captures: Mapping[str, Capture]) -> None:
        self._captures = dict(captures)

    def __getitem__(self, name: str) -> str:
        capture = self._captures[name]
        if capture.failure is not None:
            raise Unreadable(capture.why)
        return capture.text

    def __iter__(self) -> Any:
        return iter(self._captures)

    def __len__(self) -> int:
        return len(self._captures)

    def failure(self, name: str) -> Failure | None:
        return self._captures[name].failure

    def code(self, name: str) -> int | None:
        return self._captures[name].code

    def why(self, name: str) -> str:
        return self._captures[name].why

    def text(self, name: str) -> str:
        """Whatever the source printed, even if it failed."""
        return self._captures[name].text


class Limits:
    """One threshold file: a default, and what differs by model. Asking for a value that is not there is an error."""

    def __init__(self, data: Mapping[str, Any], file: str) -> None:
        self.data = data
        self.file = file

    def model(self, name: str) -> Limits:
        """The default with the longest matching model's values over it."""
        models: Mapping[str, Any] = self.data.get("models", {})
        matching = sorted((key for key in models if key.lower() in name.lower()), key=len)
        default = self.data.get("default", {})
        return Limits({**default, **(models[matching[-1]] if matching else {})}, self.file)

    @property
    def default(self) -> Limits:
        return self.model("")

    def number(self, key: str) -> float:
        value = self._get(key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise Unreadable(f"{self.file}: {key}: wanted a number, not {value!r}")
        return float(value)

    def text(self, key: str) -> str:
        return str(self._get(key))

    def strings(self, key: str) -> tuple[str, ...]:
        value = self._get(key)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise Unreadable(f"{self.file}: {key}: wanted a list of strings, not {value!r}")
        return tuple(value)

    def mapping(self, key: str) -> Mapping[str, Any]:
        value = self._get(key)
        if not isinstance(value, dict):
            raise Unreadable(f"{self.file}: {key}: wanted a mapping, not {value!r}")
        return value

    def _get(self, key: str) -> Any:
        if key not in self.data:
            raise Unreadable(f"{self.file}: no threshold {key!r}")
        return self.data[key]


@dataclass(frozen=True, slots=True)
class Context:
    """What a judgement may lean on beside the measurements."""

    now: float
    limits: Limits
    # What the check remembered at its last run since boot (`state` below); empty at the first.
    previous: Mapping[str, Any] = field(default_factory=dict)
    # What the pod was promised: {"gpus": "8"}.
    expect: Mapping[str, str] = field(default_factory=dict)
    # Filled by the judgement: what it wants to see again next time.
    state: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    about: str
    class_: Class
    period_s: float
    sources: tuple[Source, ...]
    when: frozenset[When] = frozenset({When.BACKGROUND})
    # Parsing and judging; a source has its own deadline.
    deadline_s: float = 2.0
    # The file lib/thresholds/NAME.json; "": none.
    thresholds: str = "host"
    hardware: Hardware = Hardware.ANY
    # How long a verdict is believed; the default forgives one missed round.
    expires_s: float = 0.0
    # The check itself makes sense of a source that failed (a hung nvidia-smi is a finding for the check of the bus).
    judges_failures: bool = False
    user_made: UserMade = UserMade.NO

    @property
    def lifetime_s(self) -> float:
        return self.expires_s or 2.5 * self.period_s


class CheckModule(Protocol):
    """A file of health.d, loaded."""

    CHECK: Check
    parse: Callable[[Inputs], Any]
    judge: Callable[[Any, Context], Iterable[Finding]]


def ok(reason: str, *, subject: str = "host", measured: object = "", threshold: object = "") -> Finding:
    return Finding(Result.OK, reason, subject, None, str(measured), str(threshold))


def problem(
    reason: str,
    *,
    subject: str = "host",
    class_: Class | None = None,
    measured: object = "",
    threshold: object = "",
    user_made: bool | None = None,
) -> Finding:
    return Finding(Result.PROBLEM, reason, subject, class_, str(measured), str(threshold), user_made)


def unknown(reason: str, *, subject: str = "host") -> Finding:
    return Finding(Result.UNKNOWN, reason, subject)
