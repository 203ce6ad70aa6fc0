"""Trees on the disk: write one, publish it, remove old ones, and clean up what an interrupted cycle left.

gitsync writes the files itself instead of `git checkout`: no attribute, filter, hook or line-ending rule of the
repository runs, and every byte is compared with the hash that the commit, and so its signature, names.

A file's modification time is derived from its content's hash. So size, mode and time show whether a published file is
unchanged without reading it, two trees can share a file by a hard link, and Python never uses a byte-code cache of
other content. Trees are read-only; a file that was changed anyway is detected, not shared, and replaced.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import shutil
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from gitsync.errors import Damaged, GitsyncError, RefusedCommit
from gitsync.layout import UNFINISHED, ZERO, Layout, commit_of_link, is_commit
from gitsync.repo import child
from gitsync.repo.reader import CommitFile
from gitsync.repo.transfer import git
from ground.files import locked, sync_directory

# Bytes of file content that are read from git at a time.
BATCH = 8 << 20


def mtime_of(oid: str) -> int:
    """Derive a modification time between 2001 and 2018 from a content's hash."""
    return 1_000_000_000 + int(oid[:8], 16) % (1 << 29)


def mode_of(entry: CommitFile) -> int:
    return 0o555 if entry.is_executable else 0o444


def is_untouched(path: str, entry: CommitFile) -> bool:
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


def find_damage(path: Path, entries: Iterable[CommitFile]) -> str | None:
    """Describe the first file of a tree that is missing, changed or added; None for an intact tree."""
    expected = {entry.path for entry in entries}
    for entry in entries:
        if not is_untouched(f"{path}/{entry.path}", entry):
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
    for batch in split_batches(fresh):
        for entry, content in zip(batch, read_blobs(repository, batch), strict=True):
            _write_file(f"{target}/{entry.path}", entry, content)
            size += len(content)
    check_links(target, entries)
    return Written(tuple(entry.path for entry in fresh if not entry.is_link), size)


def _link(old_tree: Path, old: CommitFile, new: CommitFile, target: Path) -> bool:
    source = f"{old_tree}/{old.path}"
    if (old.oid, mode_of(old), new.is_link) != (new.oid, mode_of(new), False) or not is_untouched(source, old):
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


def split_batches(entries: Sequence[CommitFile]) -> Iterator[list[CommitFile]]:
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


# File system operations on trees: sync to disk, exchange atomically, remove.

# Up to this many new files are synced one by one; more are synced with the whole file system.
MAX_SINGLE_SYNCS = 64
RENAME_EXCHANGE = 2
AT_FDCWD = -100
_libc = ctypes.CDLL(None, use_errno=True)


def sync_tree(path: Path, fresh: Sequence[str]) -> None:
    """Sync a tree to disk: its new files (`fresh`, paths inside the tree) and every directory.

    Few files are synced one by one: syncing the file system would also wait for what jobs wrote to it. For many files
    that single call is faster.
    """
    if len(fresh) > MAX_SINGLE_SYNCS:
        sync_file_system(path)
        return
    for name in fresh:
        _sync_file(f"{path}/{name}")
    for base, _, _ in os.walk(path):
        sync_directory(Path(base))


def _sync_file(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_file_system(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if _libc.syncfs(fd) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), str(path))
    finally:
        os.close(fd)


def exchange(path: Path, other: Path) -> None:
    """Exchange two directories atomically: replaces a damaged tree while readers use it."""
    if _libc.renameat2(AT_FDCWD, os.fsencode(path), AT_FDCWD, os.fsencode(other), RENAME_EXCHANGE) != 0:
        number = ctypes.get_errno()
        raise GitsyncError("replace a damaged tree", os.strerror(number), file=other)


def remove(path: Path) -> None:
    """Remove a tree, read-only files included. The next cycle tries again for what cannot be removed now."""
    if path.is_symlink() or path.is_file():
        with contextlib.suppress(OSError):
            path.unlink()
        return
    shutil.rmtree(path, ignore_errors=True)


def name_unfinished(near: Path, what: str) -> Path:
    return near / f"{UNFINISHED}{what}-{os.getpid()}-{os.urandom(4).hex()}"


@contextlib.contextmanager
def beginning(layout: Layout) -> Iterator[Path]:
    """Provide a temporary path for a new tree; remove it at the end unless `name_tree` renamed it."""
    target = name_unfinished(layout.trees, "new")
    try:
        yield target
    finally:
        if target.exists():
            remove(target)


