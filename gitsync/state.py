"""What gitsync remembers between cycles: one JSON file, replaced whole. The `current` link stays the only truth about
what is published; a state file that is lost or unreadable costs history, never the tree."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from ground.files import write_whole

HISTORY = 10


@dataclass(frozen=True, slots=True)
class Published:
    """The tree behind `current`."""

    commit: str
    at: float
    oid: str = ""
    ref: str = ""
    signer: str = ""
    author: str = ""
    subject: str = ""
    committed: float = 0.0
    files: int = 0
    bytes: int = 0
    policy: str = ""


@dataclass(frozen=True, slots=True)
class Candidate:
    """The newest commit of the ref, where it is not published: waiting its turn, or refused."""

    oid: str
    commit: str
    seen: float
    reason: str = ""
    stalls: int = 0


@dataclass(frozen=True, slots=True)
class Quarantine:
    """A commit that was refused. It stays refused until the ref moves off `oid` or the policy changes."""

    oid: str
    commit: str
    step: str
    reason: str
    at: float
    policy: str


@dataclass(frozen=True, slots=True)
class State:
    """It changes by the methods below and in no other way, each time to another whole."""

    published: Published | None = None
    candidate: Candidate | None = None
    quarantine: Quarantine | None = None
    tip_oid: str = ""
    looked_at: float = 0.0
    last_attempt: float = 0.0
    last_success: float = 0.0
    last_error: str = ""
    last_error_at: float = 0.0
    failures: int = 0
    refused_total: int = 0
    published_total: int = 0
    durations: dict[str, float] = field(default_factory=dict)
    history: tuple[Published, ...] = ()

    @property
    def commits(self) -> list[Published]:
        """What is live and what was, newest first."""
        return [each for each in (self.published, *self.history) if each is not None]

    def formerly(self, commit: str) -> Published | None:
        """What was live before, by its commit."""
        return next((old for old in self.history if old.commit == commit), None)

    def attempted(self, now: float) -> State:
        return replace(self, last_attempt=now)

    def succeeded(self, now: float) -> State:
        """The repository answered, whatever became of its commit."""
        return replace(self, failures=0, last_error="", last_success=now)

    def failed(self, error: str, now: float) -> State:
        return replace(self, failures=self.failures + 1, last_error=error, last_error_at=now)

    def unsaved(self, error: str) -> State:
        """An error that comes after all others, and hides none."""
        return replace(self, last_error=self.last_error or error)

    def took(self, step: str, seconds: float) -> State:
        return replace(self, durations={**self.durations, step: round(seconds, 4)})

    def following(self, oid: str) -> State:
        """Where the ref is now."""
        return replace(self, tip_oid=oid)

    def waiting(self, candidate: Candidate) -> State:
        return replace(self, candidate=candidate)

    def refused(self, quarantine: Quarantine) -> State:
        return replace(self, quarantine=quarantine, candidate=None, refused_total=self.refused_total + 1)

    def left_alone(self, quarantine: Quarantine) -> State:
        """By a person, who stepped back from it: nothing was refused."""
        return replace(self, quarantine=quarantine, candidate=None)

    def released(self) -> State:
        return replace(self, quarantine=None)

    def looked_over(self, published: Published, now: float) -> State:
        """The live tree is what its commit says; and what else is known of that commit."""
        return replace(self, published=published, candidate=None, looked_at=now)

    def with_published(self, published: Published) -> State:
        """A tree went live; what was live before is history, newest first."""
        before = self.published
        history = self.history
        if before is not None and before.commit != published.commit:
            history = (before, *(old for old in history if old.commit not in {before.commit, published.commit}))
        return replace(self, published=published, history=history[:HISTORY], published_total=self.published_total + 1)


def to_json(state: State) -> str:
    return json.dumps(asdict(state), indent=1, sort_keys=True) + "\n"


def _known(kind: type, data: dict[str, Any]) -> dict[str, Any]:
    """A newer version's keys are dropped: a roll-back of the image must not lose the state."""
    names = {each.name for each in fields(kind)}
    return {key: value for key, value in data.items() if key in names}


def from_json(text: str) -> State:
    data = json.loads(text)
    for key, kind in (("published", Published), ("candidate", Candidate), ("quarantine", Quarantine)):
        if data.get(key) is not None:
            data[key] = kind(**_known(kind, data[key]))
    data["history"] = tuple(Published(**_known(Published, each)) for each in data.get("history", ()))
    return State(**_known(State, data))


def load_state(path: Path) -> State:
    try:
        return from_json(path.read_text())
    except (OSError, ValueError, TypeError, AttributeError):
        return State()


def save_state(path: Path, state: State) -> None:
    write_whole(path, to_json(state))
