"""Interface for files in `health.d` and `active.d`: a check's declaration, its sources and its findings.

A check is a module with three names:

    CHECK = Check(name=..., about=..., class_=..., period_s=..., when=..., sources=(...), thresholds="gpu")
    def parse(inputs: Inputs) -> T            # pure: text of real tools -> measurements; Unreadable if it is not that
    def judge(measured: T, context: Context) -> Iterable[Finding]     # pure: measurements against thresholds

Neither opens a file or runs a program: the collector reads the declared sources, so the same two functions judge a
recording, an evidence capsule and a live node. This module is the interface between an image and a tree that changes
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
    # Takes minutes or needs the whole node: runs only on request, or at pod start where that is configured.
    DEEP = "deep"
    # A file of `active.d`: runs as a job of Slurm on idle nodes.
    ACTIVE = "active"


class Hardware(StrEnum):
    ANY = "any"
    GPU = "gpu"
    IB = "ib"
    NVME = "nvme"


class UserMade(StrEnum):
    """Tells if a job's user can cause or forge what a check sees; then the class is at most `user`.

    With "partly", a finding counts as user-made unless it says `user_made=False`.
    """

    NO = "no"
    PARTLY = "partly"
    YES = "yes"


class Failure(StrEnum):
    """Reason for a source's failure."""

    MISSING = "missing"
    TIMEOUT = "timeout"
    FAILED = "failed"
    TRUNCATED = "truncated"


class Unreadable(ValueError):
    """The text is not this tool's output; the verdict becomes "unknown"."""


@dataclass(frozen=True, slots=True)
class Command:
    """A program whose output is read, standard error included.

    `each` runs it once per path that matches the pattern.
    """

    name: str
    argv: tuple[str, ...]
    deadline_s: float = 10.0
    # Exit codes that count as an answer; empty: any.
    accept: tuple[int, ...] = (0,)
    each: str = ""
    # Kept in an evidence capsule, no matter which check failed.
    evidence: bool = False


@dataclass(frozen=True, slots=True)
class Files:
    """Small files in the format of `tail -n +1 FILES...`: a line "==> path <==" before each."""

    name: str
    patterns: tuple[str, ...]
    evidence: bool = False


@dataclass(frozen=True, slots=True)
class Builtin:
    """A source that the collector reads itself; `health/checks/builtin.py` has the names."""

    name: str
    evidence: bool = False


Source = Command | Files | Builtin


@dataclass(frozen=True, slots=True)
class Capture:
    """Result of reading a source: its text, or the failure."""

    text: str = ""
    failure: Failure | None = None
    why: str = ""
    # The program's exit code, if a program ran.
    code: int | None = None


class Inputs(Mapping[str, str]):
    """The sources' texts by name. Indexing a failed source raises Unreadable; `failure` gives its reason."""

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
        """Return all text of the source, even if it failed."""
        return self._captures[name].text


class Limits:
    """One threshold file: a default and overrides by model. Reading a missing value raises Unreadable."""

    def __init__(self, data: Mapping[str, Any], file: str) -> None:
        self.data = data
        self.file = file

    def model(self, name: str) -> Limits:
        """Return the default overridden by the longest matching model's values."""
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
    """Facts beside the measurements that a judgement may use."""

    now: float
    limits: Limits
    # The check's `state` (below) at its previous run since boot; empty at the first run.
    previous: Mapping[str, Any] = field(default_factory=dict)
    # Hardware promised to the pod: {"gpus": "8"}.
    expect: Mapping[str, str] = field(default_factory=dict)
    # Written by `judge`: facts that the next run gets as `previous`.
    state: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    about: str
    class_: Class
    period_s: float
    sources: tuple[Source, ...]
    when: frozenset[When] = frozenset({When.BACKGROUND})
    # For parsing and judging; each source has its own deadline.
    deadline_s: float = 2.0
    # The file lib/thresholds/NAME.json; "": none.
    thresholds: str = "host"
    hardware: Hardware = Hardware.ANY
    # How long a verdict stays valid; the default tolerates one missed round.
    expires_s: float = 0.0
    # True if the check interprets failed sources itself (for the bus check, a hung nvidia-smi is a finding).
    judges_failures: bool = False
    user_made: UserMade = UserMade.NO

    @property
    def lifetime_s(self) -> float:
        return self.expires_s or 2.5 * self.period_s


class CheckModule(Protocol):
    """A loaded file of health.d."""

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
