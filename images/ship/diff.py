"""Compare two images: packages, files, size by layer. Pure: the engine's streams of `docker save` go in.

Reads both formats of `docker save` in one pass and without unpacking to disk: the old one (a directory and a layer.tar
for each layer) and the OCI layout of newer engines (blobs/sha256/...).
"""

from __future__ import annotations

import hashlib
import io
import json
import posixpath
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import IO, Any

from images import ImagesError
from images.engine.store import Chunks
from images.settings import read_installed

DPKG_STATUS = "var/lib/dpkg/status"
WHITEOUT = ".wh."
OPAQUE = ".wh..wh..opq"
CHUNK = 1 << 20
# Larger members are layers: manifests and configurations are a few kilobytes.
LARGEST_JSON = 8 << 20


class PathKind(StrEnum):
    FILE = "file"
    DIRECTORY = "directory"
    SYMLINK = "symlink"
    HARDLINK = "hardlink"
    DEVICE = "device"


@dataclass(frozen=True, slots=True)
class SavedPath:
    """One path. `content` is the SHA-256 of a file's bytes, the target of a link, empty for the rest."""

    kind: PathKind
    mode: int
    uid: int
    gid: int
    size: int
    content: str


@dataclass(frozen=True, slots=True)
class SavedLayer:
    digest: str
    created_by: str
    size: int
    files: int


@dataclass(frozen=True, slots=True)
class Contents:
    name: str
    image_id: str
    layers: tuple[SavedLayer, ...]
    entries: Mapping[str, SavedPath]
    packages: Mapping[str, str]

    @property
    def size(self) -> int:
        return sum(layer.size for layer in self.layers)


@dataclass(frozen=True, slots=True)
class LayerTar:
    """One layer of the stream: its entries, whiteouts among them, and dpkg's status if it has one."""

    entries: Mapping[str, SavedPath]
    status: str | None


def read(stream: IO[bytes] | Chunks, name: str) -> Contents:
    """Read one image; `name` is what errors and reports call it."""
    layers: dict[str, LayerTar] = {}
    links: dict[str, str] = {}
    documents: dict[str, Any] = {}
    try:
        # Pieces are of any length, and tarfile's stream mode wants each read in full.
        whole = io.BufferedReader(stream, CHUNK) if isinstance(stream, Chunks) else stream
        with tarfile.open(fileobj=whole, mode="r|*") as outer:
            for member in outer:
                if member.issym() or member.islnk():
                    base = posixpath.dirname(member.name) if member.issym() else ""
                    links[member.name] = posixpath.normpath(posixpath.join(base, member.linkname))
                source = outer.extractfile(member) if member.isreg() else None
                if source is None:
                    continue
                if member.size <= LARGEST_JSON and source.peek(1)[:1] in (b"{", b"["):  # type: ignore[attr-defined]  # extractfile gives a BufferedReader
                    documents[member.name] = json.load(source)
                elif is_layer(member.name):
                    layers[member.name] = read_layer(source)
    except (tarfile.TarError, EOFError, ValueError) as error:
        raise ImagesError(f"read image {name}", f"the engine's stream is broken: {error}") from error
    if "manifest.json" not in documents or len(documents["manifest.json"]) != 1:
        raise ImagesError(f"read image {name}", "the engine's stream does not hold exactly one image")
    (manifest,) = documents["manifest.json"]
    config = documents[manifest["Config"]]
    parts = [layers[links.get(path, path)] for path in manifest["Layers"]]
    return assemble(name, manifest["Config"], config, parts)


def is_layer(path: str) -> bool:
    return path.endswith("/layer.tar") or path.startswith("blobs/sha256/")


def read_layer(source: IO[bytes]) -> LayerTar:
    entries: dict[str, SavedPath] = {}
    status: str | None = None
    with tarfile.open(fileobj=source, mode="r|*") as layer:
        for member in layer:
            path = posixpath.normpath(member.name).lstrip("/")
            content = ""
            if member.isreg():
                data = layer.extractfile(member)
                assert data is not None  # a regular member has data
                digest, kept = hashlib.sha256(), bytearray()
                while chunk := data.read(CHUNK):
                    digest.update(chunk)
                    if path == DPKG_STATUS:
                        kept += chunk
                content = digest.hexdigest()
                status = kept.decode(errors="replace") if path == DPKG_STATUS else status
            elif member.issym() or member.islnk():
                content = member.linkname
            size = member.size if member.isreg() else 0
            entries[path] = SavedPath(kind_of(member), member.mode & 0o7777, member.uid, member.gid, size, content)
    entries.pop(".", None)
    return LayerTar(entries, status)


def kind_of(member: tarfile.TarInfo) -> PathKind:
    if member.isdir():
        return PathKind.DIRECTORY
    if member.issym():
        return PathKind.SYMLINK
    if member.islnk():
        return PathKind.HARDLINK
    return PathKind.FILE if member.isreg() else PathKind.DEVICE


