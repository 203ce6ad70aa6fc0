"""Explain to a person why a commit is published, and expand a short hash. Reads the disk, changes nothing."""

from __future__ import annotations

from gitsync import report
from gitsync.errors import GitsyncError
from gitsync.layout import ZERO, is_commit
from gitsync.pin import read_pin
from gitsync.settings import Settings
from gitsync.state import State, load_state
from gitsync.tree import publish

SHORTEST = 6


def why(settings: Settings, state: State, live: str | None) -> list[str]:
    """List the facts, one sentence each, that explain the published commit; the deciding fact comes last."""
    if live is None:
        return ["nothing is published: no cycle has run, and the image's tree is missing"]
    published = state.published
    lines = [f"{live} is published"]
    if published is not None and published.commit == live and published.ref:
        by = f", signed by {published.signer}" if published.signer else ", its signature not verified"
        lines[0] += f": it was the newest commit of {published.ref}{by}"
    elif live == ZERO:
        lines[0] = f"generation zero, from the image, is published ({settings.zero})"
    pin = read_pin(settings.layout)
    if pin is not None:
        lines.append(f"it is pinned to {pin}: gitsync unpin follows {settings.ref} again")
        return lines
    if settings.repo is None:
        lines.append("no repository is set (MINIVM_GITSYNC_REPO)")
    if state.candidate is not None:
        lines.append(f"{state.candidate.commit} is newer and waits: {state.candidate.reason or 'it is being checked'}")
    if state.quarantine is not None:
        lines.append(
            f"{state.quarantine.commit or state.quarantine.oid} is newer and was refused at the step "
            f"{state.quarantine.step}: {state.quarantine.reason}"
        )
        ends = "the ref moves" if not state.quarantine.policy else "the ref moves or the settings change"
        lines.append(f"it is not tried again until {ends}")
    if state.failures:
        lines.append(f"the last {state.failures} cycles failed: {state.last_error}")
    if len(lines) == 1:
        lines.append("nothing newer is known" + (f": {report.trouble(state, settings)}" if state.last_error else ""))
    return lines


def full_commit(settings: Settings, text: str) -> str:
    """Expand what a person typed: `zero`, a whole hash, or the beginning of one that is or was published here."""
    if text == ZERO or is_commit(text):
        return text
    names = {published.commit for published in load_state(settings.layout.state).commits}
    names |= set(publish.present(settings.layout))
    matches = sorted(name for name in names if is_commit(name) and name.startswith(text))
    if len(text) < SHORTEST or len(matches) != 1:
        raise GitsyncError(
            "tell which commit is meant",
            f"{text!r} is the beginning of {len(matches)} commits on this node",
            hint="give the whole hash" + (f", such as {', '.join(name[:12] for name in matches)}" if matches else ""),
        )
    return matches[0]
