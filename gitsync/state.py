"""State that gitsync keeps between cycles, and the pin file: one JSON file, replaced atomically.

The `current` link alone decides what is published; losing the state file costs history, never the tree.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from gitsync.layout import ZERO, Layout, is_commit
from ground.files import write_whole

HISTORY = 10


@dataclass(frozen=True, slots=True)
class Published:
    """A commit whose tree is or was behind `current`."""

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
    """The newest commit of the ref while it is not published: waiting for its ring, or being checked."""

    oid: str
    commit: str
    seen: float
    reason: str = ""
    stalls: int = 0


@dataclass(frozen=True, slots=True)
class Quarantine:
    """A refused commit. It stays refused until the ref moves off `oid` or the policy changes."""

    oid: str
    commit: str
    step: str
    reason: str
    at: float
    policy: str


@dataclass(frozen=True, slots=True)
class GitsyncState:
    """Everything gitsync remembers. Immutable: each method returns a changed copy."""

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
        """The published commit and the earlier ones, newest first."""
        return [each for each in (self.published, *self.history) if each is not None]

    def formerly(self, commit: str) -> Published | None:
        """Find an earlier published commit."""
        return next((old for old in self.history if old.commit == commit), None)

    def attempted(self, now: float) -> GitsyncState:
        return replace(self, last_attempt=now)

    def succeeded(self, now: float) -> GitsyncState:
        """Record that the repository answered, whether or not its commit was taken."""
        return replace(self, failures=0, last_error="", last_success=now)

    def failed(self, error: str, now: float) -> GitsyncState:
        return replace(self, failures=self.failures + 1, last_error=error, last_error_at=now)

    def unsaved(self, error: str) -> GitsyncState:
        """Record that the state could not be saved, without hiding an earlier error."""
        return replace(self, last_error=self.last_error or error)

    def took(self, step: str, seconds: float) -> GitsyncState:
        return replace(self, durations={**self.durations, step: round(seconds, 4)})

    def following(self, oid: str) -> GitsyncState:
        """Record what the ref points to now."""
        return replace(self, tip_oid=oid)

    def waiting(self, candidate: Candidate) -> GitsyncState:
        return replace(self, candidate=candidate)

    def refused(self, quarantine: Quarantine) -> GitsyncState:
        return replace(self, quarantine=quarantine, candidate=None, refused_total=self.refused_total + 1)

    def left_alone(self, quarantine: Quarantine) -> GitsyncState:
        """Record that a person rolled back from a commit; does not count as a refusal."""
        return replace(self, quarantine=quarantine, candidate=None)

    def released(self) -> GitsyncState:
        return replace(self, quarantine=None)

    def looked_over(self, published: Published, now: float) -> GitsyncState:
        """Record that the live tree matches its commit, with that commit's details."""
        return replace(self, published=published, candidate=None, looked_at=now)

    def with_published(self, published: Published) -> GitsyncState:
        """Record that a tree went live; the previous one joins the history, newest first."""
        before = self.published
        history = self.history
        if before is not None and before.commit != published.commit:
            history = (before, *(old for old in history if old.commit not in {before.commit, published.commit}))
        return replace(self, published=published, history=history[:HISTORY], published_total=self.published_total + 1)


def to_json(state: GitsyncState) -> str:
    return json.dumps(asdict(state), indent=1, sort_keys=True) + "\n"


def _known(kind: type, data: dict[str, Any]) -> dict[str, Any]:
    """Drop the keys of a newer version: rolling back the image must not lose the state."""
    names = {each.name for each in fields(kind)}
    return {key: value for key, value in data.items() if key in names}


def from_json(text: str) -> GitsyncState:
    data = json.loads(text)
    for key, kind in (("published", Published), ("candidate", Candidate), ("quarantine", Quarantine)):
        if data.get(key) is not None:
            data[key] = kind(**_known(kind, data[key]))
    data["history"] = tuple(Published(**_known(Published, each)) for each in data.get("history", ()))
    return GitsyncState(**_known(GitsyncState, data))


def load_state(path: Path) -> GitsyncState:
    try:
        return from_json(path.read_text())
    except (OSError, ValueError, TypeError, AttributeError):
        return GitsyncState()


def save_state(path: Path, state: GitsyncState) -> None:
    write_whole(path, to_json(state))


# The pin file: a person's request that the node stays on one commit until the file is removed.
def read_pin(layout: Layout) -> str | None:
    """Return the pinned commit or `zero`; None without a pin, or when the file is damaged."""
    try:
        commit = json.loads(layout.pin.read_text())["commit"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return commit if isinstance(commit, str) and (is_commit(commit) or commit == ZERO) else None


def write_pin(layout: Layout, commit: str, now: float) -> None:
    write_whole(layout.pin, json.dumps({"commit": commit, "at": now}) + "\n")
