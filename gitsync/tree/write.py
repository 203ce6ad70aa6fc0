"""Making a commit's directory, and telling whether one is still what the commit says.

Files are written by us and not by `git checkout`: no attribute, filter, hook or line-ending rule of the repository
runs, and every byte is compared with the hash that the commit (and so its signature) names.

A file's time of modification is derived from its content's hash. So a look at size, mode and time tells whether a
published file is untouched without reading it; two trees with the same file can share it by a hard link, and a
Python byte-code cache is never taken for another content's. Trees are read-only; what was changed in one all the same
is seen, not linked onwards, and mended.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from gitsync import fault
from gitsync.errors import Damaged, Refused
from gitsync.repo import child
from gitsync.repo.listing import Entry
from gitsync.repo.transfer import git

BATCH = 8 << 20


def mtime_of(oid: str) -> int:
    """Between 2001 and 2018, the same for the same content everywhere."""
    return 1_000_000_000 + int(oid[:8], 16) % (1 << 29)


def mode_of(entry: Entry) -> int:
    return 0o555 if entry.is_executable else 0o444


def untouched(path: str, entry: Entry) -> bool:
    """Whether the file there is the entry, as far as its inode tells."""
    try:
        seen = os.lstat(path)
    except OSError:
        return False
    if entry.is_link:
        return stat.S_ISLNK(seen.st_mode) and seen.st_size == entry.size
    return (
        stat.S_ISREG(seen.st_mode)
        and stat.S_IMODE(seen.st_mode) == mode_of(entry)
        and seen.st_size == entry.size
        and seen.st_mtime_ns == mtime_of(entry.oid) * 1_000_000_000
    )


def damage(path: Path, entries: Iterable[Entry]) -> str | None:
    """What in a tree differs from its commit: something missing, changed or added. None for an intact tree."""
    expected = {entry.path for entry in entries}
    for entry in entries:
        if not untouched(f"{path}/{entry.path}", entry):
            return f"{entry.path} is missing or was changed"
    for base, directories, files in os.walk(path):
        # Byte code that somebody's interpreter left is untidy, not damage.
        directories[:] = [name for name in directories if name != "__pycache__"]
        links = [name for name in directories if Path(base, name).is_symlink()]
        for name in (*files, *links):
            relative = os.path.relpath(f"{base}/{name}", path)
            if relative not in expected:
                return f"{relative} was added"
    return None


@dataclass(frozen=True, slots=True)
class Written:
    """What a write had to do: the files that are new on this disk, and how many bytes they hold."""

    files: tuple[str, ...]
    bytes: int


def write_tree(
    target: Path, entries: Sequence[Entry], repository: Path, before: tuple[Path, Iterable[Entry]] | None
) -> Written:
    """The tree of `entries` at `target`, which must not exist.

    `before` is a published tree: files it has with the same content are linked, not written.
    """
    old = {} if before is None else {entry.path: entry for entry in before[1] if not entry.is_link}
    target.mkdir(mode=0o755)
    fault.at("tree-begun")
    made: set[str] = {""}
    fresh: list[Entry] = []
    for entry in entries:
        directory = entry.path.rpartition("/")[0]
        if directory not in made:
            (target / directory).mkdir(mode=0o755, parents=True, exist_ok=True)
            made.add(directory)
        same = old.get(entry.path)
        if before is None or same is None or not _link(before[0], same, entry, target):
            fresh.append(entry)
    fault.at("tree-half")
    size = 0
    for batch in batches(fresh):
        for entry, content in zip(batch, read_blobs(repository, batch), strict=True):
            _write_file(f"{target}/{entry.path}", entry, content)
            size += len(content)
    check_links(target, entries)
    fault.at("tree-written")
    return Written(tuple(entry.path for entry in fresh if not entry.is_link), size)


def _link(old_tree: Path, old: Entry, new: Entry, target: Path) -> bool:
    source = f"{old_tree}/{old.path}"
    if (old.oid, mode_of(old), new.is_link) != (new.oid, mode_of(new), False) or not untouched(source, old):
        return False
    try:
        os.link(source, f"{target}/{new.path}", follow_symlinks=False)
    except OSError:
        # Too many links, or a file system without: written instead.
        return False
    return True


def _write_file(path: str, entry: Entry, content: bytes) -> None:
    if entry.is_link:
        text = os.fsdecode(content)
        if text.startswith("/") or "\0" in text:
            raise Refused("use the commit", f"the link {entry.path!r} leaves the tree, to {text!r}")
        Path(path).symlink_to(text)
        return
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o400)
    try:
        view = memoryview(content)
        while view:
            view = view[os.write(fd, view) :]
        os.fchmod(fd, mode_of(entry))
        os.utime(fd, (mtime_of(entry.oid),) * 2)
    finally:
        os.close(fd)


def check_links(target: Path, entries: Iterable[Entry]) -> None:
    """Every link leads to something inside the tree, through whatever other links its path crosses."""
    top = os.path.realpath(target)
    for entry in entries:
        if not entry.is_link:
            continue
        path = f"{target}/{entry.path}"
        end = os.path.realpath(path)
        where = str(Path(path).readlink())
        if not end.startswith(top + "/") and end != top:
            raise Refused("use the commit", f"the link {entry.path!r} leaves the tree, to {where!r}")
        if not os.path.exists(end):  # noqa: PTH110  # Path.exists raises on a loop of links
            raise Refused("use the commit", f"the link {entry.path!r} leads to nothing ({where!r})")


def batches(entries: Sequence[Entry]) -> Iterator[list[Entry]]:
    """Lists of a few MiB: memory stays bounded, and a process per file is avoided."""
    batch: list[Entry] = []
    size = 0
    for entry in entries:
        batch.append(entry)
        size += entry.size
        if size >= BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def read_blobs(repository: Path, entries: Sequence[Entry]) -> Iterator[bytes]:
    """The entries' contents, each compared with its name."""
    asked = "".join(f"{entry.oid}\n" for entry in entries).encode()
    done = child.run(git(repository, "cat-file", "--batch"), timeout=120, stdin=asked)
    if done.status != 0:
        raise Damaged("read the commit's files", done.err or f"git ended with {done.status}", file=repository)
    at = 0
    for entry in entries:
        end = done.out.find(b"\n", at)
        header = done.out[at:end].split()
        if end < 0 or len(header) != 3 or header[1] != b"blob":
            raise Damaged("read the commit's files", f"{entry.path} ({entry.oid}) is not there", file=repository)
        content = done.out[end + 1 : end + 1 + int(header[2])]
        at = end + 2 + int(header[2])
        if blob_hash(content, len(entry.oid)) != entry.oid:
            raise Damaged("read the commit's files", f"{entry.path} is not what the commit names", file=repository)
        yield content


def blob_hash(content: bytes, digits: int) -> str:
    algorithm = hashlib.sha1 if digits == 40 else hashlib.sha256
    return algorithm(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
