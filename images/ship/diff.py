"""Compare two images: packages, files, size by layer. Pure: `images.engine.saved.read` reads the two sides.

difference = compare(read(stream_a, "a"), read(stream_b, "b"))
as_data(difference) -> dict for --json;  lines(difference, limit=20) -> text for people
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from images.engine.saved import Contents, PathKind, SavedLayer, SavedPath

UNITS = ("B", "kB", "MB", "GB")
WIDTH = 90


@dataclass(frozen=True, slots=True)
class PackageChange:
    """A package of one side or of both; an absent side is empty."""

    name: str
    before: str
    after: str


@dataclass(frozen=True, slots=True)
class FileChange:
    path: str
    before: SavedPath | None
    after: SavedPath | None

    @property
    def growth(self) -> int:
        return (self.after.size if self.after else 0) - (self.before.size if self.before else 0)

    @property
    def what(self) -> tuple[str, ...]:
        """The names of the properties that differ."""
        if self.before is None:
            return ("added",)
        if self.after is None:
            return ("removed",)
        pairs = {
            "kind": (self.before.kind, self.after.kind),
            "content": (self.before.content, self.after.content),
            "mode": (self.before.mode, self.after.mode),
            "owner": ((self.before.uid, self.before.gid), (self.after.uid, self.after.gid)),
        }
        return tuple(name for name, (old, new) in pairs.items() if old != new)


@dataclass(frozen=True, slots=True)
class Difference:
    a: Contents
    b: Contents
    packages: tuple[PackageChange, ...]
    files: tuple[FileChange, ...]
    shared: tuple[SavedLayer, ...]
    only_a: tuple[SavedLayer, ...]
    only_b: tuple[SavedLayer, ...]

    @property
    def same(self) -> bool:
        return self.a.image_id == self.b.image_id


def compare(a: Contents, b: Contents) -> Difference:
    """Compare two images. A directory counts if it appears, vanishes, or changes owner or mode; times never count."""
    names = sorted({*a.packages, *b.packages})
    paths = sorted({*a.entries, *b.entries})
    digests_a, digests_b = ({layer.digest for layer in side.layers} for side in (a, b))
    return Difference(
        a,
        b,
        tuple(
            PackageChange(name, a.packages.get(name, ""), b.packages.get(name, ""))
            for name in names
            if a.packages.get(name) != b.packages.get(name)
        ),
        tuple(
            FileChange(path, a.entries.get(path), b.entries.get(path))
            for path in paths
            if a.entries.get(path) != b.entries.get(path)
        ),
        tuple(layer for layer in a.layers if layer.digest in digests_b),
        tuple(layer for layer in a.layers if layer.digest not in digests_b),
        tuple(layer for layer in b.layers if layer.digest not in digests_a),
    )


def as_data(difference: Difference) -> dict[str, Any]:
    """Return the whole comparison as data."""
    return {
        "a": side(difference.a),
        "b": side(difference.b),
        "same": difference.same,
        "packages": [
            {"name": item.name, "before": item.before or None, "after": item.after or None}
            for item in difference.packages
        ],
        "files": [
            {
                "path": f"/{item.path}",
                "what": list(item.what),
                "before": entry(item.before),
                "after": entry(item.after),
            }
            for item in difference.files
        ],
        "layers": {
            "shared": [asdict(item) for item in difference.shared],
            "only_a": [asdict(item) for item in difference.only_a],
            "only_b": [asdict(item) for item in difference.only_b],
        },
    }


def side(contents: Contents) -> dict[str, Any]:
    return {"name": contents.name, "id": contents.image_id, "size": contents.size}


def entry(value: SavedPath | None) -> Mapping[str, Any] | None:
    if value is None:
        return None
    return {**asdict(value), "kind": value.kind.value, "mode": f"{value.mode:04o}"}


def lines(difference: Difference, limit: int = 20) -> Iterator[str]:
    """Yield the report for people: packages, the largest files, layers. `limit` cuts the list of files."""
    a, b = difference.a, difference.b
    yield f"{a.name}  {human(a.size)}  {a.image_id}"
    yield f"{b.name}  {human(b.size)}  {b.image_id}  ({signed(b.size - a.size)})"
    if difference.same:
        yield "the same image"
        return
    yield ""
    yield f"packages: {len(difference.packages)} differ"
    for package in difference.packages:
        yield f"  {mark(package.before, package.after)} {package.name}  {arrow(package.before, package.after)}"
    yield ""
    plain = [change for change in difference.files if not is_plain_directory(change)]
    yield f"files: {len(plain)} differ"
    heaviest = sorted(plain, key=lambda change: (-abs(change.growth), change.path))
    for change in heaviest[:limit]:
        what = "" if change.before is None or change.after is None else f"  ({', '.join(change.what)})"
        yield f"  {mark(change.before, change.after)} /{change.path}  {signed(change.growth)}{what}"
    if len(heaviest) > limit:
        yield f"  and {len(heaviest) - limit} more; --json lists all"
    yield ""
    yield f"layers: {len(difference.shared)} shared, {human(sum(item.size for item in difference.shared))}"
    for name, only in ((a.name, difference.only_a), (b.name, difference.only_b)):
        for item in only:
            yield f"  only in {name}: {human(item.size)}  {item.files} files  {short(item.created_by)}"


def is_plain_directory(change: FileChange) -> bool:
    """Tell whether a directory came or went with its files, which are reported anyway."""
    present = change.before or change.after
    return (
        (change.before is None or change.after is None) and present is not None and present.kind is PathKind.DIRECTORY
    )


def mark(before: object, after: object) -> str:
    return "+" if not before else "-" if not after else "~"


def arrow(before: str, after: str) -> str:
    return f"{before} -> {after}" if before and after else before or after


def human(size: int) -> str:
    """Format a size in decimal units, as docker does."""
    value, unit = float(size), 0
    while abs(value) >= 1000 and unit < len(UNITS) - 1:
        value, unit = value / 1000, unit + 1
    return f"{int(value)} {UNITS[unit]}" if unit == 0 else f"{value:.1f} {UNITS[unit]}"


def signed(size: int) -> str:
    return f"+{human(size)}" if size >= 0 else f"-{human(-size)}"


def short(command: str) -> str:
    text = " ".join(command.removeprefix("/bin/sh -c ").removeprefix("#(nop) ").split())
    return text if len(text) <= WIDTH else f"{text[: WIDTH - 1]}…"