def prepare(layout: Layout) -> None:
    """Make gitsync's directories."""
    for directory, mode in (
        (layout.root, 0o755),
        (layout.trees, 0o755),
        (layout.leases, 0o755),
        # The runner writes reports here as root; no other user may report for the node.
        (layout.reports, 0o700),
    ):
        try:
            directory.mkdir(mode=mode, parents=True, exist_ok=True)
        except OSError as error:
            raise GitsyncError(
                "make gitsync's directories", error.strerror or str(error), file=directory,
                hint="MINIVM_GITSYNC_ROOT names another place",
            ) from error  # fmt: skip


def heal(layout: Layout) -> list[str]:
    """Remove what an interrupted cycle left behind. The caller holds the lock, so none of it is in use."""
    actions = []
    for directory in (layout.root, layout.trees, layout.leases):
        for path in directory.iterdir():
            if path.name.startswith(UNFINISHED):
                remove(path)
                actions.append(f"removed {path.name}")
    for path in layout.root.glob(".*.json.*"):
        path.unlink(missing_ok=True)
    if layout.repository.is_dir():
        # No git process runs under the lock: these files belong to a dead one and would block the next.
        for base, _, files in os.walk(layout.repository):
            for name in files:
                if name.endswith(".lock") or name.startswith(("tmp_", ".tmp-")):
                    Path(base, name).unlink(missing_ok=True)
                    actions.append(f"removed git's {name}")
    for path in layout.leases.iterdir():
        if is_commit(path.name) and not layout.tree(path.name).is_dir():
            path.unlink(missing_ok=True)
    return actions


def read_current(layout: Layout) -> str | None:
    """Return the commit that readers get; None if the link is missing, foreign or leads nowhere."""
    try:
        commit = commit_of_link(str(layout.current.readlink()), layout.zero)
    except OSError:
        return None
    return commit if commit is not None and layout.tree(commit).is_dir() else None


def name_tree(layout: Layout, finished: Path, commit: str, written: Written) -> None:
    """Sync `finished` to disk, then rename it to trees/<commit>."""
    sync_tree(finished, written.files)
    # Make the lease before the tree: a reader never finds a tree that it cannot lock.
    os.close(os.open(layout.lease(commit), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    target = layout.tree(commit)
    if target.exists():
        exchange(finished, target)
        remove(finished)
    else:
        finished.rename(target)
    sync_directory(layout.trees)


def point(layout: Layout, commit: str) -> None:
    """Move the link atomically: readers get the old tree or the new one."""
    target = str(layout.zero) if commit == ZERO else f"trees/{commit}"
    temporary = name_unfinished(layout.root, "link")
    temporary.symlink_to(target)
    # The link's inode must be on disk before the rename, or a crash leaves an empty link.
    sync_directory(layout.root)
    temporary.rename(layout.current)
    sync_directory(layout.root)


def list_prunable(
    trees: Iterable[str], current: str | None, history: Sequence[tuple[str, float]], keep: int, keep_seconds: float,
    now: float,
) -> list[str]:  # fmt: skip
    """Return the trees that may be removed. Pure.

    `history` lists commits with the time at which each became current, newest first. Kept are the current tree, the
    `keep` most recent trees, and each that stopped being current less than `keep_seconds` ago, for readers that cannot
    lock.
    """
    order = [commit for commit, _ in history]
    ended: dict[str, float] = {}
    successor = now
    for commit, began in history:
        ended[commit] = successor
        successor = began
    candidates = sorted(
        (each for each in trees if each != current), key=lambda each: order.index(each) if each in order else len(order)
    )
    spare = candidates[max(keep - 1, 0) :]
    return [each for each in spare if now - ended.get(each, 0.0) >= keep_seconds]


def remove_tree(layout: Layout, commit: str) -> bool:
    """Remove a tree unless a reader holds it: first its name, then its lease, then its files. Return success."""
    lease = layout.lease(commit)
    fd = os.open(lease, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if not locked(fd):
            return False
        grave = name_unfinished(layout.trees, "old")
        layout.tree(commit).rename(grave)
        lease.unlink(missing_ok=True)
    finally:
        os.close(fd)
    remove(grave)
    return True


def list_trees(layout: Layout) -> list[str]:
    with contextlib.suppress(OSError):
        return sorted(path.name for path in layout.trees.iterdir() if is_commit(path.name))
    return []


def read_link_time(layout: Layout, *, otherwise: float) -> float:
    """Return when the link last moved, by its own modification time."""
    try:
        return layout.current.lstat().st_mtime
    except OSError:
        return otherwise
