"""The marker file of a tree: which repository it belongs to, and which kinds of scripts it intentionally lacks.

A signature proves the author, not the purpose: the same person signs dotfiles, another cluster's scripts, and a commit
that empties this repository by mistake. So each tree has one file, covered by the signature, that states its purpose.
Pure, apart from listing a tree on the disk.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from gitsync.errors import GitsyncError, RefusedCommit
from gitsync.layout import is_script
from gitsync.repo.listing import CommitFile
from gitsync.settings import TREE_NAME, GitsyncSettings, Ref, RefKind, parse_date
from gitsync.tree.check import EXECUTED
from ground.errors import nearest

MARKER = "minivm-scripts.json"
KEYS = ("about", "name", "not_before", "without")
KINDS = (*EXECUTED, "health.d")
LONGEST = 4096
# A ref that is a whole hash cannot lead to another repository's commit, so its tree needs no marker.
UNBOUND = frozenset({RefKind.COMMIT})


@dataclass(frozen=True, slots=True)
class Marker:
    """The content of a marker file."""

    name: str
    without: frozenset[str] = frozenset()
    not_before: float = 0.0


def parse(text: bytes) -> Marker:
    """Parse a marker file; raise ValueError with the key and what is wrong with it."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(data, dict):
        raise ValueError("not an object")
    for key in data:
        if key not in KEYS:
            raise ValueError(f"unknown key {key[:40]!r}, {nearest(key, KEYS)}")
    name, without, date = data.get("name"), data.get("without", []), data.get("not_before")
    if not isinstance(name, str) or not TREE_NAME.fullmatch(name):
        raise ValueError("name: wanted up to 64 letters, digits, '.', '_' or '-'")
    if not isinstance(without, list) or not all(kind in KINDS for kind in without):
        raise ValueError(f"without: wanted a list of {', '.join(KINDS)}")
    if date is not None and not isinstance(date, str):
        raise ValueError("not_before: wanted a date such as 2026-01-31")
    try:
        return Marker(name, frozenset(without), 0.0 if date is None else parse_date(date))
    except ValueError as error:
        raise ValueError(f"not_before: {error}") from None


def kinds(paths: Iterable[str]) -> frozenset[str]:
    """Return the kinds of scripts of which a list of files has at least one."""
    parts = (path.rpartition("/") for path in paths)
    return frozenset(kind for kind, _, name in parts if kind in KINDS and is_script(name))


def kinds_on_disk(tree: Path) -> frozenset[str]:
    return kinds(f"{kind}/{path.name}" for kind in KINDS for path in tree.glob(f"{kind}/*") if path.is_file())


def of_zero(settings: GitsyncSettings) -> Marker | None:
    """Read generation zero's marker; None if a site's image has none."""
    path = settings.zero / MARKER
    try:
        return parse(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise GitsyncError("read generation zero's marker", str(error), file=path) from None


def floor(settings: GitsyncSettings) -> float:
    """Return the oldest commit date that a node without a published commit accepts from a branch.

    It is the operator's MINIVM_GITSYNC_NOT_BEFORE, or generation zero's `not_before`.
    """
    if settings.not_before is not None:
        return settings.not_before
    zero = of_zero(settings)
    return 0.0 if zero is None else zero.not_before


def judge(
    settings: GitsyncSettings,
    ref: Ref,
    entries: Sequence[CommitFile],
    read: Callable[[CommitFile], bytes],
    had: frozenset[str],
) -> None:
    """Raise RefusedCommit if the tree belongs to another repository, or has lost a kind of script.

    `had` are the kinds in the published tree, added to generation zero's. `read` returns a file's verified content.
    """
    without = frozenset[str]()
    entry = next((entry for entry in entries if entry.path == MARKER), None)
    if entry is None:
        if ref.kind not in UNBOUND:
            raise RefusedCommit(
                "accept the commit for this repository",
                f"it has no {MARKER}",
                hint=f'add one that says {{"name": "{settings.name}"}} in a signed commit',
            )
    else:
        if entry.is_link or entry.size > LONGEST:
            raise RefusedCommit(
                "accept the commit for this repository", f"its {MARKER} is not a file of at most {LONGEST} bytes"
            )
        try:
            marker = parse(read(entry))
        except ValueError as error:
            raise RefusedCommit("accept the commit for this repository", str(error), file=MARKER) from None
        if marker.name != settings.name:
            raise RefusedCommit(
                "accept the commit for this repository",
                f"it is {marker.name!r}, and {settings.name!r} is wanted",
                field="MINIVM_GITSYNC_NAME",
            )
        without = marker.without
    lost = sorted((kinds_on_disk(settings.zero) | had) - kinds(entry.path for entry in entries) - without)
    if lost:
        raise RefusedCommit(
            "accept the commit as complete",
            f"it has no script in {', '.join(lost)}, unlike generation zero or the published tree",
            hint=f'if this is intended, add {{"without": {json.dumps(lost)}}} to its {MARKER}',
        )
