"""The files of one layer as entries, and the reproducible tar that carries them.

Each layer is one `ADD x.tar /`: COPY would give parent directories the time of the build, a tar keeps its own times.
"""

from __future__ import annotations

import hashlib
import io
import os
import tarfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

from images.definition.spec import EntryKind, FileEntry, User
from images.errors import ImagesError, nearest

# Directories of the base that are not 0755 root; listing them otherwise would change them.
BASE_MODES = {"root": 0o700, "tmp": 0o1777, "var/tmp": 0o1777, "var/mail": 0o2775, "var/local": 0o2775}
BASE_GIDS = {"var/mail": 8, "var/local": 50}
IGNORED = {"__pycache__", ".gitkeep", ".gitignore"}


@dataclass(frozen=True, slots=True)
class Entry:
    """One path of the image; `path` has no leading slash."""

    path: str
    kind: EntryKind
    mode: int
    uid: int = 0
    gid: int = 0
    data: bytes | Path = b""
    link: str = ""

    def digest(self) -> str:
        about = f"{self.kind.value} {self.mode:o} {self.uid} {self.gid} {self.link}\0".encode()
        return hashlib.sha256(about + self.read()).hexdigest()

    def read(self) -> bytes:
        return self.data.read_bytes() if isinstance(self.data, Path) else self.data


def file(path: str, data: bytes | Path, mode: int = 0o644) -> Entry:
    return Entry(path.lstrip("/"), EntryKind.FILE, mode, data=data)


def link(path: str, to: str) -> Entry:
    return Entry(path.lstrip("/"), EntryKind.LINK, 0o777, link=to)


def tree(root: Path, to: str = "") -> list[Entry]:
    """List a directory's content, owned by root, with 0755 for directories and executables, 0644 for the rest."""
    if not root.is_dir():
        return []
    entries: list[Entry] = []
    with os.scandir(root) as listed:
        items = sorted((item for item in listed if item.name not in IGNORED), key=lambda item: item.name)
    for item in items:
        name = f"{to.strip('/')}/{item.name}".lstrip("/")
        if item.is_symlink():
            entries.append(link(name, str(Path(item).readlink())))
        elif item.is_dir():
            entries += [Entry(name, EntryKind.DIRECTORY, 0o755), *tree(Path(item), name)]
        else:
            entries.append(file(name, Path(item), 0o755 if item.stat().st_mode & 0o111 else 0o644))
    return entries


def resolve(entry: FileEntry, repository: Path, users: Mapping[str, User], shown: str) -> list[Entry]:
    """Expand an entry of a layer file to the paths that it means."""
    if entry.owner == "root":
        uid = gid = 0
    elif entry.owner in users:
        uid, gid = users[entry.owner].uid, users[entry.owner].gid
    else:
        raise ImagesError("place a file", f"no user {entry.owner!r}", file=shown, field=entry.to,
                          hint=nearest(entry.owner, users))  # fmt: skip
    to = entry.to.strip("/")
    if entry.kind is EntryKind.DIRECTORY:
        return [Entry(to, entry.kind, 0o755 if entry.mode is None else entry.mode, uid, gid)]
    if entry.kind is EntryKind.LINK:
        return [Entry(to, entry.kind, 0o777, uid, gid, link=entry.source)]
    source = repository / entry.source
    if source.is_dir():
        return [
            replace(found, uid=uid, gid=gid) for found in [Entry(to, EntryKind.DIRECTORY, 0o755), *tree(source, to)]
        ]
    if not source.is_file():
        raise ImagesError("place a file", f"{entry.source} does not exist", file=shown, field=entry.to)
    mode = entry.mode if entry.mode is not None else 0o755 if source.stat().st_mode & 0o111 else 0o644
    return [Entry(to, entry.kind, mode, uid, gid, data=source)]


def complete(entries: Iterable[Entry], below: Mapping[str, Entry]) -> list[Entry]:
    """Sort entries, let later ones replace earlier ones of the same path, and add every parent directory.

    A parent keeps the mode that this layer or one below gave it; otherwise the engine would stamp it with the time.
    """
    by_path = {entry.path: entry for entry in entries}
    for path in list(by_path):
        parent = path.rpartition("/")[0]
        while parent and parent not in by_path:
            parent_entry = below.get(parent)
            by_path[parent] = parent_entry or Entry(
                parent, EntryKind.DIRECTORY, BASE_MODES.get(parent, 0o755), 0, BASE_GIDS.get(parent, 0)
            )
            parent = parent.rpartition("/")[0]
    return [by_path[path] for path in sorted(by_path)]


def write_tar(target: IO[bytes], entries: Iterable[Entry], epoch: int) -> None:
    with tarfile.open(fileobj=target, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for entry in entries:
            info = tarfile.TarInfo(entry.path + ("/" if entry.kind is EntryKind.DIRECTORY else ""))
            info.mtime, info.mode, info.uid, info.gid = epoch, entry.mode, entry.uid, entry.gid
            if entry.kind is EntryKind.DIRECTORY:
                info.type = tarfile.DIRTYPE
                tar.addfile(info)
            elif entry.kind is EntryKind.LINK:
                info.type, info.linkname = tarfile.SYMTYPE, entry.link
                tar.addfile(info)
            elif isinstance(entry.data, Path):
                info.size = entry.data.stat().st_size
                with entry.data.open("rb") as data:
                    tar.addfile(info, data)
            else:
                info.size = len(entry.data)
                tar.addfile(info, io.BytesIO(entry.data))
