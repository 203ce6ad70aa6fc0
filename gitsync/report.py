"""Report gitsync's status to the metrics file, init's control socket and the service manager.

A missing or failing receiver never stops a cycle.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from gitsync.layout import ZERO
from gitsync.schedule import is_canary
from gitsync.settings import GitsyncSettings
from gitsync.state import GitsyncState
from ground.files import write_whole
from ground.metrics import family
from ground.sockets import ask

# Failed cycles in a row before the pod's status mentions them: a single failed fetch is normal.
FAILURES_TO_MENTION = 3


def trouble(state: GitsyncState, settings: GitsyncSettings) -> str:
    """Describe in one sentence what is wrong; empty when all is well. Pure."""
    live = state.published.commit[:12] if state.published else "nothing"
    if state.quarantine is not None:
        return f"scripts: {state.quarantine.commit[:12] or 'a commit'} refused: {state.quarantine.reason}; {live} stays"
    if state.failures >= FAILURES_TO_MENTION:
        return f"scripts: {state.failures} cycles failed: {state.last_error}; {live} stays"
    if settings.repo is not None and state.published is not None and state.published.commit == ZERO and state.failures:
        return f"scripts: the image's own, because: {state.last_error}"
    return ""


def metrics(state: GitsyncState, settings: GitsyncSettings, now: float) -> str:
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


def write_metrics(state: GitsyncState, settings: GitsyncSettings, now: float) -> None:
    with contextlib.suppress(OSError):
        settings.metrics.parent.mkdir(parents=True, exist_ok=True)
        write_whole(settings.metrics, metrics(state, settings, now))


def condition(control: Path, text: str) -> bool:
    """Set gitsync's condition in the pod's status (empty removes it); return whether init accepted it."""
    request = {"op": "condition", "name": "gitsync", "text": text[:1000], "blocking": False}
    answer = ask(control, request, 2.0)
    return answer is not None and answer.get("ok") is True


def summary(state: GitsyncState, settings: GitsyncSettings) -> str:
    """Summarise for sd_notify's STATUS= what is published, and why nothing newer is. Pure."""
    published = state.published
    live = f"{published.commit[:12]}" + (f" of {published.ref}" if published.ref else "") if published else "nothing"
    if problem := trouble(state, settings):
        return problem
    if state.candidate is not None:
        return f"{live}; {state.candidate.commit[:12]} waits: {state.candidate.reason}"
    if state.failures:
        return f"{live}; {state.last_error}"
    return live
