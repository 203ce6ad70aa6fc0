"""Paths under gitsync's root, and the form of a commit's name. Pure; quick to import."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

DEFAULT_ROOT = "/var/lib/minivm/scripts"
GENERATION_ZERO = "/usr/share/minivm/scripts"
# Names generation zero wherever a commit is expected.
ZERO = "zero"
COMMIT = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?")
# Prefix of what an interrupted cycle can leave in trees/ and beside the link; the next cycle removes it.
UNFINISHED = ".unfinished-"
# Endings of files beside scripts that are not scripts: an editor's backup, documentation, data.
NOT_SCRIPTS = ("~", ".md", ".txt", ".json", ".yaml", ".yml", ".toml", ".conf", ".example")


@dataclass(frozen=True, slots=True)
class Layout:
    """Paths of one node's copy.

    `current` is a symbolic link to `trees/<commit>`, or to generation zero's absolute path. A directory
    `trees/<commit>` is complete whenever it exists: a rename gives it that name after its last byte is on disk.
    """

    root: Path
    zero: Path = Path(GENERATION_ZERO)

    @classmethod
    def from_environment(cls) -> Layout:
        return cls(
            Path(os.environ.get("MINIVM_GITSYNC_ROOT", DEFAULT_ROOT)),
            Path(os.environ.get("MINIVM_GITSYNC_ZERO", GENERATION_ZERO)),
        )

    @property
    def repository(self) -> Path:
        return self.root / "repo.git"

    @property
    def trees(self) -> Path:
        return self.root / "trees"

    @property
    def leases(self) -> Path:
        return self.root / "leases"

    @property
    def reports(self) -> Path:
        return self.root / "reports"

    @property
    def current(self) -> Path:
        return self.root / "current"

    @property
    def state(self) -> Path:
        return self.root / "state.json"

    @property
    def pin(self) -> Path:
        return self.root / "pin.json"

    @property
    def lock(self) -> Path:
        return self.root / "lock"

    @property
    def wake(self) -> Path:
        """Datagram socket on which a running loop receives `gitsync now`."""
        return self.root / "wake"

    def tree(self, commit: str) -> Path:
        return self.zero if commit == ZERO else self.trees / commit

    def lease(self, commit: str) -> Path:
        return self.leases / commit


def commit_of_link(target: str, zero: Path) -> str | None:
    """Return the commit that a link's target names: `trees/<commit>` or generation zero; None for anything else."""
    head, _, name = target.rpartition("/")
    if head == "trees" and COMMIT.fullmatch(name):
        return name
    return ZERO if target == str(zero) else None


def is_script(name: str) -> bool:
    """Tell whether the runner starts a file of this name in prolog.d and its like; gitsync checks the same files."""
    return not name.startswith((".", "_")) and not name.endswith(NOT_SCRIPTS)


def is_commit(text: str) -> bool:
    return COMMIT.fullmatch(text) is not None