def assemble(name: str, config_path: str, config: Mapping[str, Any], parts: Iterable[LayerTar]) -> Contents:
    tars = list(parts)
    digests: list[str] = config["rootfs"]["diff_ids"]
    if len(digests) != len(tars):
        raise ImagesError(f"read image {name}", f"{len(digests)} layers configured, {len(tars)} in the stream")
    commands = [step.get("created_by", "") for step in config.get("history", []) if not step.get("empty_layer")]
    commands += [""] * (len(tars) - len(commands))  # history is optional
    layers = [
        SavedLayer(digest, command, sum(item.size for item in tar.entries.values()), count_files(tar))
        for digest, command, tar in zip(digests, commands, tars, strict=False)
    ]
    merged: dict[str, SavedPath] = {}
    packages: Mapping[str, str] = {}
    for tar in tars:
        merge(merged, tar.entries)
        if tar.status is not None:
            packages = read_installed(tar.status)
    image_id = posixpath.basename(config_path).removesuffix(".json")
    return Contents(name, f"sha256:{image_id}", tuple(layers), merged, packages)


def count_files(tar: LayerTar) -> int:
    return sum(not posixpath.basename(path).startswith(WHITEOUT) for path in tar.entries)


def merge(below: dict[str, SavedPath], layer: Mapping[str, SavedPath]) -> None:
    """Apply a layer: first remove what its whiteouts hide in the layers below, then add its entries."""
    hidden: set[str] = set()
    opaque: set[str] = set()
    for path, entry in layer.items():
        directory, base = posixpath.split(path)
        if base == OPAQUE:
            opaque.add(directory)
        elif base.startswith(WHITEOUT):
            hidden.add(posixpath.join(directory, base.removeprefix(WHITEOUT)))
        elif entry.kind is not PathKind.DIRECTORY and path in below and below[path].kind is PathKind.DIRECTORY:
            hidden.add(path)  # a file in a directory's place hides what was in the directory
    if hidden or opaque:
        for path in [path for path in below if is_covered(path, hidden, opaque)]:
            del below[path]
    below.update((path, entry) for path, entry in layer.items() if not posixpath.basename(path).startswith(WHITEOUT))


def is_covered(path: str, hidden: set[str], opaque: set[str]) -> bool:
    if path in hidden:
        return True
    parent = posixpath.dirname(path)
    while parent:
        if parent in hidden or parent in opaque:
            return True
        parent = posixpath.dirname(parent)
    return False


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
        "a": describe_side(difference.a),
        "b": describe_side(difference.b),
        "same": difference.same,
        "packages": [
            {"name": item.name, "before": item.before or None, "after": item.after or None}
            for item in difference.packages
        ],
        "files": [
            {
                "path": f"/{item.path}",
                "what": list(item.what),
                "before": describe_entry(item.before),
                "after": describe_entry(item.after),
            }
            for item in difference.files
        ],
        "layers": {
            "shared": [asdict(item) for item in difference.shared],
            "only_a": [asdict(item) for item in difference.only_a],
            "only_b": [asdict(item) for item in difference.only_b],
        },
    }


def describe_side(contents: Contents) -> dict[str, Any]:
    return {"name": contents.name, "id": contents.image_id, "size": contents.size}


def describe_entry(value: SavedPath | None) -> Mapping[str, Any] | None:
    if value is None:
        return None
    return {**asdict(value), "kind": value.kind.value, "mode": f"{value.mode:04o}"}


def format_report(difference: Difference, limit: int = 20) -> Iterator[str]:
    """Yield the report for people: packages, the largest files, layers. `limit` cuts the list of files."""
    a, b = difference.a, difference.b
    yield f"{a.name}  {format_size(a.size)}  {a.image_id}"
    yield f"{b.name}  {format_size(b.size)}  {b.image_id}  ({show_signed(b.size - a.size)})"
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
        yield f"  {mark(change.before, change.after)} /{change.path}  {show_signed(change.growth)}{what}"
    if len(heaviest) > limit:
        yield f"  and {len(heaviest) - limit} more; --json lists all"
    yield ""
    yield f"layers: {len(difference.shared)} shared, {format_size(sum(item.size for item in difference.shared))}"
    for name, only in ((a.name, difference.only_a), (b.name, difference.only_b)):
        for item in only:
            yield f"  only in {name}: {format_size(item.size)}  {item.files} files  {shorten(item.created_by)}"


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


def format_size(size: int) -> str:
    """Format a size in decimal units, as docker does."""
    value, unit = float(size), 0
    while abs(value) >= 1000 and unit < len(UNITS) - 1:
        value, unit = value / 1000, unit + 1
    return f"{int(value)} {UNITS[unit]}" if unit == 0 else f"{value:.1f} {UNITS[unit]}"


def show_signed(size: int) -> str:
    return f"+{format_size(size)}" if size >= 0 else f"-{format_size(-size)}"


def shorten(command: str) -> str:
    text = " ".join(command.removeprefix("/bin/sh -c ").removeprefix("#(nop) ").split())
    return text if len(text) <= WIDTH else f"{text[: WIDTH - 1]}…"
