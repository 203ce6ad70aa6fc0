"""The steps that readers can see: name a tree, move the link, remove old trees; and clean up interrupted ones."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from gitsync.errors import GitsyncError
from gitsync.layout import UNFINISHED, ZERO, Layout, commit_of_link, is_commit
from gitsync.tree.write import Written
from ground.files import locked

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
        _fsync(f"{path}/{name}", os.O_RDONLY | os.O_NOFOLLOW)
    for base, _, _ in os.walk(path):
        sync_directory(Path(base))


def _fsync(path: str | Path, flags: int) -> None:
    fd = os.open(path, flags | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_directory(path: Path) -> None:
    _fsync(path, os.O_RDONLY | os.O_DIRECTORY)


def sync_file_system(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if _libc.syncfs(fd) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), str(path))
    finally:
        os.close(fd)


def exchange(one: Path, other: Path) -> None:
    """Exchange two directories atomically: replaces a damaged tree while readers use it."""
    if _libc.renameat2(AT_FDCWD, os.fsencode(one), AT_FDCWD, os.fsencode(other), RENAME_EXCHANGE) != 0:
        number = ctypes.get_errno()
        raise GitsyncError("replace a damaged tree", os.strerror(number), file=other)


def remove(path: Path) -> None:
    """Remove a tree, read-only files included. The next cycle tries again for what cannot be removed now."""
    if path.is_symlink() or path.is_file():
        with contextlib.suppress(OSError):
            path.unlink()
        return
    shutil.rmtree(path, ignore_errors=True)


def unfinished(near: Path, what: str) -> Path:
    return near / f"{UNFINISHED}{what}-{os.getpid()}-{os.urandom(4).hex()}"


@contextlib.contextmanager
def beginning(layout: Layout) -> Iterator[Path]:
    """Provide a temporary path for a new tree; remove it at the end unless `name_tree` renamed it."""
    target = unfinished(layout.trees, "new")
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


def current(layout: Layout) -> str | None:
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
    temporary = unfinished(layout.root, "link")
    temporary.symlink_to(target)
    # The link's inode must be on disk before the rename, or a crash leaves an empty link.
    sync_directory(layout.root)
    temporary.rename(layout.current)
    sync_directory(layout.root)


def prunable(
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
        (each for each in trees if each != current),
        key=lambda each: order.index(each) if each in order else len(order),
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
        grave = unfinished(layout.trees, "old")
        layout.tree(commit).rename(grave)
        lease.unlink(missing_ok=True)
    finally:
        os.close(fd)
    remove(grave)
    return True


def present(layout: Layout) -> list[str]:
    with contextlib.suppress(OSError):
        return sorted(path.name for path in layout.trees.iterdir() if is_commit(path.name))
    return []


def since(layout: Layout, *, otherwise: float) -> float:
    """Return when the link last moved, by its own modification time."""
    try:
        return layout.current.lstat().st_mtime
    except OSError:
        return otherwise
