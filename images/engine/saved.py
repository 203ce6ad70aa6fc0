"""Read an image's content from the stream of `docker save`, in one pass and without unpacking to disk.

    contents = read(Chunks(engine_gives_pieces_of_bytes), "minivm/worker:latest")

Reads both formats: the old one (a directory and a layer.tar for each layer) and the OCI layout of newer engines
(blobs/sha256/...). The engine provides the stream; this module does not call it.
"""

from __future__ import annotations

import hashlib
import io
import json
import posixpath
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import IO, Any

from images.errors import ImagesError
from images.settings import installed

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


class Chunks(io.RawIOBase):
    """A readable file over an iterator of byte strings, which is what an HTTP client returns."""

    def __init__(self, pieces: Iterable[bytes]) -> None:
        self._pieces: Iterator[bytes] = iter(pieces)
        self._rest = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._rest:
            piece = next(self._pieces, None)
            if piece is None:
                return 0
            self._rest = memoryview(piece)
        count = min(len(buffer), len(self._rest))
        buffer[:count] = self._rest[:count]
        self._rest = self._rest[count:]
        return count


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
            packages = installed(tar.status)
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
        for path in [path for path in below if covered(path, hidden, opaque)]:
            del below[path]
    below.update((path, entry) for path, entry in layer.items() if not posixpath.basename(path).startswith(WHITEOUT))


def covered(path: str, hidden: set[str], opaque: set[str]) -> bool:
    if path in hidden:
        return True
    parent = posixpath.dirname(path)
    while parent:
        if parent in hidden or parent in opaque:
            return True
        parent = posixpath.dirname(parent)
    return False
