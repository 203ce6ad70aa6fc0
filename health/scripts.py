"""The scripts of prologs and epilogs that are published now, by what they are: a verdict is about one script."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from gitsync.layout import GENERATION_ZERO, is_script

# The kinds whose scripts may say that a node is unfit, and so leave verdicts named KIND.SCRIPT.
KINDS = ("prolog", "epilog")
DIGITS = 16


def is_of_script(check: str) -> bool:
    """Whether a verdict of this name is a script's word, and no check's."""
    return check.startswith(tuple(f"{kind}." for kind in KINDS))


def script_digest(script: Path) -> str:
    """A digest of the file, or nothing where it cannot be read: such a verdict counts until it expires."""
    try:
        return hashlib.sha256(script.read_bytes()).hexdigest()[:DIGITS]
    except OSError:
        return ""


def published_scripts(root: Path, zero: Path = Path(GENERATION_ZERO)) -> Mapping[str, str] | None:
    """The digest of each script by the name of its verdicts; None: the published tree cannot be read.

    The link is resolved once, so that every script is of one commit. Without a link, the image's tree is published.
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
