"""Whose tree it is, and whether it is whole. Pure, but for a look at a tree on the disk.

A signature says who, not for what: the same person signs her dotfiles, her other cluster's scripts, and a commit that
empties this repository by mistake. So a tree says itself, in one file under its signature, which repository it belongs
to and which kinds of scripts it means to be without.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from gitsync.errors import GitsyncError, Refused
from gitsync.layout import is_script
from gitsync.repo.listing import Entry
from gitsync.settings import TREE_NAME, Ref, RefKind, Settings, parse_date
from gitsync.tree.check import EXECUTED
from ground.errors import nearest

MARKER = "minivm-scripts.json"
KEYS = ("about", "name", "not_before", "without")
KINDS = (*EXECUTED, "health.d")
LONGEST = 4096
# A commit named by its whole hash cannot be another one, so it need not say whose it is.
UNBOUND = frozenset({RefKind.COMMIT})


@dataclass(frozen=True, slots=True)
class Marker:
    """What a tree says of itself."""

    name: str
    without: frozenset[str] = frozenset()
    not_before: float = 0.0


def parse(text: bytes) -> Marker:
    """ValueError with the key and what is wrong with it."""
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
    """The kinds of which a list of files has at least one script."""
    found = set()
    for path in paths:
        kind, _, name = path.rpartition("/")
        if kind in KINDS and is_script(name):
            found.add(kind)
    return frozenset(found)


def kinds_on_disk(tree: Path) -> frozenset[str]:
    return kinds(f"{kind}/{path.name}" for kind in KINDS for path in tree.glob(f"{kind}/*") if path.is_file())


def of_zero(settings: Settings) -> Marker | None:
    """Generation zero's own; None where an image of a site's has none."""
    path = settings.zero / MARKER
    try:
        return parse(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise GitsyncError("read what generation zero says of itself", str(error), file=path) from None


def floor(settings: Settings) -> float:
    """What a branch's commit must not be older than on a node that knows no other: the date that the operator names,
    or generation zero's."""
    if settings.not_before is not None:
        return settings.not_before
    zero = of_zero(settings)
    return 0.0 if zero is None else zero.not_before


def judge(
    settings: Settings, ref: Ref, entries: Sequence[Entry], read: Callable[[Entry], bytes], had: frozenset[str]
) -> None:
    """Refused where the tree is another repository's, or has lost a kind of script. `had`: the kinds of the tree
    before, beside generation zero's. `read` gives a file's content, compared with its hash."""
    without = frozenset[str]()
    entry = next((entry for entry in entries if entry.path == MARKER), None)
    if entry is None:
        if ref.kind not in UNBOUND:
            raise Refused(
                "take the commit for this repository's",
                f"it has no {MARKER}",
                hint=f'add one that says {{"name": "{settings.name}"}}, signed like everything else',
            )
    else:
        if entry.is_link or entry.size > LONGEST:
            raise Refused("take the commit for this repository's", f"its {MARKER} is no file of {LONGEST} bytes")
        try:
            marker = parse(read(entry))
        except ValueError as error:
            raise Refused("take the commit for this repository's", str(error), file=MARKER) from None
        if marker.name != settings.name:
            raise Refused(
                "take the commit for this repository's",
                f"it is {marker.name!r}, and {settings.name!r} is wanted",
                field="MINIVM_GITSYNC_NAME",
            )
        without = marker.without
    lost = sorted((kinds_on_disk(settings.zero) | had) - kinds(entry.path for entry in entries) - without)
    if lost:
        raise Refused(
            "take the commit for a whole one",
            f"it has no script in {', '.join(lost)}, unlike generation zero or the published tree",
            hint=f'where that is meant: {{"without": {json.dumps(lost)}}} in its {MARKER}',
        )
