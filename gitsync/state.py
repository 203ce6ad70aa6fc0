"""State that gitsync keeps between cycles, and the pin file: one JSON file, replaced atomically.

The `current` link alone decides what is published; losing the state file costs history, never the tree.
The reports at the end go to the metrics file, init's control socket and the service manager. A missing or failing
receiver never stops a cycle.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from gitsync.layout import ZERO, Layout, is_commit
from gitsync.rings import is_canary
from gitsync.settings import GitsyncSettings
from ground.files import write_whole
from ground.metrics import family
from ground.sockets import ask

# Earlier commits that are remembered, and that the mirror still serves for rollbacks and pins.
HISTORY = 20


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

    def is_quarantined(self, oid: str, policy: str) -> bool:
        """Tell whether `oid` is still refused: the ref has not moved and the refusing settings have not changed."""
        quarantine = self.quarantine
        # A person's rollback has no policy: it ends only when the ref moves.
        return quarantine is not None and quarantine.oid == oid and quarantine.policy in {"", policy}

    @property
    def commits(self) -> list[Published]:
        """The published commit and the earlier ones, newest first."""
        return [each for each in (self.published, *self.history) if each is not None]

    def find_former(self, commit: str) -> Published | None:
        """Find an earlier published commit."""
        return next((old for old in self.history if old.commit == commit), None)

    def record_attempt(self, now: float) -> GitsyncState:
        return replace(self, last_attempt=now)

    def record_success(self, now: float) -> GitsyncState:
        """Record that the repository answered, whether or not its commit was taken."""
        return replace(self, failures=0, last_error="", last_success=now)

    def record_failure(self, error: str, now: float) -> GitsyncState:
        return replace(self, failures=self.failures + 1, last_error=error, last_error_at=now)

    def record_save_failure(self, error: str) -> GitsyncState:
        """Record that the state could not be saved, without hiding an earlier error."""
        return replace(self, last_error=self.last_error or error)

    def record_duration(self, step: str, seconds: float) -> GitsyncState:
        return replace(self, durations={**self.durations, step: round(seconds, 4)})

    def record_tip(self, oid: str) -> GitsyncState:
        """Record what the ref points to now."""
        return replace(self, tip_oid=oid)

    def record_candidate(self, candidate: Candidate) -> GitsyncState:
        return replace(self, candidate=candidate)

    def record_refusal(self, quarantine: Quarantine) -> GitsyncState:
        return replace(self, quarantine=quarantine, candidate=None, refused_total=self.refused_total + 1)

    def record_rollback(self, quarantine: Quarantine) -> GitsyncState:
        """Record that a person rolled back from a commit; does not count as a refusal."""
        return replace(self, quarantine=quarantine, candidate=None)

    def end_quarantine(self) -> GitsyncState:
        return replace(self, quarantine=None)

    def record_check(self, published: Published, now: float) -> GitsyncState:
        """Record that the live tree matches its commit, with that commit's details."""
        return replace(self, published=published, candidate=None, looked_at=now)

    def record_publication(self, published: Published) -> GitsyncState:
        """Record that a tree went live; the previous one joins the history, newest first."""
        before = self.published
        history = self.history
        if before is not None and before.commit != published.commit:
            history = (before, *(old for old in history if old.commit not in {before.commit, published.commit}))
        return replace(self, published=published, history=history[:HISTORY], published_total=self.published_total + 1)


def to_json(state: GitsyncState) -> str:
    return json.dumps(asdict(state), indent=1, sort_keys=True) + "\n"


def _drop_unknown_keys(kind: type, data: dict[str, Any]) -> dict[str, Any]:
    """Drop the keys of a newer version: rolling back the image must not lose the state."""
    names = {each.name for each in fields(kind)}
    return {key: value for key, value in data.items() if key in names}


def from_json(text: str) -> GitsyncState:
    data = json.loads(text)
    for key, kind in (("published", Published), ("candidate", Candidate), ("quarantine", Quarantine)):
        if data.get(key) is not None:
            data[key] = kind(**_drop_unknown_keys(kind, data[key]))
    data["history"] = tuple(Published(**_drop_unknown_keys(Published, each)) for each in data.get("history", ()))
    return GitsyncState(**_drop_unknown_keys(GitsyncState, data))


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


