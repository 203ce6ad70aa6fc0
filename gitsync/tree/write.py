"""Write a commit's directory, and detect whether a directory still matches its commit.

gitsync writes the files itself instead of `git checkout`: no attribute, filter, hook or line-ending rule of the
repository runs, and every byte is compared with the hash that the commit, and so its signature, names.

A file's modification time is derived from its content's hash. So size, mode and time show whether a published file is
unchanged without reading it, two trees can share a file by a hard link, and Python never uses a byte-code cache of
other content. Trees are read-only; a file that was changed anyway is detected, not shared, and replaced.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from gitsync.errors import Damaged, RefusedCommit
from gitsync.repo import child
from gitsync.repo.listing import CommitFile
from gitsync.repo.transfer import git

# Bytes of file content that are read from git at a time.
BATCH = 8 << 20


def mtime_of(oid: str) -> int:
    """Derive a modification time between 2001 and 2018 from a content's hash."""
    return 1_000_000_000 + int(oid[:8], 16) % (1 << 29)


def mode_of(entry: CommitFile) -> int:
    return 0o555 if entry.is_executable else 0o444


def untouched(path: str, entry: CommitFile) -> bool:
    """Tell by its inode whether the file at `path` matches the entry."""
    try:
        inode = os.lstat(path)
    except OSError:
        return False
    if entry.is_link:
        return stat.S_ISLNK(inode.st_mode) and inode.st_size == entry.size
    return (
        stat.S_ISREG(inode.st_mode)
        and stat.S_IMODE(inode.st_mode) == mode_of(entry)
        and inode.st_size == entry.size
        and inode.st_mtime_ns == mtime_of(entry.oid) * 1_000_000_000
    )


def damage(path: Path, entries: Iterable[CommitFile]) -> str | None:
    """Describe the first file of a tree that is missing, changed or added; None for an intact tree."""
    expected = {entry.path for entry in entries}
    for entry in entries:
        if not untouched(f"{path}/{entry.path}", entry):
            return f"{entry.path} is missing or was changed"
    for base, directories, files in os.walk(path):
        # Byte code that an interpreter left is not damage.
        directories[:] = [name for name in directories if name != "__pycache__"]
        links = [name for name in directories if Path(base, name).is_symlink()]
        for name in (*files, *links):
            relative = os.path.relpath(f"{base}/{name}", path)
            if relative not in expected:
                return f"{relative} was added"
    return None


@dataclass(frozen=True, slots=True)
class Written:
    """The files that a write created instead of linking, and how many bytes they hold."""

    files: tuple[str, ...]
    bytes: int


def write_tree(
    target: Path, entries: Sequence[CommitFile], repository: Path, before: tuple[Path, Iterable[CommitFile]] | None
) -> Written:
    """Write the tree of `entries` to `target`, which must not exist.

    `before` is a published tree: files of the same content are linked from it instead of written.
    """
    old = {} if before is None else {entry.path: entry for entry in before[1] if not entry.is_link}
    target.mkdir(mode=0o755)
    created: set[str] = {""}
    fresh: list[CommitFile] = []
    for entry in entries:
        directory = entry.path.rpartition("/")[0]
        if directory not in created:
            (target / directory).mkdir(mode=0o755, parents=True, exist_ok=True)
            created.add(directory)
        same = old.get(entry.path)
        if before is None or same is None or not _link(before[0], same, entry, target):
            fresh.append(entry)
    size = 0
    for batch in batches(fresh):
        for entry, content in zip(batch, read_blobs(repository, batch), strict=True):
            _write_file(f"{target}/{entry.path}", entry, content)
            size += len(content)
    check_links(target, entries)
    return Written(tuple(entry.path for entry in fresh if not entry.is_link), size)


def _link(old_tree: Path, old: CommitFile, new: CommitFile, target: Path) -> bool:
    source = f"{old_tree}/{old.path}"
    if (old.oid, mode_of(old), new.is_link) != (new.oid, mode_of(new), False) or not untouched(source, old):
        return False
    try:
        os.link(source, f"{target}/{new.path}", follow_symlinks=False)
    except OSError:
        # The file has too many links, or the file system has no hard links: write it instead.
        return False
    return True


def _write_file(path: str, entry: CommitFile, content: bytes) -> None:
    if entry.is_link:
        text = os.fsdecode(content)
        if text.startswith("/") or "\0" in text:
            raise RefusedCommit("use the commit", f"the link {entry.path!r} leaves the tree, to {text!r}")
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


def check_links(target: Path, entries: Iterable[CommitFile]) -> None:
    """Refuse a symbolic link that does not lead to something inside the tree, following links on its way."""
    top = os.path.realpath(target)
    for entry in entries:
        if not entry.is_link:
            continue
        path = f"{target}/{entry.path}"
        end = os.path.realpath(path)
        destination = str(Path(path).readlink())
        if not end.startswith(top + "/") and end != top:
            raise RefusedCommit("use the commit", f"the link {entry.path!r} leaves the tree, to {destination!r}")
        if not os.path.exists(end):  # noqa: PTH110  # Path.exists raises on a loop of links
            raise RefusedCommit("use the commit", f"the link {entry.path!r} leads to nothing ({destination!r})")


def batches(entries: Sequence[CommitFile]) -> Iterator[list[CommitFile]]:
    """Split entries into lists of a few MiB: bounded memory, and far fewer processes than files."""
    batch: list[CommitFile] = []
    size = 0
    for entry in entries:
        batch.append(entry)
        size += entry.size
        if size >= BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def read_blobs(repository: Path, entries: Sequence[CommitFile]) -> Iterator[bytes]:
    """Yield the contents of the entries, each compared with its hash."""
    hashes = "".join(f"{entry.oid}\n" for entry in entries).encode()
    done = child.run(git(repository, "cat-file", "--batch"), timeout=120, stdin=hashes)
    if done.status != 0:
        raise Damaged("read the commit's files", done.err or f"git ended with {done.status}", file=repository)
    at = 0
    for entry in entries:
        end = done.out.find(b"\n", at)
        header = done.out[at:end].split()
        if end < 0 or len(header) != 3 or header[1] != b"blob":
            raise Damaged("read the commit's files", f"{entry.path} ({entry.oid}) is missing", file=repository)
        content = done.out[end + 1 : end + 1 + int(header[2])]
        at = end + 2 + int(header[2])
        if blob_hash(content, len(entry.oid)) != entry.oid:
            raise Damaged("read the commit's files", f"{entry.path} does not match its hash", file=repository)
        yield content


def blob_hash(content: bytes, digits: int) -> str:
    algorithm = hashlib.sha1 if digits == 40 else hashlib.sha256
    return algorithm(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
