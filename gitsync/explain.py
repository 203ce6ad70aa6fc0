"""Words for a person: why this commit, and which commit a short hash means. Pure, but for a look at the disk."""

from __future__ import annotations

from gitsync import report
from gitsync.errors import GitsyncError
from gitsync.layout import ZERO, is_commit
from gitsync.pin import read_pin
from gitsync.settings import Settings
from gitsync.state import State, load_state
from gitsync.tree import publish

SHORTEST = 6


def why(settings: Settings, known: State, live: str | None) -> list[str]:
    """From what is so to what decided it."""
    if live is None:
        return ["nothing is published: no cycle has run, and the image's tree is missing"]
    published = known.published
    lines = [f"{live} is published"]
    if published is not None and published.commit == live and published.ref:
        by = f", signed by {published.signer}" if published.signer else ", its signature not asked for"
        lines[0] += f": it was the newest commit of {published.ref}{by}"
    elif live == ZERO:
        lines[0] = f"generation zero, from the image, is published ({settings.zero})"
    pin = read_pin(settings.layout)
    if pin is not None:
        lines.append(f"it is pinned to {pin}: gitsync unpin follows {settings.ref} again")
        return lines
    if settings.repo is None:
        lines.append("no repository is set (MINIVM_GITSYNC_REPO)")
    if known.candidate is not None:
        lines.append(
            f"{known.candidate.commit} is newer and waits: {known.candidate.reason or 'it is being looked at'}"
        )
    if known.quarantine is not None:
        lines.append(
            f"{known.quarantine.commit or known.quarantine.oid} is newer and was refused at the step "
            f"{known.quarantine.step}: {known.quarantine.reason}"
        )
        ends = "the ref moves" if not known.quarantine.policy else "the ref moves or the settings change"
        lines.append(f"it is not tried again until {ends}")
    if known.failures:
        lines.append(f"the last {known.failures} cycles failed: {known.last_error}")
    if len(lines) == 1:
        lines.append("nothing newer is known" + (f": {report.trouble(known, settings)}" if known.last_error else ""))
    return lines


def whole(settings: Settings, text: str) -> str:
    """The commit that a person means: `zero`, a whole hash, or the beginning of one that is or was published here."""
    if text == ZERO or is_commit(text):
        return text
    known = load_state(settings.layout.state)
    names = {each.commit for each in known.commits}
    names |= set(publish.present(settings.layout))
    found = sorted(name for name in names if is_commit(name) and name.startswith(text))
    if len(text) < SHORTEST or len(found) != 1:
        raise GitsyncError(
            "tell which commit is meant",
            f"{text!r} is the beginning of {len(found)} commits on this node",
            hint="give the whole hash" + (f"; here are {', '.join(name[:12] for name in found)}" if found else ""),
        )
    return found[0]