# Failed cycles in a row before the pod's status mentions them: a single failed fetch is normal.
FAILURES_TO_MENTION = 3


def describe_trouble(state: GitsyncState, settings: GitsyncSettings) -> str:
    """Describe in one sentence what is wrong; empty when all is well. Pure."""
    live = state.published.commit[:12] if state.published else "nothing"
    if state.quarantine is not None:
        return f"scripts: {state.quarantine.commit[:12] or 'a commit'} refused: {state.quarantine.reason}; {live} stays"
    if state.failures >= FAILURES_TO_MENTION:
        return f"scripts: {state.failures} cycles failed: {state.last_error}; {live} stays"
    if settings.repo is not None and state.published is not None and state.published.commit == ZERO and state.failures:
        return f"scripts: the image's own, because: {state.last_error}"
    return ""


def render_metrics(state: GitsyncState, settings: GitsyncSettings, now: float) -> str:
    """Render the state in Prometheus text format. Pure."""
    published = state.published
    lines: list[str] = []

    def metric(name: str, about: str, value: float, kind: str = "gauge", **labels: str) -> None:
        lines.extend(family(f"minivm_gitsync_{name}", about, [(labels, f"{value:.10g}")], kind))

    if published is not None:
        metric(
            "info", "The published commit.", 1, commit=published.commit, ref=published.ref, signer=published.signer,
            ring="canary" if is_canary(settings.pod, settings.canary_percent) else "rest",
        )  # fmt: skip
        metric("published_timestamp_seconds", "When it was published here.", published.at)
        metric("commit_timestamp_seconds", "When it was committed.", published.committed)
        metric("tree_files", "Files in the published tree.", published.files)
        metric("tree_bytes", "Bytes in the published tree.", published.bytes)
    metric("last_attempt_timestamp_seconds", "When the last cycle ran.", state.last_attempt)
    metric("last_success_timestamp_seconds", "When the repository last answered.", state.last_success)
    metric("age_seconds", "Seconds since the repository last answered, at the last cycle.",
           max(0.0, now - state.last_success) if state.last_success else -1)  # fmt: skip
    metric("failures", "Failed cycles in a row.", state.failures)
    metric("quarantined", "1 if the newest commit is refused.", 1 if state.quarantine else 0)
    metric("waiting", "1 if a newer commit waits for its ring.", 1 if state.candidate and not state.quarantine else 0)
    metric("refused_total", "Commits refused.", state.refused_total, "counter")
    metric("published_total", "Commits published.", state.published_total, "counter")
    if state.durations:
        steps = [({"step": step}, f"{seconds:.10g}") for step, seconds in sorted(state.durations.items())]
        lines += family("minivm_gitsync_step_duration_seconds", "How long a step last took.", steps)
    if state.last_error and state.failures:
        metric("last_error_info", "What the last cycle failed on.", 1, error=state.last_error[:200])
    return "\n".join(lines) + "\n"


def set_condition(control: Path, text: str) -> bool:
    """Set gitsync's condition in the pod's status (empty removes it); return whether init accepted it."""
    request = {"op": "condition", "name": "gitsync", "text": text[:1000], "blocking": False}
    answer = ask(control, request, 2.0)
    return answer is not None and answer.get("ok") is True


def summarise(state: GitsyncState, settings: GitsyncSettings) -> str:
    """Summarise for sd_notify's STATUS= what is published, and why nothing newer is. Pure."""
    published = state.published
    live = f"{published.commit[:12]}" + (f" of {published.ref}" if published.ref else "") if published else "nothing"
    if problem := describe_trouble(state, settings):
        return problem
    if state.candidate is not None:
        return f"{live}; {state.candidate.commit[:12]} waits: {state.candidate.reason}"
    if state.failures:
        return f"{live}; {state.last_error}"
    return live
