"""File system operations on trees: sync to disk, exchange atomically, remove."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from gitsync.errors import GitsyncError

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
