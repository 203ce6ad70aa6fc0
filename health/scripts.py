"""Digests of the published prolog and epilog scripts: a verdict is about one version of a script."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from gitsync.layout import GENERATION_ZERO, is_script
from health.verdict import Verdict

# Kinds whose scripts may report the node unfit, which leaves a verdict named KIND.SCRIPT.
KINDS = ("prolog", "epilog")
DIGITS = 16


def is_of_script(check: str) -> bool:
    """Tell if a verdict of this name comes from a script, not from a check."""
    return check.startswith(tuple(f"{kind}." for kind in KINDS))


def script_digest(script: Path) -> str:
    """Return the file's digest; "" if unreadable: such a verdict counts until it expires."""
    try:
        return hashlib.sha256(script.read_bytes()).hexdigest()[:DIGITS]
    except OSError:
        return ""


def is_void(verdict: Verdict, scripts: Mapping[str, str] | None) -> bool:
    """Tell if a script's verdict is void: its script was removed from the published tree or replaced.

    A drained node runs no prolog, so the script can never withdraw the verdict itself.
    """
    if scripts is None or not is_of_script(verdict.check):
        return False
    now = scripts.get(verdict.check)
    return now is None or bool(verdict.digest and now and verdict.digest != now)


def without_void(verdicts: Mapping[str, Verdict], root: Path) -> dict[str, Verdict]:
    """Drop the void verdicts. `root` holds the published tree, which is read only for a script's verdict."""
    scripts = published_scripts(root) if any(map(is_of_script, verdicts)) else None
    return {name: verdict for name, verdict in verdicts.items() if not is_void(verdict, scripts)}


def published_scripts(root: Path, zero: Path = Path(GENERATION_ZERO)) -> Mapping[str, str] | None:
    """Map the name of each script's verdict to the script's digest; None if the published tree cannot be read.

    The link is resolved once, so that all scripts are of one commit. Without a link, the image's tree is published.
    """
    current = root / "current"
    try:
        tree = (current if current.is_symlink() else zero).resolve(strict=True)
        return {
            f"{kind}.{script.name}": script_digest(script)
            for kind in KINDS
            if (tree / f"{kind}.d").is_dir()
            for script in sorted((tree / f"{kind}.d").iterdir())
            if is_script(script.name)
        }
    except OSError:
        return None
