"""Remove what a user has left in a directory that all users share, with the user's rights."""

# Pathlib costs an epilog more than all it does here.
# ruff: noqa: PTH101, PTH208
import contextlib
import os
import signal
import stat
from collections.abc import Iterable

from jobs import UID

DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def opened(name: str, above: int) -> int:
    """Open a directory of the user with any mode; never follow a link."""
    descriptor = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=above)
    try:
        with contextlib.suppress(OSError):
            os.chmod(f"/proc/self/fd/{descriptor}", stat.S_IRWXU)
        return os.open(".", DIRECTORY, dir_fd=descriptor)
    finally:
        os.close(descriptor)


def sweep(top: int, patience: int) -> Iterable[object]:
    """Remove the user's files below a directory; yield a word for each.

    It works by descriptors: a name that was looked at cannot lead elsewhere when it is removed. Deeper files are moved
    up first, so that no depth costs descriptors or a stack.
    """
    # End by itself in time: the rest of the epilog must run.
    signal.alarm(patience)
    names = [entry.name for entry in os.scandir(top) if entry.stat(follow_symlinks=False).st_uid == UID]
    moved = 0
    while names:
        name = names.pop()
        try:
            os.unlink(name, dir_fd=top)
            yield "file"
            continue
        except IsADirectoryError:
            pass
        except OSError:
            continue
        with contextlib.suppress(OSError):
            folder = opened(name, top)
            try:
                for inner in os.listdir(folder):
                    with contextlib.suppress(OSError):
                        try:
                            os.unlink(inner, dir_fd=folder)
                            yield "file"
                        except IsADirectoryError:
                            moved += 1
                            higher = f".minivm-{os.getpid()}-{moved}"
                            os.close(opened(inner, folder))
                            os.rename(inner, higher, src_dir_fd=folder, dst_dir_fd=top)
                            names.append(higher)
            finally:
                os.close(folder)
            os.rmdir(name, dir_fd=top)
            yield "directory"


def has_files(place: str) -> bool:
    """Tell if the user has files in a directory. Root only looks: a child with the user's rights removes them."""
    with contextlib.suppress(OSError):
        for entry in os.scandir(place):
            with contextlib.suppress(OSError):
                if entry.stat(follow_symlinks=False).st_uid == UID:
                    return True
    return False
