"""What gitsync remembers between cycles: one JSON file, replaced whole. The `current` link stays the only truth about
what is published; a state file that is lost or unreadable costs history, never the tree."""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

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


def load(path: Path) -> State:
    try:
        return from_json(path.read_text())
    except (OSError, ValueError, TypeError, AttributeError):
        return State()


def write_whole(path: Path, text: str, mode: int = 0o644) -> None:
    """Unique temporary, fsync, rename: a reader sees the old text or the new, a crash leaves one of them."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        with os.fdopen(fd, "w") as out:
            os.fchmod(out.fileno(), mode)
            out.write(text)
            out.flush()
            os.fsync(out.fileno())
        temporary.rename(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def save(path: Path, state: State) -> None:
    write_whole(path, to_json(state))
