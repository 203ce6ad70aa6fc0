"""What a tree asks of its file system: to be on the disk, to change places with another, to be gone."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from gitsync.errors import GitsyncError

# Up to this many new files are synced one by one.
FEW = 64
RENAME_EXCHANGE = 2
AT_FDCWD = -100
_libc = ctypes.CDLL(None, use_errno=True)


def sync_tree(path: Path, fresh: Sequence[str]) -> None:
    """The whole tree is on its disk: the new files (`fresh`, by their paths in it), and every directory.

    One by one where they are few: syncing the file system would also wait for what jobs have written to it. Beyond that
    the one call is the quicker way.
    """
    if len(fresh) > FEW:
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
    """Swap two directories in one step: a damaged tree is replaced under its readers' feet by a whole one."""
    if _libc.renameat2(AT_FDCWD, os.fsencode(one), AT_FDCWD, os.fsencode(other), RENAME_EXCHANGE) != 0:
        number = ctypes.get_errno()
        raise GitsyncError("replace a damaged tree", os.strerror(number), file=other)


def remove(path: Path) -> None:
    """Gone, however read-only; what cannot be removed now is left to the next cycle."""
    if path.is_symlink() or path.is_file():
        with contextlib.suppress(OSError):
            path.unlink()
        return
    shutil.rmtree(path, ignore_errors=True)
